"""Which layers of a model a method quantizes, each one that it does not with the rule that keeps it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from omniloom.errors import ConfigError, shorten, suggest
from omniloom.quantization.experts import expert_parameters, stack_shape
from omniloom.quantization.linear import is_plain_linear
from omniloom.quantization.matching import SHARDS, Matcher, check_shards, layer_names
from omniloom.quantization.methods import QuantizationConfig
from omniloom.quantization.never import MIN_SIDE, never_quantized
from omniloom.quantization.scheme import LayerScheme


@dataclasses.dataclass(frozen=True)
class Selection:
    """``quantized``: path -> scheme; ``skipped``: path -> why it stays; ``unmatched``: entries that matched nothing."""

    quantized: Mapping[str, LayerScheme]
    skipped: Mapping[str, str]
    unmatched: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A layer that could be quantized: a Linear, or a stack of experts by its parameter's path. ``shape``: (N, K)."""

    path: str
    shape: tuple[int, int]
    class_name: str
    tied: bool


def select_layers(
    model: nn.Module,
    config: QuantizationConfig,
    *,
    component: str = "model",
    stored_names: Mapping[str, str] | None = None,
) -> Selection:
    """Choose the layers of ``model`` (on any device, meta too) that ``config`` quantizes.

    Linears and stacked experts are looked at. One is skipped, with its reason, if a list of ``config`` names it, if it
    is best kept in high precision (unless ``all_layers``), if it is tied to an embedding, too small, or of a shape that
    the format cannot hold. ``stored_names``: parameter -> what the checkpoint calls it; lists may use those names too.
    Raises ``ConfigError`` if nothing is left, for a layer that the config singles out and that does not exist, and for
    one of which only parts are listed.
    """
    matcher = Matcher(config.ignore_lists())
    everything = getattr(config, "all_layers", False)
    quantized: dict[str, LayerScheme] = {}
    skipped: dict[str, str] = {}
    candidates = list(find_candidates(model))
    for found in candidates:
        hit = _listed(found, matcher, component, stored_names or {})
        reason = f"listed: {hit[0]}: {hit[1]}" if hit else config.keeps(found.path)
        if reason is None and not everything:
            reason = never_quantized(found.path)
        reason = reason or _obstacle(found)
        scheme = None
        if reason is None:
            scheme = config.scheme(found.path, found.shape)
            reason = scheme.codec.problem(found.shape)
        if scheme is None or reason is not None:
            skipped[found.path] = str(reason)
        else:
            quantized[found.path] = scheme
    _check_named(config, quantized, candidates)
    if not quantized:
        reasons = sorted(set(skipped.values()))
        why = f"all {len(skipped)} are skipped ({shorten(reasons, 4)})" if skipped else "it has no Linear layer"
        raise ConfigError(f"quantization method {config.method!r} matches no layer of {component}: {why}")
    return Selection(quantized, skipped, matcher.unmatched())


def find_candidates(model: nn.Module) -> Iterator[Candidate]:
    """Yield every Linear (no subclass with a forward of its own) and every stack of experts."""
    shared = _shared_parameters(model)
    for path, module in model.named_modules():
        if is_plain_linear(module):
            shape = (module.out_features, module.in_features)
            yield Candidate(path, shape, type(module).__name__, f"{path}.weight" in shared)
        for name in expert_parameters(module):
            if name in module._parameters:  # not quantized already
                shape = stack_shape(module, name)
                yield Candidate(f"{path}.{name}".lstrip("."), shape, type(module).__name__, False)


def _listed(
    found: Candidate, matcher: Matcher, component: str, stored_names: Mapping[str, str]
) -> tuple[str, str] | None:
    """Return key and entry of the list that names the layer, or all parts that it is made of."""
    names = [stored_names[name] for name in (found.path, f"{found.path}.weight") if name in stored_names]
    stored = [name.removesuffix(".weight") for name in names]
    if hit := matcher.find(layer_names(found.path, component, stored), found.class_name):
        return hit
    above, dot, last = found.path.rpartition(".")
    hits = {part: matcher.find(layer_names(above + dot + part, component)) for part in SHARDS.get(last, ())}
    ignored = {above + dot + part: hit is not None for part, hit in hits.items()}
    return next(iter(hits.values())) if check_shards(found.path, ignored) else None


def _obstacle(found: Candidate) -> str | None:
    if found.tied:
        return "tied to another parameter"
    if min(found.shape) < MIN_SIDE:
        return f"a side shorter than {MIN_SIDE}"
    return None


def _shared_parameters(model: nn.Module) -> set[str]:
    """Return the names of parameters that another name stands for as well, now or once the model is loaded."""
    ties: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    shared = {*ties, *ties.values()}
    names: dict[torch.Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return shared | {name for group in names.values() if len(group) > 1 for name in group}


def _check_named(config: QuantizationConfig, quantized: Mapping[str, LayerScheme], candidates: list[Candidate]) -> None:
    for key, path in config.named_layers():
        if path not in quantized:
            paths = [found.path for found in candidates]
            what = "is not quantized" if path in paths else f"is no layer of the model{suggest(path, paths)}"
            raise ConfigError(f"quantization method {config.method!r}: {key} names {path!r}, which {what}")
