"""Which layers of a model a method quantizes. Works on a model without weights (on the meta device)."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from omniloom.errors import ConfigError, shorten, suggest
from omniloom.quantization.matching import Matcher, check_shards, layer_names
from omniloom.quantization.methods import OnlineConfig, QuantizationConfig
from omniloom.quantization.never import FAMILIES, Never, first_rule, never_rules
from omniloom.quantization.scheme import LayerScheme

MINIMUM = 16  # a matrix with a smaller side saves nothing, and no matmul of small numbers takes it
EXPERT_STACKS = ("gate_up_proj", "up_proj", "down_proj")  # (experts, out, in), as transformers 5 stores them


@dataclasses.dataclass(frozen=True)
class Selection:
    """What was decided for every layer of one component.

    ``quantized``: path of a Linear, or of a stacked parameter of experts (also in ``stacks``, with their number), and
    its scheme. ``skipped``: path and reason. ``unmatched``: entries of ignore lists that matched nothing here, as
    ``key: entry``; with several components see ``matching.unmatched_everywhere``.
    """

    component: str
    quantized: Mapping[str, LayerScheme]
    skipped: Mapping[str, str]
    unmatched: tuple[str, ...] = ()
    stacks: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _Layer:
    path: str
    shape: tuple[int, int]
    class_name: str
    problem: str | None  # why its weight cannot be replaced
    experts: int = 0


def select_layers(
    model: nn.Module,
    config: QuantizationConfig,
    *,
    component: str = "transformer",
    family_name: str = "generic",
    denoiser: bool | None = None,
    never: Iterable[Never] | None = None,
    source_names: Mapping[str, Sequence[str]] | None = None,
) -> Selection:
    """Decide for every Linear and every stack of experts whether ``config`` quantizes it.

    ``denoiser``: whether the model is the family's denoiser (default: by the component's name). ``never`` replaces the
    rules of what stays in high precision. ``source_names``: path -> the names that the checkpoint has for the layer;
    several if the model joins them in one matrix.

    Raises ``ConfigError`` for a config that is for weights which are quantized already, if no layer is left to
    quantize, if layers that the config names do not exist, and if a list ignores only a part of a joined matrix.
    """
    config.check_online()
    if denoiser is None:
        denoiser = re.fullmatch(r"(transformer|unet)(_\d+)?", component) is not None
    everything = isinstance(config, OnlineConfig) and config.all_layers
    if everything:
        rules: tuple[Never, ...] = ()
    else:
        rules = never_rules(family_name, denoiser=denoiser) if never is None else tuple(never)
    strict = denoiser and never is None and not everything and family_name not in FAMILIES
    lists = Matcher(config.ignore_lists())
    quantized: dict[str, LayerScheme] = {}
    skipped: dict[str, str] = {}
    stacks: dict[str, int] = {}
    layers = list(_layers(model))
    for layer in layers:
        # Lists first: an entry counts as matched even if another rule skips the layer as well.
        reason = _ignored(layer, lists, component, source_names or {}) or layer.problem or config.keeps(layer.path)
        if reason is None and (rule := first_rule(layer.path, rules)):
            reason = f"never quantized: {rule.why} (rule {rule.pattern!r})"
        if reason is None and strict and not re.search(r"\.\d+\.", f".{layer.path}."):
            reason = "never quantized: outside of the repeated blocks of a family that nothing is known about"
        if reason is None and not everything and min(layer.shape) < MINIMUM:
            reason = f"too small: {layer.shape[0]} x {layer.shape[1]}, a side is below {MINIMUM}"
        if reason is None:
            scheme = config.scheme(layer.path, layer.shape)
            reason = scheme.codec.problem(layer.shape)
            if reason is None:
                quantized[layer.path] = scheme
                if layer.experts:
                    stacks[layer.path] = layer.experts
        if reason is not None:
            skipped[layer.path] = reason
    _check_named(config, component, [layer.path for layer in layers])
    if not quantized:
        raise ConfigError(_nothing(config, component, skipped))
    return Selection(component, quantized, skipped, lists.unmatched(), stacks)


def _layers(model: nn.Module) -> Iterator[_Layer]:
    shared = _tied(model)
    attention = {path for path, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)}
    for path, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, nn.Linear):
            problem = _linear_problem(path, module, attention) or shared.get(f"{path}.weight")
            yield _Layer(path, (module.out_features, module.in_features), kind, problem)
        elif kind.endswith("Experts"):
            for name, value in module.named_parameters(recurse=False):
                if name in EXPERT_STACKS and value.ndim == 3:
                    experts, rows, columns = value.shape
                    transposed = "experts are stored as (in, out)" if getattr(module, "is_transposed", False) else None
                    full = f"{path}.{name}" if path else name
                    yield _Layer(full, (rows, columns), kind, transposed or shared.get(full), experts)


def _linear_problem(path: str, module: nn.Linear, attention: set[str]) -> str | None:
    if type(module).forward is not nn.Linear.forward:
        return f"{type(module).__name__} computes in its own way"
    if "forward" in vars(module):
        return "its forward was replaced"
    if path.rpartition(".")[0] in attention:
        return "nn.MultiheadAttention uses its weight directly"
    weight = vars(module)["_parameters"].get("weight")
    if weight is None or not weight.dtype.is_floating_point or weight.dtype.itemsize < 2:
        return "its weight is not in full precision"
    return None


def _tied(model: nn.Module) -> dict[str, str]:
    """Return parameter name -> reason for the weights that another module uses too."""
    users: dict[int, list[str]] = collections.defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        users[id(parameter)].append(name)
    reasons = {}
    for names in users.values():
        for name in names if len(names) > 1 else ():
            other = next(other for other in names if other != name)
            reasons[name] = f"its weight is tied to {other}"
    declared: Any = getattr(model, "all_tied_weights_keys", None)  # transformers; not joined yet on the meta device
    for target, source in declared.items() if isinstance(declared, Mapping) else ():
        reasons.setdefault(target, f"its weight is tied to {source}")
        reasons.setdefault(source, f"its weight is tied to {target}")
    return reasons


def _ignored(layer: _Layer, lists: Matcher, component: str, source_names: Mapping[str, Sequence[str]]) -> str | None:
    source = source_names.get(layer.path, ())
    hit = lists.find(layer_names(layer.path, component, source if len(source) == 1 else ()), layer.class_name)
    if hit is None and len(source) > 1:
        hits = {name: lists.find(layer_names(name, component), layer.class_name) for name in source}
        if check_shards(layer.path, {name: found is not None for name, found in hits.items()}):
            hit = next(found for found in hits.values() if found)
    return f"ignored ({hit[0]}: {hit[1]})" if hit else None


def _check_named(config: QuantizationConfig, component: str, paths: list[str]) -> None:
    for key, path in config.named_layers():
        if path not in paths:
            raise ConfigError(
                f"{key} of quantization method {config.method!r} names {path!r}, which is no layer of {component}"
                f"{suggest(path, paths)}"
            )


def _nothing(config: QuantizationConfig, component: str, skipped: Mapping[str, str]) -> str:
    counts = collections.Counter(skipped.values())
    why = shorten((f"{count} {reason}" for reason, count in counts.most_common()), 6)
    return f"quantization method {config.method!r} finds no layer to quantize in {component!r}: " + (
        f"of {len(skipped)} layers, {why}" if skipped else "the model has no Linear layers"
    )
