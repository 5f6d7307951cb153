"""GGUF's 4-bit types with a table of 16 values that are not evenly spaced: IQ4_NL and IQ4_XS."""

from __future__ import annotations

import dataclasses

import torch

from omniloom.quantization.codecs.base import register_codec
from omniloom.quantization.codecs.gguf_base import GgufCodec, bit_planes, ggml_type, half, nibbles, scaled, signed
from omniloom.quantization.codecs.nibbles import constant

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _values(packed: torch.Tensor) -> torch.Tensor:
    codes = nibbles(packed, 16)
    return constant(IQ4_VALUES, packed).index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)


@register_codec("gguf_iq4_nl")
@dataclasses.dataclass(frozen=True)
class Iq4Nl(GgufCodec):
    """Block of 32: f16 d, 16 bytes with q[j] low and q[j + 16] high. ``w = d · table[q]``."""

    name, bits, kind = "gguf_iq4_nl", 4.0, ggml_type("IQ4_NL")

    def decode_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        return half(blocks, 0) * _values(blocks[:, 2:])


@register_codec("gguf_iq4_xs")
@dataclasses.dataclass(frozen=True)
class Iq4Xs(GgufCodec):
    """Block of 256: f16 d, u16 of upper scale bits, 4 bytes of lower ones, 128 bytes in runs of 16 as in IQ4_NL.

    ``w = d · (scale - 32) · table[q]``; sub-block i of 32 has bits 2i of the first and half i of the second.
    """

    name, bits, kind = "gguf_iq4_xs", 4.0, ggml_type("IQ4_XS")

    def decode_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        scale = nibbles(blocks[:, 4:8], 1) | (bit_planes(blocks[:, 2:4], 1, 2) << 4)
        return scaled(_values(blocks[:, 8:]), half(blocks, 0) * signed(scale, 32))
