"""Filling a module from named tensors as a checked plan says: strict and streaming.

``fill`` hands over one tensor at a time, to the module or to what quantizes it on its way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from omniloom.checkpoint.storage import trim_heap
from omniloom.errors import CheckpointError, shorten
from omniloom.pipelines.tensor_plan import Conversion, Progress, Source, TensorPlan, check_shape, without

_TRIM_EVERY_BYTES = 8 << 20  # of tensors that passed through


def fill(
    model: torch.nn.Module,
    plan: TensorPlan,
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
        if target not in plan.encode:
            by_name.setdefault(name, []).append(target)
    dtype_of = {name: plan.dtypes.get(targets[0]) for name, targets in by_name.items()}
    loaded = source.load_many(list(by_name), dtype_of=dtype_of.get, device=device, progress=progress)
    for name, tensor in loaded:
        for target in by_name[name]:
            bind(model, target, tensor)
    _encode(plan, source, device, progress)
    _take_stored(plan, source, device, progress)
    for conversion in plan.conversions:
        for target, tensor in convert(model, conversion, source, plan.dtypes, device).items():
            if target in plan.encode:
                plan.encode[target](tensor)
                trim_heap()
            else:
                check_shape(target, conversion.names()[0], state[target].shape, tensor.shape, where)
                bind(model, target, tensor)
            plan.missing.discard(target)
            del tensor
        if progress:
            progress(sum(source.info(name).nbytes for name in conversion.names()))
    _tie(model, plan)
    _initialise_optional(model, plan, device)
    if plan.missing:
        raise CheckpointError(f"{where}: keys missing from the checkpoint: {shorten(sorted(plan.missing))}")
    move_buffers(model, device)


def pass_through(
    source: Source, names: Iterable[str], device: str | torch.device = "cpu", progress: Progress | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors as they are stored, on their way into something else: at most two of them exist at a time.

    That holds if the caller drops each before it asks for the next. What was freed goes back to the system.
    """
    names = list(names)
    largest = max((source.info(name).nbytes for name in names), default=0)
    passed = 0
    for name, tensor in source.load_many(names, device=device, progress=progress, prefer="read", in_flight=largest):
        passed += tensor.nbytes
        yield name, tensor
        del tensor
        if passed >= _TRIM_EVERY_BYTES:
            trim_heap()
            passed = 0
    if names:
        trim_heap()


def _encode(plan: TensorPlan, source: Source, device: str | torch.device, progress: Progress | None) -> None:
    """Hand over the dense tensors that get quantized, in the type of the file."""
    taken = {plan.direct[target]: take for target, take in plan.encode.items() if target in plan.direct}
    for name, tensor in pass_through(source, taken, device, progress):
        taken[name](tensor)
        del tensor


def _take_stored(plan: TensorPlan, source: Source, device: str | torch.device, progress: Progress | None) -> None:
    """Hand over what is quantized in the files, one parameter at a time."""
    waiting = [(stored, dict(stored.tensors)) for stored in plan.stored.values()]
    order = [name for _, tensors in waiting for name in tensors]
    loaded = iter(source.load_many(order, dtype_of=None, device=device, progress=progress))
    for stored, tensors in waiting:
        stored.take({known: next(loaded)[1] for known in tensors.values()})


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


def convert(
    model: Any, conversion: Conversion, source: Source, dtypes: Mapping[str, torch.dtype | None], device: Any
) -> dict[str, torch.Tensor]:
    """Return the tensors that a conversion makes of its sources, by parameter name."""
    dtype = dtypes.get(conversion.first_target)
    for pattern, names in conversion.sources.items():
        for name in names:
            tensor = source.read(name, dtype=dtype, device=device, prefer="read")
            conversion.converter.add_tensor(conversion.first_target, name, pattern, tensor)
    realized = conversion.converter.convert(conversion.first_target, model=model, config=model.config)
    return {target: value[0] if isinstance(value, list) else value for target, value in realized.items()}


def _tie(model: Any, plan: TensorPlan) -> None:
    tie = getattr(model, "tie_weights", None)
    ties: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    if tie is None or not ties:
        return
    tie(missing_keys=plan.missing, recompute_mapping=False)
    for target, origin in ties.items():
        if not (target in plan.missing and origin in plan.missing):
            plan.missing -= {target, origin}


def _initialise_optional(model: Any, plan: TensorPlan, device: Any) -> None:
    """Give keys that the model declares optional their initial values, the same ones at every load."""
    patterns = getattr(model, "_keys_to_ignore_on_load_missing", None)
    optional = plan.missing - without(plan.missing, patterns)
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
