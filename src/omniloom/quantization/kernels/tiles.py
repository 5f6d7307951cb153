"""Rows of a quantized matrix: which part of each field holds them."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from omniloom.quantization.codecs.base import Codec, Fields, Shape

# A float32 tile of about 3 MB stays in a core's cache between its decoding and its product. Measured at 3072 x 3072
# with one thread: int8 weights 34 ms to decode as a whole and 10-25 ms in tiles of 256 rows; 128 to 512 rows are alike.
_TILE_ELEMENTS = 768 * 1024
_STEP = 128  # rows per tile are a multiple of the largest block height of any format


def tile_rows(shape: Shape) -> int:
    """Return how many rows one tile of an (N, K) matrix has."""
    rows = max(1, round(_TILE_ELEMENTS / max(1, shape[1]) / _STEP)) * _STEP
    return min(rows, max(1, shape[0]))


# (start, stop) along dimension 0 of each field; None: the field belongs to every tile
Spans = tuple[tuple[str, tuple[int, int] | None], ...]


@functools.lru_cache(maxsize=512)
def row_spans(codec: Codec, shape: Shape, rows: int) -> tuple[Spans, ...] | None:
    """Return what to slice out of every field for each tile of ``rows`` rows; ``None`` if tiles have no own parts.

    A field belongs to a tile where the entries of leading rows add up exactly, whatever the format packs.
    """
    n, k = shape
    whole = codec.specs(shape)
    tiles: list[Spans] = []
    for start in range(0, n, rows):
        stop = min(n, start + rows)
        part = codec.specs((stop - start, k))
        before, after = codec.specs((start, k)) if start else None, codec.specs((stop, k))
        spans: list[tuple[str, tuple[int, int] | None]] = []
        for name, spec in whole.items():
            if spec.shape == part[name].shape and (n == stop - start or not _has_rows(codec, name, shape)):
                spans.append((name, None))
                continue
            if len(spec.shape) == 0 or spec.shape[1:] != part[name].shape[1:]:
                return None
            first = before[name].shape[0] if before else 0
            last = after[name].shape[0]
            if last - first != part[name].shape[0]:
                return None
            spans.append((name, (first, last)))
        tiles.append(tuple(spans))
    return tuple(tiles)


@functools.lru_cache(maxsize=1024)
def _has_rows(codec: Codec, name: str, shape: Shape) -> bool:
    """Whether a field grows with the number of rows (a scale per tensor does not)."""
    return codec.specs(shape)[name].shape != codec.specs((shape[0] * 1024, shape[1]))[name].shape


def take(fields: Mapping[str, torch.Tensor], spans: Spans) -> Fields:
    """Return the views of the fields that hold one tile's rows."""
    return {name: fields[name] if span is None else fields[name][span[0] : span[1]] for name, span in spans}
