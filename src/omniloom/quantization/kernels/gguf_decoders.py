"""Decoding GGUF blocks on a CPU into memory that is reused: unpacked as bytes, widened once, scaled in place."""

from __future__ import annotations

from collections.abc import Callable

import torch

from omniloom.quantization.codecs.base import Codec, Fields
from omniloom.quantization.codecs.gguf_base import GgufCodec, half
from omniloom.quantization.codecs.gguf_k import scales_and_minima

Step = Callable[[int, int, torch.Tensor], None]  # (first row, last row, out: float32 (rows, K))
Get = Callable[[str, int, torch.dtype], torch.Tensor]  # scratch memory by name
_Decode = Callable[[torch.Tensor, torch.Tensor, Get], None]  # (blocks uint8 (B, size), out float32 (B, block), scratch)


_LOW = 0x0F0F0F0F0F0F0F0F
_PAIR = 0x3030303030303030


def _words(get: Get, name: str, part: torch.Tensor) -> torch.Tensor:
    """Return a copy of the bytes ``part`` (B, 8·words) as int64 (B, words): bit operations take 8 bytes at once."""
    copy = get(name, part.numel(), torch.uint8).view(part.shape)
    return copy.copy_(part).view(torch.int64)


def _codes(get: Get, out: torch.Tensor) -> torch.Tensor:
    return get("gguf codes", out.numel(), torch.uint8).view(out.shape)


def _split(words: torch.Tensor, codes: torch.Tensor, run: int) -> None:
    """Write the halves of the bytes in ``words``: of every ``run`` bytes the low ones, then the high ones."""
    runs = codes.view(torch.int64).view(words.shape[0], -1, 2, run // 8)
    words = words.view(words.shape[0], -1, run // 8)
    torch.bitwise_and(words, _LOW, out=runs[:, :, 0])
    torch.bitwise_and(words.bitwise_right_shift_(4), _LOW, out=runs[:, :, 1])


def _q8_0(blocks: torch.Tensor, out: torch.Tensor, get: Get) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8)).mul_(half(blocks, 0))


def _q4_0(blocks: torch.Tensor, out: torch.Tensor, get: Get) -> None:
    codes = _codes(get, out)
    _split(_words(get, "gguf low", blocks[:, 2:]), codes, 16)
    out.copy_(codes.sub_(8).view(torch.int8)).mul_(half(blocks, 0))


def _q4_k(blocks: torch.Tensor, out: torch.Tensor, get: Get) -> None:
    codes = _codes(get, out)
    _split(_words(get, "gguf low", blocks[:, 16:]), codes, 32)
    scale, minimum = scales_and_minima(blocks[:, 4:16])
    out.copy_(codes)
    groups = out.view(-1, 8, 32)
    groups.mul_(scale.mul_(half(blocks, 0)).unsqueeze(2)).sub_(minimum.mul_(half(blocks, 2)).unsqueeze(2))


def _q6_k(blocks: torch.Tensor, out: torch.Tensor, get: Get) -> None:
    codes = _codes(get, out)
    _split(_words(get, "gguf low", blocks[:, :128]), codes, 64)
    high = _words(get, "gguf high", blocks[:, 128:192]).view(-1, 2, 4)
    quarters = codes.view(torch.int64).view(-1, 2, 4, 4)
    pairs = get("gguf pairs", high.numel(), torch.int64).view(high.shape)
    for index in range(4):  # the mask drops what a shift moved in from the neighbouring byte
        shift = torch.bitwise_left_shift if index < 2 else torch.bitwise_right_shift
        shift(high, abs(4 - 2 * index), out=pairs)
        quarters[:, :, index] |= pairs.bitwise_and_(_PAIR)
    out.copy_(codes.sub_(32).view(torch.int8))
    scale = blocks[:, 192:208].view(torch.int8).float().mul_(half(blocks, 208))
    out.view(-1, 16, 16).mul_(scale.unsqueeze(2))


_DECODE: dict[str, _Decode] = {"gguf_q8_0": _q8_0, "gguf_q4_0": _q4_0, "gguf_q4_k": _q4_k, "gguf_q6_k": _q6_k}


def gguf_steps(get: Get) -> dict[str, Callable[[Codec, Fields, int], Step | None]]:
    """Return what makes the step of each codec, with scratch memory from ``get``."""

    def maker(decode: _Decode) -> Callable[[Codec, Fields, int], Step | None]:
        def make(codec: Codec, fields: Fields, columns: int) -> Step | None:
            assert isinstance(codec, GgufCodec)
            packed, kind = fields["packed"], codec.kind
            if columns % kind.block or not packed.is_contiguous():
                return None

            def step(start: int, stop: int, out: torch.Tensor) -> None:
                decode(packed[start:stop].view(-1, kind.size), out.view(-1, kind.block), get)

            return step

        return make

    return {name: maker(decode) for name, decode in _DECODE.items()}
