"""A module that holds a codec's fields: what moves, casts, copies and checks them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from omniloom.errors import CheckpointError
from omniloom.quantization.codecs.base import FieldSpec

_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def moved(tensor: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Apply a function of ``Module._apply`` to a field: it may move the tensor, never cast it or change its strides.

    The function sees an integer view, so ``.half()`` and ``.to(dtype)`` leave it alone.
    """
    view = tensor.view(_BYTES[tensor.element_size()])
    result = fn(view)
    if result is view:
        return tensor
    if result.dtype != view.dtype:  # Module.type() casts whatever it is given
        result = view.to(result.device)
    if result.stride() != view.stride():
        exact = torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device=result.device)
        result = exact.copy_(result)
    return result.view(tensor.dtype)


def check_field(owner: str, name: str, tensor: torch.Tensor, spec: FieldSpec) -> None:
    """Raise ``CheckpointError`` unless ``tensor`` has the shape and dtype of ``spec``."""
    if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
        raise CheckpointError(
            f"{owner}: field {name!r} is {str(tensor.dtype)[6:]} {tuple(tensor.shape)}, "
            f"must be {str(spec.dtype)[6:]} {spec.shape}"
        )
    if spec.dtype == torch.float8_e4m3fn and _has_nan(tensor):
        raise CheckpointError(f"{owner}: field {name!r} holds codes that are not numbers (NaN): it is damaged")


def _has_nan(codes: torch.Tensor) -> bool:
    known = codes.numel() > 0 and not codes.is_meta
    return known and int((codes.view(torch.uint8) & 0x7F).amax()) == 0x7F


def tensor_bytes(tensor: torch.Tensor | None) -> int:
    """Return the bytes of a tensor's elements."""
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


class FieldModule(nn.Module):
    """Base of the modules that hold fields. ``compute_dtype``: what they present themselves as."""

    compute_dtype: torch.dtype

    def field_specs(self) -> dict[str, FieldSpec]:
        """Return what is stored, by buffer name."""
        raise NotImplementedError

    def _fixed(self) -> frozenset[str]:
        """Buffers that stay on the CPU whatever happens."""
        return frozenset()

    def register_fields(self, fields: Mapping[str, torch.Tensor] | None, owner: str) -> None:
        """Register one persistent buffer per field; ``None`` makes meta tensors, to be set later.

        Raises ``CheckpointError`` if a field is missing, unknown, or of another shape or dtype.
        """
        specs = self.field_specs()
        if fields is not None and set(fields) != set(specs):
            raise CheckpointError(f"{owner}: fields {sorted(fields)} were given, the format has {sorted(specs)}")
        for name, spec in specs.items():
            if hasattr(self, name):
                raise ValueError(f"{owner}: a field cannot be called {name!r}")
            if fields is None:
                tensor = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
            else:
                tensor = fields[name].detach()
                check_field(owner, name, tensor, spec)
            self.register_buffer(name, tensor)

    @property
    def device(self) -> torch.device:
        """The device of the fields."""
        for name in self.field_specs():
            tensor = self._buffers[name]
            if tensor is not None:
                return tensor.device
        return torch.device("cpu")  # every field is in a packed operand, and those are for CPUs

    @property
    def missing_fields(self) -> list[str]:
        """Fields that have not been set yet."""
        return [name for name in self.field_specs() if (t := self._buffers[name]) is not None and t.is_meta]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        buffers = self._buffers
        self.__dict__["_buffers"] = {}
        try:
            super()._apply(fn, recurse)
        finally:
            self.__dict__["_buffers"] = buffers
        fixed = self._fixed()
        for name, tensor in buffers.items():
            if tensor is not None and name not in fixed:
                buffers[name] = moved(tensor, fn)
        probe = fn(torch.empty(0, dtype=self.compute_dtype, device=self.device)).dtype
        if probe.is_floating_point:
            self.compute_dtype = probe
        return self

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for name, spec in self.field_specs().items():
            tensor = state_dict.get(prefix + name)
            if tensor is None:
                continue
            try:
                check_field(prefix.rstrip("."), name, tensor, spec)
            except CheckpointError as error:
                error_msgs.append(str(error))
                state_dict = {key: value for key, value in state_dict.items() if key != prefix + name}
                missing_keys = _Ignoring(missing_keys, prefix + name)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def __getstate__(self) -> dict[str, Any]:
        """Float8 tensors go as bytes: torch's plain pickling has no storage type for them."""
        state = dict(self.__dict__)
        buffers = dict(self._buffers)
        small = {name: t.dtype for name, t in buffers.items() if t is not None and t.dtype.is_floating_point}
        small = {name: dtype for name, dtype in small.items() if dtype.itemsize == 1}
        state["_buffers"] = {name: t.view(torch.uint8) if name in small else t for name, t in buffers.items()}  # type: ignore[union-attr]
        state["_small"] = small
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        small = state.pop("_small")
        buffers = state["_buffers"].items()
        state["_buffers"] = {name: t.view(small[name]) if name in small else t for name, t in buffers}
        super().__setstate__(state)

    def nbytes(self) -> int:
        """Return the bytes of everything stored here, parameters and buffers."""
        own = itertools.chain(self._parameters.values(), self._buffers.values())
        return sum(tensor_bytes(tensor) for tensor in own)


class _Ignoring(list):
    """The list of missing keys, without the one that was there and did not fit."""

    def __init__(self, target: list[str], name: str) -> None:
        super().__init__()
        self.target, self.name = target, name

    def append(self, key: str) -> None:
        if key != self.name:
            self.target.append(key)
