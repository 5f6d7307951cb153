"""Filling a module from named tensors: strict, streaming, one plan for diffusers and transformers models.

A ``LoadPlan`` says for every parameter and persistent buffer which checkpoint tensors it is made of. Names pass through
the library's own conversion mapping, tied-key map and ignore lists; anything left over, missing or of another shape is
an error that names file and key. Quantization and placement attach here: a plan is data, and ``fill`` hands over one
tensor at a time.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch

from omniloom.errors import CheckpointError, shorten

Progress = Callable[[int], None]


class Source(Protocol):
    """Named tensors with shapes known beforehand: ``checkpoint.TensorSource``, or tensors that exist already."""

    def names(self) -> list[str]: ...

    def info(self, name: str) -> Any: ...

    def read(self, name: str, *, dtype: torch.dtype | None, device: Any, prefer: Any) -> torch.Tensor: ...

    def load_many(
        self, names: list[str], *, dtype_of: Any, device: Any, progress: Progress | None
    ) -> Iterable[tuple[str, torch.Tensor]]: ...


@dataclasses.dataclass
class Conversion:
    """Several checkpoint tensors that become one or more parameters through a transformers ``WeightConverter``."""

    first_target: str
    converter: Any
    sources: dict[str, list[str]] = dataclasses.field(default_factory=dict)  # source pattern -> checkpoint names

    def names(self) -> list[str]:
        """Return the checkpoint names in the order they are collected."""
        return [name for names in self.sources.values() for name in names]


@dataclasses.dataclass
class LoadPlan:
    """What goes where. ``direct``: parameter name -> checkpoint name; ``dtypes``: parameter name -> storage dtype."""

    direct: dict[str, str]
    conversions: list[Conversion]
    dtypes: dict[str, torch.dtype | None]
    missing: set[str]
    unexpected: set[str]


def plan_diffusers(model: Any, names: Iterable[str], dtype: torch.dtype) -> LoadPlan:
    """Plan a diffusers model: names are equal but for deprecated attention keys; ``_keep_in_fp32_modules`` kept."""
    state = model.state_dict()
    origin = {name: name for name in names}
    model._fix_state_dict_keys_on_load(origin)  # moves values from old keys to new ones; ours are the old keys
    direct = {target: source for target, source in origin.items() if target in state}
    unexpected = _without(set(origin) - set(state), model._keys_to_ignore_on_load_unexpected)
    listed = model._keep_in_fp32_modules or []
    keep = {listed} if isinstance(listed, str) else set(listed)
    dtypes = {
        target: (torch.float32 if keep & set(target.split(".")) else dtype)
        if state[target].is_floating_point()
        else None
        for target in direct
    }
    return LoadPlan(direct, [], dtypes, set(state) - set(direct), unexpected)


def plan_transformers(model: Any, names: Iterable[str], dtype: torch.dtype) -> LoadPlan:
    """Plan a transformers model through its registered conversion mapping and base-model prefix rules."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    state = model.state_dict()
    mapping = get_model_conversion_mapping(model)
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    renamings = [entry for entry in mapping if not isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    prefix = model.base_model_prefix
    direct: dict[str, str] = {}
    conversions: dict[str, Conversion] = {}
    unexpected: set[str] = set()
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], base_model_prefix=prefix, meta_state_dict=state)
        if target not in state:
            unexpected.add(name)
        elif pattern is None:
            if target in direct:
                raise CheckpointError(f"keys {direct[target]!r} and {name!r} both stand for parameter {target!r}")
            direct[target] = name
        else:
            conversion = conversions.setdefault(target, Conversion(target, copy.deepcopy(by_pattern[pattern])))
            conversion.sources.setdefault(pattern, []).append(name)
    missing = set(state) - set(direct)  # what conversions make is known only once they ran: fill() takes it out
    unexpected = _without(unexpected, _ignored_unexpected(model))
    return LoadPlan(direct, list(conversions.values()), _transformers_dtypes(model, state, dtype), missing, unexpected)


def check(model: torch.nn.Module, plan: LoadPlan, source: Source, where: str) -> None:
    """Raise ``CheckpointError`` for keys and shapes that do not fit ``model``, before a tensor is read."""
    if plan.unexpected:
        raise CheckpointError(f"{where}: keys that the model does not have: {shorten(sorted(plan.unexpected))}")
    if plan.missing and not plan.conversions:
        _refuse_missing(model, plan, where)
    state = model.state_dict()
    for target, name in plan.direct.items():
        _check_shape(target, name, state[target].shape, source.info(name).shape, where)


def fill(
    model: torch.nn.Module,
    plan: LoadPlan,
    source: Source,
    *,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
    where: str = "",
) -> None:
    """Read every planned tensor of a checked plan and bind it to ``model``.

    Raises ``CheckpointError`` for what only the values show: a conversion that makes another shape, a damaged read.
    """
    state = model.state_dict()
    by_name: dict[str, list[str]] = {}
    for target, name in plan.direct.items():
        by_name.setdefault(name, []).append(target)
    dtype_of = {name: plan.dtypes.get(targets[0]) for name, targets in by_name.items()}
    loaded = source.load_many(list(by_name), dtype_of=dtype_of.get, device=device, progress=progress)
    for name, tensor in loaded:
        for target in by_name[name]:
            bind(model, target, tensor)
    for conversion in plan.conversions:
        for target, tensor in _convert(model, conversion, source, plan.dtypes, device).items():
            _check_shape(target, conversion.names()[0], state[target].shape, tensor.shape, where)
            bind(model, target, tensor)
            plan.missing.discard(target)
        if progress:
            progress(sum(source.info(name).nbytes for name in conversion.names()))
    _tie(model, plan)
    _initialise_optional(model, plan, device)
    if plan.missing:
        raise CheckpointError(f"{where}: keys missing from the checkpoint: {shorten(sorted(plan.missing))}")
    move_buffers(model, device)


def bind(model: torch.nn.Module, target: str, tensor: torch.Tensor) -> None:
    """Replace the parameter or buffer ``target`` of ``model`` by ``tensor`` (no copy)."""
    path, _, leaf = target.rpartition(".")
    module = model.get_submodule(path)
    if leaf in module._parameters:
        old = module._parameters[leaf]
        grad = old is not None and old.requires_grad and (tensor.is_floating_point() or tensor.is_complex())
        module._parameters[leaf] = torch.nn.Parameter(tensor, requires_grad=grad)
    else:
        module._buffers[leaf] = tensor


def move_buffers(model: torch.nn.Module, device: str | torch.device) -> None:
    """Move buffers that were made at construction to ``device``."""
    if torch.device(device).type == "cpu":
        return
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def meta_leftovers(model: torch.nn.Module) -> list[str]:
    """Return the names of parameters, buffers and tensor attributes that are still on the meta device."""
    found = []
    for path, module in model.named_modules():
        tensors: dict[str, Any] = {**vars(module), **module._parameters, **module._buffers}
        found += [f"{path}.{k}".lstrip(".") for k, v in tensors.items() if isinstance(v, torch.Tensor) and v.is_meta]
    return found


def _convert(
    model: Any, conversion: Conversion, source: Source, dtypes: Mapping[str, torch.dtype | None], device: Any
) -> dict[str, torch.Tensor]:
    dtype = dtypes.get(conversion.first_target)
    for pattern, names in conversion.sources.items():
        for name in names:
            tensor = source.read(name, dtype=dtype, device=device, prefer="read")
            conversion.converter.add_tensor(conversion.first_target, name, pattern, tensor)
    realized = conversion.converter.convert(conversion.first_target, model=model, config=model.config)
    return {target: value[0] if isinstance(value, list) else value for target, value in realized.items()}


def _transformers_dtypes(
    model: Any, state: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> dict[str, torch.dtype | None]:
    """Return the storage dtype per parameter: what construction gave it, but fp32 where the model insists on it.

    ``_keep_in_fp32_modules`` concerns float16 only, ``_keep_in_fp32_modules_strict`` bfloat16 too.
    """
    keep = set(model._keep_in_fp32_modules or ()) if dtype == torch.float16 else set()
    if dtype in (torch.float16, torch.bfloat16):
        keep |= set(model._keep_in_fp32_modules_strict or ())
    patterns = [
        re.compile(pattern.replace("*", ".*")) for pattern in keep
    ]  # anywhere in the name, as transformers does
    return {
        name: (torch.float32 if any(p.search(name) for p in patterns) else t.dtype) if t.is_floating_point() else None
        for name, t in state.items()
    }


def _tie(model: Any, plan: LoadPlan) -> None:
    tie = getattr(model, "tie_weights", None)
    ties: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    if tie is None or not ties:
        return
    tie(missing_keys=plan.missing, recompute_mapping=False)
    for target, origin in ties.items():
        if not (target in plan.missing and origin in plan.missing):
            plan.missing -= {target, origin}


def _refuse_missing(model: Any, plan: LoadPlan, where: str) -> None:
    """Raise for keys that neither the file, nor a tie, nor the model's list of optional keys provides."""
    ties: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    tied = {name for pair in ties.items() if not set(pair) <= plan.missing for name in pair}
    missing = _without(plan.missing - tied, getattr(model, "_keys_to_ignore_on_load_missing", None))
    if missing:
        raise CheckpointError(f"{where}: keys missing from the checkpoint: {shorten(sorted(missing))}")


def _initialise_optional(model: Any, plan: LoadPlan, device: Any) -> None:
    """Give keys that the model declares optional their initial values, the same ones at every load."""
    patterns = getattr(model, "_keys_to_ignore_on_load_missing", None)
    optional = plan.missing - _without(plan.missing, patterns)
    plan.missing -= optional
    state = model.state_dict(keep_vars=True)
    optional = {name for name in optional if state[name].is_meta}
    if not optional:
        return
    for name, tensor in state.items():
        if name in optional:
            bind(model, name, torch.empty_like(tensor, device=device))
        else:
            tensor._is_hf_initialized = True
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model.initialize_weights()


def _ignored_unexpected(model: Any) -> set[str]:
    """Return the patterns of superfluous keys that transformers accepts: the model's own, and old buffers."""
    patterns = set(model._keys_to_ignore_on_load_unexpected or ())
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    return patterns


def _check_shape(target: str, name: str, wanted: Any, given: Any, where: str) -> None:
    if tuple(wanted) != tuple(given):
        raise CheckpointError(
            f"{where}: {name!r} has shape {list(given)} in the file, the model needs {list(wanted)} for {target!r}"
        )


def _without(names: set[str], patterns: Iterable[str] | None) -> set[str]:
    return {name for name in names if not any(re.search(pattern, name) for pattern in patterns or ())}
