"""What dynamo guards although no block can see it: how its inputs lie in memory, and sizes that happen to be equal."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from typing import Any

import torch

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def alike(value: Any) -> Any:
    """Return ``value`` without what dynamo guards and no block can see; a tensor keeps its memory.

    Two things would cost equal blocks a graph each. The stride of a dimension of size 1 says nothing, yet FLUX hands
    its single blocks slices of a joined sequence, except the first. And of a view dynamo guards the base's sizes: the
    first double block gets what a Linear returned, a view, the others what a block returned, none. Where gradients
    are recorded a view stays one.
    """
    kind = type(value)
    if kind is tuple:
        return tuple([alike(item) for item in value])
    if kind is not torch.Tensor:
        return value
    if value.dim() > 1 and value.shape[0] == 1 and value.is_contiguous():
        size = value.numel()
        if value.stride(0) != size:
            value = value.as_strided(value.shape, (size, *value.stride()[1:]))
    if value._is_view() and not value.requires_grad and not torch.is_grad_enabled():
        value = value.data
    return value


def packed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], Pairs] | None:
    """Return the arguments with rows that lie apart copied together, and the pairs (given, copy); ``None`` if none do.

    FLUX's single blocks again: of several rows, a slice of the joined sequence cannot be told to lie like the first
    block's input without a copy. Where gradients are recorded there are none.
    """
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return None
    pairs: Pairs = []

    def pack(value: Any) -> Any:
        if type(value) is not torch.Tensor or value.dim() < 2 or value.is_contiguous() or not value[0].is_contiguous():
            return value
        copied = value.contiguous()
        pairs.append((value, copied))
        return copied

    args, kwargs = tuple([pack(value) for value in args]), {name: pack(value) for name, value in kwargs.items()}
    return (args, kwargs, pairs) if pairs else None


def write_back(pairs: Pairs) -> None:
    """Copy what a block wrote into copies of its arguments to the arguments themselves."""
    for given, copied in pairs:
        if copied._version:
            given.copy_(copied)


def sizes_apart() -> contextlib.AbstractContextManager[Any]:
    """While this thread compiles, let dynamo take sizes that happen to be equal for unrelated ones.

    Otherwise it guards that they stay equal: 768 by 1024 pixels are 3072 of FLUX's tokens, just as many as its width,
    and so the first graph would serve that size alone. In a torch whose settings are not kept per thread
    nothing is changed, and such a coincidence costs one graph.
    """
    from torch.fx.experimental import _config

    module: Any = _config

    entry = getattr(module, "_config", {}).get("use_duck_shape")
    if not isinstance(getattr(entry, "user_override", None), ContextVar):
        return contextlib.nullcontext()
    return module.patch(use_duck_shape=False)
