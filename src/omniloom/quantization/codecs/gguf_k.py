"""GGUF's K types: blocks of 256 cells, whose sub-blocks of 16 or 32 have small integer scales of their own."""

from __future__ import annotations

import dataclasses

import torch

from omniloom.quantization.codecs.base import register_codec
from omniloom.quantization.codecs.gguf_base import (
    GgufCodec,
    bit_planes,
    ggml_type,
    half,
    nibbles,
    scaled,
    scaled_less,
    signed,
)


def scales_and_minima(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the eight 6-bit scales and minima of Q4_K and Q5_K, float32 (B, 8), of 12 bytes ``packed`` (B, 12).

    The first four of each are the low six bits of bytes 0-3 and 4-7; the others have their low four bits in bytes 8-11
    and their upper two in the top of bytes 0-3 and 4-7.
    """
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    scale = torch.cat((first & 63, (third & 15) | ((first >> 2) & 48)), dim=1)
    minimum = torch.cat((second & 63, (third >> 4) | ((second >> 2) & 48)), dim=1)
    return scale.float(), minimum.float()


@register_codec("gguf_q2_k")
@dataclasses.dataclass(frozen=True)
class Q2K(GgufCodec):
    """Block of 256: 16 bytes (scale low, minimum high), 64 bytes of 2-bit q, f16 d, f16 dmin; sub-blocks of 16.

    ``w = d · scale · q - dmin · minimum``. Every 32 bytes hold 128 cells: the lowest bit pairs first.
    """

    name, bits, kind = "gguf_q2_k", 2.0, ggml_type("Q2_K")

    def decode_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        scales = blocks[:, :16]
        scale = half(blocks, 80) * (scales & 15).float()
        less = half(blocks, 82) * (scales >> 4).float()
        return scaled_less(bit_planes(blocks[:, 16:80], 32, 2).float(), scale, less)


@register_codec("gguf_q3_k")
@dataclasses.dataclass(frozen=True)
class Q3K(GgufCodec):
    """Block of 256: 32 bytes of third bits, 64 of 2-bit codes, 12 of 6-bit scales, f16 d; sub-blocks of 16.

    ``w = d · (scale - 32) · (q - 4)``, the third bit of run i of 32 cells being bit i of the first bytes. Scales: low
    four bits in the halves of bytes 0-7, upper two in bytes 8-11, lowest pairs first.
    """

    name, bits, kind = "gguf_q3_k", 3.0, ggml_type("Q3_K")

    def decode_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        scales = blocks[:, 96:108]
        scale = nibbles(scales[:, :8], 8) | (bit_planes(scales[:, 8:], 4, 2) << 4)
        codes = bit_planes(blocks[:, 32:96], 32, 2) | (bit_planes(blocks[:, :32], 32, 1) << 2)
        return scaled(signed(codes, 4), half(blocks, 108) * signed(scale, 32))


@register_codec("gguf_q4_k")
@dataclasses.dataclass(frozen=True)
class Q4K(GgufCodec):
    """Block of 256: f16 d, f16 dmin, 12 bytes of scales and minima, 128 bytes of q; sub-blocks of 32.

    ``w = d · scale · q - dmin · minimum``. Every 32 bytes hold two sub-blocks: low halves, then high ones.
    """

    name, bits, kind = "gguf_q4_k", 4.0, ggml_type("Q4_K")

    def decode_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        scale, minimum = scales_and_minima(blocks[:, 4:16])
        values = nibbles(blocks[:, 16:], 32).float()
        return scaled_less(values, half(blocks, 0) * scale, half(blocks, 2) * minimum)


@register_codec("gguf_q5_k")
@dataclasses.dataclass(frozen=True)
class Q5K(GgufCodec):
    """Block of 256: as Q4_K, with 32 bytes before q whose bit i is bit 4 of the codes of sub-block i."""

    name, bits, kind = "gguf_q5_k", 5.0, ggml_type("Q5_K")

    def decode_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        scale, minimum = scales_and_minima(blocks[:, 4:16])
        codes = nibbles(blocks[:, 48:], 32) | (bit_planes(blocks[:, 16:48], 32, 1) << 4)
        return scaled_less(codes.float(), half(blocks, 0) * scale, half(blocks, 2) * minimum)


@register_codec("gguf_q6_k")
@dataclasses.dataclass(frozen=True)
class Q6K(GgufCodec):
    """Block of 256: 128 bytes of low halves, 64 of upper bit pairs, 16 int8 scales, f16 d; sub-blocks of 16.

    ``w = d · scale · (q - 32)``. 64 bytes and 32 bytes hold 128 cells: low halves, then high ones; lowest pairs first.
    """

    name, bits, kind = "gguf_q6_k", 6.0, ggml_type("Q6_K")

    def decode_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        codes = nibbles(blocks[:, :128], 64) | (bit_planes(blocks[:, 128:192], 32, 2) << 4)
        scale = half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
        return scaled(signed(codes, 32), scale)
