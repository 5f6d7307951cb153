"""Microscaling (OCP MX 1.0) codecs: E4M3 or E2M1 codes, one power-of-two scale for 32 columns, stored as a byte (E8M0).

A row's last group may be shorter than 32.
"""

from __future__ import annotations

import dataclasses

import torch

from omniloom.errors import ConfigError, suggest
from omniloom.quantization.codecs.base import Codec, Fields, FieldSpec, Shape, register_codec
from omniloom.quantization.codecs.chunks import decode_rows, encode_rows
from omniloom.quantization.codecs.fp8 import from_e4m3, to_e4m3
from omniloom.quantization.codecs.nibbles import constant, lookup_pairs, pack_low_first, pair_table, unpack_low_first
from omniloom.quantization.codecs.scales import (
    groups_of,
    positive_scale,
    power_of_two,
    scale_groups,
    shared_exponent,
    split_groups,
)

GROUP = 32
COARSE_GROUP = 512
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # by code
_E4M3_EXPONENT, _E2M1_EXPONENT = 8, 2  # of the largest values, 1.75 · 2^8 and 1.5 · 2^2


def _check(name: str, rounding: str, allowed: dict[str, float]) -> None:
    if rounding not in allowed:
        hint = suggest(rounding, allowed)
        raise ConfigError(f"{name}: unknown rounding {rounding!r}{hint} ({', '.join(allowed)})")


def to_e2m1(values: torch.Tensor, away: bool = False) -> torch.Tensor:
    """Return E2M1 codes, uint8, of float32 ``values``: nearest, saturating at 6.

    A value halfway between two takes the even code, or with ``away`` the one farther from zero. Values below zero that
    round to zero get code 8. The code is the rounded piecewise linear function with slope 2 up to 2, 1 up to 4, then
    1/2: the least of the three lines, each of which is rounded by itself, as adding first would round twice.
    """
    size = values.abs().clamp(max=6.0)
    nearest = _half_away if away else torch.round
    code = torch.minimum(nearest(size * 2), torch.minimum(nearest(size) + 2, nearest(size / 2) + 4))
    return (code + 8 * (values < 0)).to(torch.uint8)


def _half_away(values: torch.Tensor) -> torch.Tensor:
    below = values.floor()
    return below + (values - below >= 0.5)


def _e2m1_table(like: torch.Tensor) -> torch.Tensor:
    return pair_table(constant(E2M1, like))


@register_codec("mxfp8")
@dataclasses.dataclass(frozen=True)
class MxFp8(Codec):
    """MXFP8: E4M3 codes. Also the per-call activation format.

    ``rounding`` of the exponent: "floor" is OCP's floor(log2 amax) - 8, which saturates codes above 448; "ceil" is
    ModelOpt's ceil(log2(amax / 448)), which does not. Decoding takes the stored byte.
    Fields: ``codes`` F8_E4M3 (N, K); ``exponents`` U8 (N, ceil(K/32)).
    """

    rounding: str = "floor"

    name = "mxfp8"
    bits = 8.0
    _limits = {"floor": 2.0, "ceil": 448 / 2**_E4M3_EXPONENT}

    def __post_init__(self) -> None:
        _check(self.name, self.rounding, self._limits)

    def specs(self, shape: Shape) -> dict[str, FieldSpec]:
        grid = (shape[0], groups_of(shape[1], GROUP))
        return {"codes": FieldSpec(tuple(shape), torch.float8_e4m3fn), "exponents": FieldSpec(grid, torch.uint8)}

    def encode(self, weight: torch.Tensor) -> Fields:
        codes, exponents = encode_rows(weight, self._encode)
        return {"codes": codes, "exponents": exponents}

    def _encode(self, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        groups = split_groups(part, GROUP)
        exponents = shared_exponent(groups.abs().amax(dim=2), _E4M3_EXPONENT, self._limits[self.rounding])
        scaled = groups * power_of_two(254 - exponents).unsqueeze(2)
        return to_e4m3(scaled.flatten(1)[:, : part.shape[1]]), exponents

    def decode(self, fields: Fields, shape: Shape, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        codes, exponents = fields["codes"], fields["exponents"]
        return decode_rows(
            shape,
            dtype,
            codes.device,
            lambda rows: scale_groups(from_e4m3(codes[rows]), power_of_two(exponents[rows]), GROUP),
        )


@register_codec("mxfp4")
@dataclasses.dataclass(frozen=True)
class MxFp4(Codec):
    """MXFP4: E2M1 codes, halves to the even code. Also the per-call activation format.

    ``rounding`` of the exponent: "floor" is OCP's floor(log2 amax) - 2; "ceil" is ModelOpt's ceil(log2(amax / 6));
    "uos" is ceil(log2(amax / 7.25)), which lets the largest value saturate a little. Decoding takes the stored byte.
    Fields: ``packed`` U8 (N, ceil(K/2)), even k in the low nibble; ``exponents`` U8 (N, ceil(K/32)).
    """

    rounding: str = "floor"

    name = "mxfp4"
    bits = 4.0
    _limits = {"floor": 2.0, "ceil": 6 / 2**_E2M1_EXPONENT, "uos": 7.25 / 2**_E2M1_EXPONENT}

    def __post_init__(self) -> None:
        _check(self.name, self.rounding, self._limits)

    def specs(self, shape: Shape) -> dict[str, FieldSpec]:
        rows, columns = shape
        return {
            "packed": FieldSpec((rows, groups_of(columns, 2)), torch.uint8),
            "exponents": FieldSpec((rows, groups_of(columns, GROUP)), torch.uint8),
        }

    def encode(self, weight: torch.Tensor) -> Fields:
        packed, exponents = encode_rows(weight, self._encode)
        return {"packed": packed, "exponents": exponents}

    def _encode(self, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        groups = split_groups(part, GROUP)
        exponents = shared_exponent(groups.abs().amax(dim=2), _E2M1_EXPONENT, self._limits[self.rounding])
        codes = to_e2m1(groups * power_of_two(254 - exponents).unsqueeze(2))
        return pack_low_first(codes.flatten(1)[:, : part.shape[1]]), exponents

    def decode(self, fields: Fields, shape: Shape, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        packed, exponents = fields["packed"], fields["exponents"]
        table = _e2m1_table(packed)

        def step(rows: slice) -> torch.Tensor:
            values = lookup_pairs(packed[rows], table)[:, : shape[1]]
            return scale_groups(values, power_of_two(exponents[rows]), GROUP)

        return decode_rows(shape, dtype, packed.device, step)

    def reference_decode(self, fields: Fields, shape: Shape) -> torch.Tensor:
        """Return what ``decode`` returns in float32, written as the format is defined."""
        values = constant(E2M1, fields["packed"])[unpack_low_first(fields["packed"], shape[1]).long()]
        return values * power_of_two(fields["exponents"]).repeat_interleave(GROUP, dim=1)[:, : shape[1]]


@register_codec("mxfp4_dual")
@dataclasses.dataclass(frozen=True)
class MxFp4Dual(Codec):
    """Two-level MXFP4 of msModelSlim: a float32 scale for 512 columns over ordinary MXFP4.

    ``coarse`` is amax/6 of its 512 columns. The exponent of 32 columns of the quotient is
    floor(log2(amax·8/7 + 9.6e-7)) - 2, so that an amax close below a power of two takes the next one; halves round away
    from zero. ``weight = E2M1 · 2^(exponents - 127) · coarse``.
    Fields: ``packed`` U8 (N, ceil(K/2)), even k in the low nibble; ``exponents`` U8 (N, ceil(K/32)); ``coarse`` F32
    (N, ceil(K/512)).
    """

    name = "mxfp4_dual"
    bits = 4.0

    def specs(self, shape: Shape) -> dict[str, FieldSpec]:
        rows, columns = shape
        return {
            "packed": FieldSpec((rows, groups_of(columns, 2)), torch.uint8),
            "exponents": FieldSpec((rows, groups_of(columns, GROUP)), torch.uint8),
            "coarse": FieldSpec((rows, groups_of(columns, COARSE_GROUP)), torch.float32),
        }

    def encode(self, weight: torch.Tensor) -> Fields:
        packed, exponents, coarse = encode_rows(weight, self._encode)
        return {"packed": packed, "exponents": exponents, "coarse": coarse}

    @staticmethod
    def _encode(part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        columns = part.shape[1]
        blocks = split_groups(part, COARSE_GROUP)
        coarse = positive_scale(blocks.abs().amax(dim=2), 6.0)
        groups = split_groups((blocks / coarse.unsqueeze(2)).flatten(1)[:, :columns], GROUP)
        exponents = shared_exponent(groups.abs().amax(dim=2) * (8 / 7) + 9.6e-7, _E2M1_EXPONENT)
        codes = to_e2m1(groups * power_of_two(254 - exponents).unsqueeze(2), away=True)
        return pack_low_first(codes.flatten(1)[:, :columns]), exponents, coarse

    def decode(self, fields: Fields, shape: Shape, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        packed, exponents, coarse = fields["packed"], fields["exponents"], fields["coarse"]
        table = _e2m1_table(packed)

        def step(rows: slice) -> torch.Tensor:
            values = lookup_pairs(packed[rows], table)[:, : shape[1]]
            fine = scale_groups(power_of_two(exponents[rows]), coarse[rows], COARSE_GROUP // GROUP)
            return scale_groups(values, fine, GROUP)

        return decode_rows(shape, dtype, packed.device, step)

    def reference_decode(self, fields: Fields, shape: Shape) -> torch.Tensor:
        """Return what ``decode`` returns in float32, written as the format is defined."""
        values = constant(E2M1, fields["packed"])[unpack_low_first(fields["packed"], shape[1]).long()]
        fine = power_of_two(fields["exponents"]).repeat_interleave(GROUP, dim=1)[:, : shape[1]]
        return values * fine * fields["coarse"].repeat_interleave(COARSE_GROUP, dim=1)[:, : shape[1]]
