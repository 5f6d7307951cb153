"""Working through a large matrix in row ranges, so that float32 temporaries stay small and in the cache."""

from __future__ import annotations

from collections.abc import Callable

import torch

from omniloom.checkpoint.storage import empty
from omniloom.quantization.codecs.base import Shape

CELLS = (
    1 << 20
)  # 4 MiB of float32; decoding 3072 × 12288 takes 2 to 3 times as long from 2**23 on, when caches overflow


def _rows(columns: int, align: int) -> int:
    return max(CELLS // max(columns, 1) // align, 1) * align


def encode_rows(
    weight: torch.Tensor, step: Callable[[torch.Tensor], tuple[torch.Tensor, ...]], align: int = 1
) -> tuple[torch.Tensor, ...]:
    """Return ``step(weight)``, computed in ranges of rows and joined along dimension 0.

    ``step`` treats groups of ``align`` rows independently and returns tensors with one row per row or per group, so the
    result does not depend on the ranges. A traced program takes the matrix whole: its compiler does the tiling.
    """
    weight = weight.detach()
    if torch.compiler.is_compiling():
        return step(weight)
    total, rows = weight.shape[0], _rows(weight.shape[1], align)
    if total <= rows:
        return step(weight)
    joined: list[torch.Tensor] = []
    each: list[int] = []
    for start in range(0, total, rows):
        parts = step(weight[start : start + rows])
        if not joined:
            each = [rows // part.shape[0] for part in parts]
            joined = [
                empty((-(-total // every), *part.shape[1:]), part.dtype, part.device)
                for part, every in zip(parts, each, strict=True)
            ]
        for whole, part, every in zip(joined, parts, each, strict=True):
            whole[start // every : start // every + part.shape[0]] = part
    return tuple(joined)


def decode_rows(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    step: Callable[[slice], torch.Tensor],
    align: int = 1,
) -> torch.Tensor:
    """Return the matrix whose rows ``step(rows)`` gives in float32, rounded to ``dtype`` range by range."""
    total, rows = shape[0], _rows(shape[1], align)
    if torch.compiler.is_compiling() or total <= rows:
        return step(slice(0, total)).to(dtype)
    out = torch.empty(shape, dtype=dtype, device=device)
    for start in range(0, total, rows):
        part = slice(start, min(start + rows, total))
        out[part] = step(part)
    return out
