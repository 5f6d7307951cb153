"""Decoding rows of a matrix into memory that is reused: the codecs' arithmetic, bit for bit, without new tensors.

A codec's own ``decode`` allocates every intermediate, and on a CPU fresh pages cost more than the arithmetic: int8
weights of 3072 x 3072 take 24 ms so and 3 ms here, fp8 34 and 5 ms (one thread).
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from omniloom.quantization.codecs.base import Codec, Fields, Shape
from omniloom.quantization.codecs.bnb4 import Bnb4
from omniloom.quantization.codecs.fp8 import Fp8Block
from omniloom.quantization.codecs.int4 import Int4Group
from omniloom.quantization.codecs.mx import COARSE_GROUP, E2M1, GROUP
from omniloom.quantization.codecs.nibbles import constant, pair_table
from omniloom.quantization.codecs.scales import power_of_two
from omniloom.quantization.kernels.gguf_decoders import gguf_steps

_STEP_CELLS = 192 * 1024  # per thread: a step's codes, indices and numbers stay in a core's second-level cache


class Scratch(threading.local):
    """Flat tensors by name, one set per thread, which grow as needed and are used again."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def get(self, name: str, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return ``count`` elements of any values. What an earlier call of the same name returned is overwritten."""
        key = (name, dtype)
        found = self._tensors.get(key)
        if found is None or found.numel() < count:
            found = self._tensors[key] = torch.empty(count, dtype=dtype)
        return found[:count]


SCRATCH = Scratch()
Step = Callable[[int, int, torch.Tensor], None]  # (first row, last row, out: float32 (rows, K))


def decode_into(codec: Codec, fields: Fields, shape: Shape, out: torch.Tensor) -> None:
    """Write the matrix (N, K) of ``fields`` into ``out``, contiguous, of a floating dtype, on the CPU."""
    rows, columns = shape
    make = _STEPS.get(codec.name) or _GGUF_STEPS.get(codec.name)
    step = make(codec, fields, columns) if make is not None else None
    if step is None:
        out.copy_(codec.decode(fields, shape, torch.float32))
        return
    count = max(1, _STEP_CELLS * torch.get_num_threads() // columns)
    for start in range(0, rows, count):
        stop = min(rows, start + count)
        part = out[start:stop]
        if out.dtype == torch.float32:
            step(start, stop, part)
        else:
            wide = SCRATCH.get("wide", part.numel(), torch.float32).view(part.shape)
            step(start, stop, wide)
            part.copy_(wide)


def _int8_channel(codec: Codec, fields: Fields, columns: int) -> Step:
    codes, scale = fields["codes"], fields["scale"]

    def step(start: int, stop: int, out: torch.Tensor) -> None:
        out.copy_(codes[start:stop]).mul_(scale[start:stop])

    return step


def _from_e4m3(codes: torch.Tensor, out: torch.Tensor) -> None:
    """Write E4M3 codes / 256 into float32 ``out``. Codes are finite: layers refuse others.

    Shifted by 7, the code's exponent and mantissa are those of a float16 that is 2^-8 of the value, denormals too.
    """
    wide = SCRATCH.get("e4m3", codes.numel(), torch.int16).view(codes.shape)
    wide.copy_(codes.view(torch.int8))  # extends the sign into bit 15
    wide.bitwise_left_shift_(7).bitwise_and_(-0x4001)
    out.copy_(wide.view(torch.float16))


def _fp8_rows(codec: Codec, fields: Fields, columns: int) -> Step:
    codes, scale = fields["codes"], fields["scale"] * 256.0  # exact: encoders keep 448 * scale finite

    def step(start: int, stop: int, out: torch.Tensor) -> None:
        _from_e4m3(codes[start:stop], out)
        out.mul_(scale if scale.dim() == 0 else scale[start:stop])

    return step


def _fp8_block(codec: Codec, fields: Fields, columns: int) -> Step | None:
    assert isinstance(codec, Fp8Block)
    if columns % codec.columns:
        return None
    codes, scale = fields["codes"], (fields["scale"] * 256.0).repeat_interleave(codec.rows, dim=0)

    def step(start: int, stop: int, out: torch.Tensor) -> None:
        _from_e4m3(codes[start:stop], out)
        out.view(stop - start, -1, codec.columns).mul_(scale[start:stop].unsqueeze(2))

    return step


def _mxfp8(codec: Codec, fields: Fields, columns: int) -> Step | None:
    if columns % GROUP:
        return None
    codes, exponents = fields["codes"], fields["exponents"]

    def step(start: int, stop: int, out: torch.Tensor) -> None:
        _from_e4m3(codes[start:stop], out)
        out.mul_(256.0).view(stop - start, -1, GROUP).mul_(power_of_two(exponents[start:stop]).unsqueeze(2))

    return step


def _lookup(packed: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
    """Write the two numbers of every byte into float32 ``out``, contiguous, of twice as many elements."""
    index = SCRATCH.get("index", packed.numel(), torch.int32)
    index.copy_(packed.reshape(-1))
    torch.index_select(table, 0, index, out=out.view(-1).view(torch.int64))


def _mxfp4(codec: Codec, fields: Fields, columns: int) -> Step | None:
    if columns % GROUP:
        return None
    packed, exponents, coarse = fields["packed"], fields["exponents"], fields.get("coarse")
    if coarse is not None and columns % COARSE_GROUP:
        return None
    table = pair_table(constant(E2M1, packed))

    def step(start: int, stop: int, out: torch.Tensor) -> None:
        _lookup(packed[start:stop], table, out)
        scale = power_of_two(exponents[start:stop])
        if coarse is not None:
            scale.view(stop - start, -1, COARSE_GROUP // GROUP).mul_(coarse[start:stop].unsqueeze(2))
        out.view(stop - start, -1, GROUP).mul_(scale.unsqueeze(2))

    return step


def _int4_group(codec: Codec, fields: Fields, columns: int) -> Step | None:
    assert isinstance(codec, Int4Group)
    size = columns if codec.group_size == -1 else codec.group_size
    if columns % size or columns % 2:
        return None
    packed, scale, zero = fields["packed"], fields["scale"], fields.get("zero")
    table = pair_table(constant(range(16) if zero is not None else range(-8, 8), packed))

    def step(start: int, stop: int, out: torch.Tensor) -> None:
        _lookup(packed[start:stop], table, out)
        groups = out.view(stop - start, -1, size)
        if zero is not None:
            groups.sub_(zero[start:stop].float().unsqueeze(2))
        groups.mul_(scale[start:stop].float().unsqueeze(2))

    return step


def _bnb4(codec: Codec, fields: Fields, columns: int) -> Step | None:
    assert isinstance(codec, Bnb4)
    if columns % codec.block_size:
        return None
    table = pair_table(fields["code_map"].float(), high_first=True)
    packed = fields["packed"].view(-1, columns // 2)
    absmax = codec.block_scales(fields).view(-1, columns // codec.block_size)

    def step(start: int, stop: int, out: torch.Tensor) -> None:
        _lookup(packed[start:stop], table, out)
        out.view(stop - start, -1, codec.block_size).mul_(absmax[start:stop].unsqueeze(2))

    return step


_STEPS: dict[str, Callable[[Codec, Fields, int], Step | None]] = {
    "int8_channel": _int8_channel,
    "fp8_tensor": _fp8_rows,
    "fp8_channel": _fp8_rows,
    "fp8_block": _fp8_block,
    "mxfp8": _mxfp8,
    "mxfp4": _mxfp4,
    "mxfp4_dual": _mxfp4,
    "int4_group": _int4_group,
    "bnb4": _bnb4,
}
_GGUF_STEPS = gguf_steps(SCRATCH.get)
