"""Which image sizes a model can make."""

from __future__ import annotations

from typing import Any

from omniloom.errors import RequestError
from omniloom.pipelines.family import Family, product


def check_size(pipe: Any, family: Family, height: int | None, width: int | None) -> None:
    """Raise ``RequestError`` with the nearest legal sizes if the model cannot make exactly this one (pixels)."""
    stride = product(pipe, family.size_stride)
    if stride is None:
        return
    bad = [name for name, side in (("height", height), ("width", width)) if side is not None and side % stride]
    if not bad:
        return
    given = f"{width or '?'}x{height or '?'}"
    low = "x".join(str(_floor(side, stride)) if side else "?" for side in (width, height))
    high = "x".join(str(-(-side // stride) * stride) if side else "?" for side in (width, height))
    nearest = low if low == high else f"{low} or {high}"
    raise RequestError(
        f"size {given}: {' and '.join(bad)} must be a multiple of {stride} pixels for {type(pipe).__name__}; "
        f"nearest: {nearest}"
    )


def check_frames(pipe: Any, family: Family, frames: int | None) -> None:
    """Raise ``RequestError`` with the nearest legal counts if the model cannot make exactly so many frames."""
    stride = family.frames and product(pipe, (family.frames.stride,))
    if not stride or frames is None or frames % stride == 1 % stride:
        return
    low = (frames - 1) // stride * stride + 1
    nearest = f"{low} or {low + stride}" if low > 0 else str(low + stride)
    raise RequestError(
        f"num_frames={frames}: {type(pipe).__name__} makes a multiple of {stride}, plus one; nearest: {nearest}"
    )


def default_size(pipe: Any, family: Family) -> int | None:
    """Return the side in pixels of an image whose size is not given, where the family knows it."""
    return product(pipe, family.default_size)


def _floor(side: int, stride: int) -> int:
    return max(stride, side // stride * stride)
