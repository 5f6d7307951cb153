"""What goes where: a plan that says for every parameter of a module which checkpoint tensors it is made of.

Names pass through the library's own conversion mapping, tied-key map and ignore lists; anything left over, missing or
of another shape is an error that names file and key. A plan is data: quantization and placement attach to it.
"""

from __future__ import annotations

import copy
import dataclasses
import math
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
        self,
        names: Any,
        *,
        dtype_of: Any = ...,
        device: Any = ...,
        progress: Any = ...,
        prefer: Any = ...,
        in_flight: Any = ...,
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

    def fresh(self) -> Conversion:
        """Return a copy that has not collected any tensors."""
        return Conversion(self.first_target, copy.deepcopy(self.converter), self.sources)


@dataclasses.dataclass
class Stored:
    """A parameter that the files hold in several tensors: ``tensors``: checkpoint name -> the name ``take`` knows."""

    tensors: dict[str, str]
    take: Callable[[dict[str, torch.Tensor]], None]


@dataclasses.dataclass
class TensorPlan:
    """What goes where. ``direct``: parameter name -> checkpoint name; ``dtypes``: parameter name -> storage dtype.

    ``encode``: parameter name -> what takes its dense tensor instead of the module (quantization while reading).
    ``stored``: parameters that are quantized in the files already.
    """

    direct: dict[str, str]
    conversions: list[Conversion]
    dtypes: dict[str, torch.dtype | None]
    missing: set[str]
    unexpected: set[str]
    encode: dict[str, Callable[[torch.Tensor], None]] = dataclasses.field(default_factory=dict)
    stored: dict[str, Stored] = dataclasses.field(default_factory=dict)


def plan_diffusers(model: Any, names: Iterable[str], dtype: torch.dtype) -> TensorPlan:
    """Plan a diffusers model: names are equal but for deprecated attention keys; ``_keep_in_fp32_modules`` kept."""
    state = model.state_dict()
    origin = {name: name for name in names}
    model._fix_state_dict_keys_on_load(origin)  # moves values from old keys to new ones; ours are the old keys
    direct = {target: source for target, source in origin.items() if target in state}
    unexpected = without(set(origin) - set(state), model._keys_to_ignore_on_load_unexpected)
    listed = model._keep_in_fp32_modules or []
    keep = {listed} if isinstance(listed, str) else set(listed)
    dtypes = {
        target: (torch.float32 if keep & set(target.split(".")) else dtype)
        if state[target].is_floating_point()
        else None
        for target in direct
    }
    return TensorPlan(direct, [], dtypes, set(state) - set(direct), unexpected)


def plan_transformers(model: Any, names: Iterable[str], dtype: torch.dtype) -> TensorPlan:
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
    unexpected = without(unexpected, _ignored_unexpected(model))
    dtypes = _transformers_dtypes(model, state, dtype)
    return TensorPlan(direct, list(conversions.values()), dtypes, missing, unexpected)


def check(model: torch.nn.Module, plan: TensorPlan, source: Source, where: str) -> None:
    """Raise ``CheckpointError`` for keys and shapes that do not fit ``model``, before a tensor is read."""
    if plan.unexpected:
        raise CheckpointError(f"{where}: keys that the model does not have: {shorten(sorted(plan.unexpected))}")
    if plan.missing and not plan.conversions:
        _refuse_missing(model, plan, where)
    state = model.state_dict()
    for target, name in plan.direct.items():
        info = source.info(name)
        check_shape(target, name, state[target].shape, info.shape, where)
        if state[target].is_floating_point() and not info.torch_dtype.is_floating_point:
            raise CheckpointError(
                f"{where}: {name!r} is {info.dtype} in the file, the model needs floating point for {target!r}: "
                "the file is quantized, and nothing in it says how"
            )


def needed_bytes(plan: TensorPlan, source: Source, device: str | torch.device) -> int:
    """Return the bytes that are converted or moved, and so get memory of their own. What is encoded is not counted."""
    moved = torch.device(device).type != "cpu"
    total = 0
    for target, name in plan.direct.items():
        info, dtype = source.info(name), plan.dtypes.get(target)
        if target not in plan.encode and (moved or dtype not in (None, info.torch_dtype)):
            total += math.prod(info.shape) * (dtype or info.torch_dtype).itemsize
    for conversion in plan.conversions:
        size = (plan.dtypes.get(conversion.first_target) or torch.float32).itemsize
        if conversion.first_target not in plan.encode:
            total += sum(math.prod(source.info(name).shape) * size for name in conversion.names())
    if moved:
        total += sum(source.info(name).nbytes for stored in plan.stored.values() for name in stored.tensors)
    return total


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


def _refuse_missing(model: Any, plan: TensorPlan, where: str) -> None:
    """Raise for keys that neither the file, nor a tie, nor the model's list of optional keys provides."""
    ties: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    tied = {name for pair in ties.items() if not set(pair) <= plan.missing for name in pair}
    missing = without(plan.missing - tied, getattr(model, "_keys_to_ignore_on_load_missing", None))
    if missing:
        raise CheckpointError(f"{where}: keys missing from the checkpoint: {shorten(sorted(missing))}")


def _ignored_unexpected(model: Any) -> set[str]:
    """Return the patterns of superfluous keys that transformers accepts: the model's own, and old buffers."""
    patterns = set(model._keys_to_ignore_on_load_unexpected or ())
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    return patterns


def check_shape(target: str, name: str, wanted: Any, given: Any, where: str) -> None:
    if tuple(wanted) != tuple(given):
        raise CheckpointError(
            f"{where}: {name!r} has shape {list(given)} in the file, the model needs {list(wanted)} for {target!r}"
        )


def without(names: set[str], patterns: Iterable[str] | None) -> set[str]:
    return {name for name in names if not any(re.search(pattern, name) for pattern in patterns or ())}
