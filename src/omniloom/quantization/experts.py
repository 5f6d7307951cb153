"""Stacked expert weights of transformers' mixture-of-experts modules, quantized expert by expert.

The module keeps its own ``forward`` (the eager one: others hand whole stacks to a grouped product). Where it indexes a
stack and multiplies, it meets a stand-in that decodes one expert.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from omniloom.errors import ConfigError
from omniloom.quantization.codecs.base import Shape
from omniloom.quantization.expert_stack import ExpertStack
from omniloom.quantization.scheme import LayerScheme

_STACKS = ("gate_up_proj", "up_proj", "down_proj")


def expert_parameters(module: nn.Module) -> list[str]:
    """Return the names of a module's stacked expert weights that can be quantized; empty for any other module.

    Known by what transformers' ``use_experts_implementation`` leaves on the module and its class.
    """
    if "is_transposed" not in vars(module) or not hasattr(type(module).forward, "__wrapped__"):
        return []
    found = []
    for name in _STACKS:
        value = module._parameters.get(name, module._modules.get(name))
        if isinstance(value, ExpertStack) or (value is not None and value.dim() == 3):  # type: ignore[operator]
            found.append(name)
    return found


def stack_shape(module: nn.Module, name: str) -> Shape:
    """Return (N, K) of each matrix of the stack ``name``, whichever way round the module stores them.

    Raises ``ConfigError`` if the module has no such stack, or one that is quantized already.
    """
    _, first, second = _parameter(module, name).shape
    return (second, first) if module.is_transposed else (first, second)


_eager_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _eager_class(base: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass, one per class, that always runs the class's own forward."""
    if base in _eager_classes:
        return _eager_classes[base]
    eager = base.forward.__wrapped__  # type: ignore[attr-defined]

    @functools.wraps(eager)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return eager(self, *args, **kwargs)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        return _rebuild, (base, vars(self))

    body = {
        "forward": forward,
        "__module__": base.__module__,
        "__doc__": base.__doc__,
        "__reduce_ex__": reduce,
        "quantized_base": base,
    }
    return _eager_classes.setdefault(base, type(f"Quantized{base.__name__}", (base,), body))


def _rebuild(base: type[nn.Module], state: dict[str, Any]) -> nn.Module:
    kind = _eager_class(base)
    module = kind.__new__(kind)
    nn.Module.__setstate__(module, dict(state))
    return module


def put_stack(module: nn.Module, name: str, stack: ExpertStack) -> None:
    """Put a stack in the place of the Parameter ``name`` and keep the module on its eager path."""
    module._parameters.pop(name, None)
    module._modules[name] = stack
    if not hasattr(type(module), "quantized_base"):
        module.__class__ = _eager_class(type(module))


def quantize_experts(
    module: nn.Module, schemes: Mapping[str, LayerScheme], *, device: torch.device | str | None = None
) -> None:
    """Quantize the stacks named in ``schemes`` of one experts module, one expert at a time.

    Raises ``ConfigError`` if the module has no such stack.
    """
    for name, scheme in schemes.items():
        stack = _parameter(module, name)
        put_stack(
            module,
            name,
            ExpertStack.from_dense(stack, scheme, transposed=bool(module.is_transposed), device=device),
        )


def experts_shell(module: nn.Module, name: str, scheme: LayerScheme, compute_dtype: torch.dtype) -> None:
    """Replace a stack by one whose fields are still to come."""
    experts, shape = len(_parameter(module, name)), stack_shape(module, name)
    transposed = bool(module.is_transposed)
    put_stack(
        module, name, ExpertStack(experts, shape, scheme, None, compute_dtype=compute_dtype, transposed=transposed)
    )


def dequantize_experts(module: nn.Module) -> None:
    """Give an experts module its Parameters and its class back."""
    for name, stack in list(module._modules.items()):
        if isinstance(stack, ExpertStack):
            parameter = nn.Parameter(stack.dense_weight(), requires_grad=False)
            del module._modules[name]
            module.register_parameter(name, parameter)
    base = getattr(type(module), "quantized_base", None)
    if base is not None:
        module.__class__ = base


def _parameter(module: nn.Module, name: str) -> torch.Tensor:
    known = expert_parameters(module)
    if isinstance(module._modules.get(name), ExpertStack):
        raise ConfigError(f"{type(module).__name__}.{name} is quantized already")
    if name not in known or name not in module._parameters:
        raise ConfigError(
            f"{type(module).__name__} has no stacked expert weight {name!r} that can be quantized"
            f" (it has {', '.join(known) or 'none'})"
        )
    parameter = module._parameters[name]
    assert parameter is not None
    return parameter
