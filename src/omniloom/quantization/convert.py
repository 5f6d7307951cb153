"""Replacing the layers of a live or meta model by quantized ones, and back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from omniloom.errors import ConfigError, shorten, suggest
from omniloom.quantization.expert_stack import ExpertStack
from omniloom.quantization.experts import (
    dequantize_experts,
    expert_parameters,
    experts_shell,
    quantize_experts,
    stack_shape,
)
from omniloom.quantization.linear import QuantizedLinear, is_plain_linear
from omniloom.quantization.scheme import LayerScheme

# the experts module, the stack's name, its scheme
_Target = tuple[nn.Module, str, LayerScheme]


def quantize_modules(
    model: nn.Module,
    schemes: Mapping[str, LayerScheme],
    *,
    device: torch.device | str | None = None,
    release: bool = True,
) -> None:
    """Quantize the Linears, experts modules and expert stacks named by path, one layer at a time, in place.

    ``device``: where the quantized layers go (default: where each is). ``release``: drop each dense weight as soon as
    its layer is quantized, also for others who hold the old layer; the peak is then one layer. A layer is replaced
    whole or not at all; those before a failing one stay quantized. A Linear under several
    paths is replaced under all of them.
    Raises ``ConfigError``, before anything is changed, for a path that is no such layer or a shape that its codec
    cannot hold.
    """
    linears, experts = _resolve(model, schemes)
    places = _places(model)
    for layer, scheme in linears.items():
        made = QuantizedLinear.from_dense(layer, scheme, device=device)
        _put(made, layer, places)
        if release:
            layer._parameters["weight"] = None
    for module, name, scheme in experts:
        quantize_experts(module, {name: scheme}, device=device)


def make_shells(model: nn.Module, schemes: Mapping[str, LayerScheme], compute_dtype: torch.dtype) -> list[str]:
    """Replace layers, named as for ``quantize_modules``, by ones without fields; return the paths of those.

    Fields are set by ``set_fields`` of each; biases stay the Parameters they were. Raises ``ConfigError`` likewise.
    """
    linears, experts = _resolve(model, schemes)
    places = _places(model)
    for layer, scheme in linears.items():
        shell = QuantizedLinear(
            layer.in_features, layer.out_features, scheme, None, layer.bias, compute_dtype=compute_dtype
        )
        _put(shell, layer, places)
    for module, name, scheme in experts:
        experts_shell(module, name, scheme, compute_dtype)
    return missing(model)


def missing(model: nn.Module) -> list[str]:
    """Return the paths of quantized layers and stacks with a field that has not been set."""
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, (QuantizedLinear, ExpertStack)) and module.missing_fields
    ]


def dequantize_(model: nn.Module) -> None:
    """Make plain layers again, in each layer's compute dtype, one at a time. Activations are no longer quantized."""
    places = _places(model)
    for module in list(model.modules()):
        if hasattr(type(module), "quantized_base"):
            dequantize_experts(module)
        elif isinstance(module, QuantizedLinear):
            _put(_plain(module), module, places)


def _plain(layer: QuantizedLinear) -> nn.Linear:
    with torch.device("meta"):
        plain = nn.Linear(layer.in_features, layer.out_features, bias=False)
    plain.weight = nn.Parameter(layer.dense_weight(), requires_grad=False)
    plain.register_parameter("bias", layer.bias)
    return plain


_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


_Places = dict[nn.Module, list[tuple[nn.Module, str]]]


def _places(model: nn.Module) -> _Places:
    """Return under which parents and names each module is."""
    found: _Places = {}
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None:
                found.setdefault(child, []).append((parent, name))
    return found


def _put(new: nn.Module, old: nn.Module, places: _Places) -> None:
    """Put a layer wherever the old one is, with torch's own hooks and the training flag of that."""
    for name in _HOOKS:
        new.__dict__[name] = old.__dict__[name]
    new.training = old.training
    for parent, name in places.get(old, []):
        parent._modules[name] = new


def _resolve(
    model: nn.Module, schemes: Mapping[str, LayerScheme]
) -> tuple[dict[nn.Linear, LayerScheme], list[_Target]]:
    modules = dict(model.named_modules(remove_duplicate=False))
    linears: dict[nn.Linear, LayerScheme] = {}
    experts: list[_Target] = []
    problems: list[str] = []
    for path, scheme in schemes.items():
        parent_path, _, name = path.rpartition(".")
        parent, module = modules.get(parent_path), modules.get(path)
        if is_plain_linear(module):
            if module is model:
                problems.append(f"{path!r} is the model itself")
                continue
            if linears.setdefault(module, scheme) != scheme:
                problems.append(f"{path!r} is also under another path, with another scheme")
            shapes = [(module.out_features, module.in_features)]
        elif module is not None and (names := expert_parameters(module)):
            experts.extend((module, each, scheme) for each in names)
            shapes = [stack_shape(module, each) for each in names]
        elif parent is not None and name in expert_parameters(parent):
            experts.append((parent, name, scheme))
            shapes = [stack_shape(parent, name)]
        else:
            what = f"a {type(module).__name__}" if module is not None else f"not there{suggest(path, modules)}"
            problems.append(f"{path!r} is {what}")
            continue
        for shape in shapes:
            if problem := scheme.codec.problem(shape):
                problems.append(f"{path!r} {shape}: {problem}")
    if problems:
        raise ConfigError(f"cannot be quantized: {shorten(problems)}")
    return linears, experts
