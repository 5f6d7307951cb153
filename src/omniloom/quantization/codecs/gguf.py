"""GGUF's block types as codecs: the simple ones (Q4_0 … Q8_0, MXFP4, NVFP4, halves), and a way to all of them by name.

Formats as ggml's ``ggml-common.h`` and ``ggml-quants.c`` define them; numbers are those of the ``gguf`` package.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from omniloom.errors import ConfigError, suggest
from omniloom.quantization.codecs import gguf_iq, gguf_k
from omniloom.quantization.codecs.base import Codec, codec_names, get_codec, register_codec
from omniloom.quantization.codecs.gguf_base import GgufCodec, ggml_type, half, half_bytes, nibbles, signed
from omniloom.quantization.codecs.nibbles import constant

__all__ = ["GgufCodec", "gguf_codec", "gguf_iq", "gguf_k"]

DOUBLED_E2M1 = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0)
_MIDPOINTS = (0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0)


@functools.cache
def gguf_codec(type_name: str) -> Codec:
    """Return the codec of ggml's type ("Q4_K", "IQ2_XXS", "BF16"). Raises ``ConfigError`` for an unknown one."""
    name = f"gguf_{type_name.lower()}"
    return get_codec(name) if name in codec_names() else get_codec("gguf_other", type=type_name)


def _inverse(d: torch.Tensor) -> torch.Tensor:
    return torch.where(d == 0, 0.0, 1.0 / d)


def _codes(values: torch.Tensor, most: int) -> torch.Tensor:
    """Return values, which are not negative, cut to whole numbers of at most ``most``."""
    return values.nan_to_num(0.0).clamp(0, most).to(torch.uint8)


def _pack(codes: torch.Tensor) -> torch.Tensor:
    low, high = codes.chunk(2, dim=1)
    return (low & 15) | (high << 4)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """Return uint8 (B, 32): bit j of the four bytes ``packed`` (B, 4), times 16."""
    return torch.stack([(packed >> bit) & 1 for bit in range(8)], dim=2).flatten(1) << 4


def _pack_fifth_bits(codes: torch.Tensor) -> torch.Tensor:
    bits = (codes >> 4).unflatten(1, (4, 8))
    packed = bits[:, :, 0]
    for bit in range(1, 8):
        packed = packed | (bits[:, :, bit] << bit)
    return packed


def _by_extreme(blocks: torch.Tensor, half_range: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale (B, 1) that puts the value of largest magnitude on code 0, and the codes (B, 32)."""
    extreme = blocks.gather(1, blocks.abs().argmax(dim=1, keepdim=True))
    d = extreme / -half_range
    return d, _codes(blocks * _inverse(d) + (half_range + 0.5), 2 * half_range - 1)


def _by_range(blocks: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return scale and minimum (B, 1) of the blocks' ranges, and the codes (B, 32)."""
    low = blocks.amin(dim=1, keepdim=True)
    d = (blocks.amax(dim=1, keepdim=True) - low) / most
    return d, low, _codes((blocks - low) * _inverse(d) + 0.5, most)


@register_codec("gguf_q8_0")
@dataclasses.dataclass(frozen=True)
class Q8_0(GgufCodec):
    """Block of 32: f16 d, 32 int8 q. ``w = q · d``."""

    name, bits, kind = "gguf_q8_0", 8.0, ggml_type("Q8_0")

    def decode_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        return blocks[:, 2:].view(torch.int8).float() * half(blocks, 0)

    def encode_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        d = blocks.abs().amax(dim=1, keepdim=True) / 127
        x = blocks * _inverse(d)
        size = x.abs()
        whole = size.floor()
        away = (whole + (2 * (size - whole)).floor()) * x.sign()  # halves go away from zero
        codes = away.nan_to_num(0.0).clamp(-127, 127).to(torch.int8).view(torch.uint8)
        return torch.cat((half_bytes(d), codes), dim=1)


@register_codec("gguf_q4_0")
@dataclasses.dataclass(frozen=True)
class Q4_0(GgufCodec):
    """Block of 32: f16 d, 16 bytes with q[j] low and q[j + 16] high. ``w = d · (q - 8)``."""

    name, bits, kind = "gguf_q4_0", 4.0, ggml_type("Q4_0")

    def decode_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        return half(blocks, 0) * signed(nibbles(blocks[:, 2:], 16), 8)

    def encode_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        d, codes = _by_extreme(blocks, 8)
        return torch.cat((half_bytes(d), _pack(codes)), dim=1)


@register_codec("gguf_q4_1")
@dataclasses.dataclass(frozen=True)
class Q4_1(GgufCodec):
    """Block of 32: f16 d, f16 m, 16 bytes as in Q4_0. ``w = d · q + m``."""

    name, bits, kind = "gguf_q4_1", 4.0, ggml_type("Q4_1")

    def decode_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        return half(blocks, 0) * nibbles(blocks[:, 4:], 16).float() + half(blocks, 2)

    def encode_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        d, low, codes = _by_range(blocks, 15)
        return torch.cat((half_bytes(d), half_bytes(low), _pack(codes)), dim=1)


@register_codec("gguf_q5_0")
@dataclasses.dataclass(frozen=True)
class Q5_0(GgufCodec):
    """Block of 32: f16 d, u32 whose bit j is bit 4 of q[j], 16 bytes as in Q4_0. ``w = d · (q - 16)``."""

    name, bits, kind = "gguf_q5_0", 5.0, ggml_type("Q5_0")

    def decode_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        return half(blocks, 0) * signed(nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6]), 16)

    def encode_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        d, codes = _by_extreme(blocks, 16)
        return torch.cat((half_bytes(d), _pack_fifth_bits(codes), _pack(codes)), dim=1)


@register_codec("gguf_q5_1")
@dataclasses.dataclass(frozen=True)
class Q5_1(GgufCodec):
    """Block of 32: f16 d, f16 m, the fifth bits and 16 bytes as in Q5_0. ``w = d · q + m``."""

    name, bits, kind = "gguf_q5_1", 5.0, ggml_type("Q5_1")

    def decode_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        codes = nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8])
        return half(blocks, 0) * codes.float() + half(blocks, 2)

    def encode_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        d, low, codes = _by_range(blocks, 31)
        return torch.cat((half_bytes(d), half_bytes(low), _pack_fifth_bits(codes), _pack(codes)), dim=1)


def _half_power(e: torch.Tensor) -> torch.Tensor:
    """Return float32 2^(e - 128) of bytes ``e``: half of the E8M0 scale, as the table holds doubled values."""
    byte = e.to(torch.int32)
    return torch.where(byte < 2, 0x00200000 << byte.clamp(max=1), (byte - 1).clamp(min=0) << 23).view(torch.float32)


@register_codec("gguf_mxfp4")
@dataclasses.dataclass(frozen=True)
class GgufMxFp4(GgufCodec):
    """Block of 32: byte e, 16 bytes as in Q4_0. ``w = 2^(e - 127) · E2M1[q]``; unlike OCP's MXFP4, e = 255 is no NaN.

    Encoding takes floor(log2 amax) - 2 and the nearest value, halves towards zero.
    """

    name, bits, kind = "gguf_mxfp4", 4.0, ggml_type("MXFP4")

    def decode_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        codes = nibbles(blocks[:, 1:], 16)
        return _half_power(blocks[:, :1]) * _look_up(codes, DOUBLED_E2M1)

    def encode_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        size = blocks.abs()
        amax = size.amax(dim=1, keepdim=True)
        power = (amax.double().log2().float().floor() - 2 + 127).clamp(0, 254)
        e = torch.where(amax > 0, power, 0.0).to(torch.uint8)
        d = _half_power(e)
        codes = torch.zeros_like(blocks, dtype=torch.uint8)
        for midpoint in _MIDPOINTS:
            codes = codes + (size > d * midpoint)
        codes = torch.where((blocks < 0) & (codes > 0), codes + 8, codes)
        return torch.cat((e, _pack(codes)), dim=1)


@register_codec("gguf_nvfp4")
@dataclasses.dataclass(frozen=True)
class GgufNvFp4(GgufCodec):
    """Block of 64: four E4M3 bytes without sign, four times 8 bytes, low halves first. ``w = E4M3[s] · E2M1[q]``.

    The scale byte 0x7F counts as 0; the sign bit is ignored.
    """

    name, bits, kind = "gguf_nvfp4", 4.0, ggml_type("NVFP4")

    def decode_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        scale = blocks[:, :4].to(torch.int32)
        exponent, mantissa = (scale >> 3) & 15, scale & 7
        normal = ((exponent + (127 - 7 - 1)) << 23 | mantissa << 20).view(torch.float32)  # halved
        value = torch.where(exponent == 0, mantissa.float() * 2.0**-10, normal)
        value = torch.where(scale == 0x7F, 0.0, value)
        codes = _look_up(nibbles(blocks[:, 4:], 8), DOUBLED_E2M1)
        return (codes.unflatten(1, (4, 16)) * value.unsqueeze(2)).flatten(1)


def _look_up(codes: torch.Tensor, values: tuple[float, ...]) -> torch.Tensor:
    table = constant(values, codes)
    return table.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)


@register_codec("gguf_f16")
@dataclasses.dataclass(frozen=True)
class GgufF16(GgufCodec):
    """Plain float16, as bytes. What is out of range saturates."""

    name, bits, kind = "gguf_f16", 16.0, ggml_type("F16")

    def decode_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        return blocks.contiguous().view(torch.float16).float()

    def encode_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        return half_bytes(blocks)


@register_codec("gguf_bf16")
@dataclasses.dataclass(frozen=True)
class GgufBf16(GgufCodec):
    """Plain bfloat16, as bytes."""

    name, bits, kind = "gguf_bf16", 16.0, ggml_type("BF16")

    def decode_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        return blocks.contiguous().view(torch.bfloat16).float()

    def encode_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        return blocks.contiguous().to(torch.bfloat16).view(torch.uint8)


_OTHER = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0")


@register_codec("gguf_other")
@dataclasses.dataclass(frozen=True)
class GgufOther(GgufCodec):
    """The types of code books (IQ1, IQ2, IQ3) and ternary ones (TQ), decoded by the ``gguf`` package, on the CPU.

    ``type``: ggml's name. Cannot be traced. Raises ``ConfigError`` for a type that is not of these, or without the
    package.
    """

    type: str = "IQ2_XXS"

    name, bits = "gguf_other", 0.0

    def __post_init__(self) -> None:
        if self.type not in _OTHER:
            known = [name.removeprefix("gguf_").upper() for name in codec_names() if name.startswith("gguf_")]
            known = sorted({*known, *_OTHER} - {"OTHER"})
            raise ConfigError(f"unknown GGUF type {self.type!r}{suggest(self.type, known)} (known: {', '.join(known)})")
        object.__setattr__(self, "kind", ggml_type(self.type))

    def decode_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        if blocks.is_meta:
            return torch.empty(blocks.shape[0], self.kind.block, device="meta")
        try:
            from gguf import GGMLQuantizationType
            from gguf.quants import dequantize
        except ImportError as error:
            raise ConfigError(
                f'decoding {self.type} needs the gguf package: pip install "omniloom[gguf]" (or pip install gguf)'
            ) from error
        values = dequantize(blocks.cpu().numpy(), GGMLQuantizationType[self.type])
        return torch.from_numpy(values).to(blocks.device)
