"""What a compiled graph's guards look at, as a hashable value."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch


def shape_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """Return shapes, strides, dtypes and devices of all tensors, values of ints, bools, texts and ``None``, and types.

    Two calls with equal keys need one graph. Floats count by type (a scale or a timestep differs in each step).
    """
    return (torch.is_grad_enabled(), _key(args), _key(kwargs))


def _key(value: Any) -> Hashable:
    kind: Any = type(value)
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout is torch.strided else None
        return kind, value.shape, strides, value.dtype, value.device, value.requires_grad
    if kind is tuple or kind is list:
        return kind, tuple([_key(item) for item in value])
    if kind is dict:
        return tuple([(name, _key(item)) for name, item in value.items()])
    if value is None or kind in (int, bool, str):
        return kind, value
    return kind
