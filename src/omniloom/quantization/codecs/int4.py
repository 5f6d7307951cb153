"""Integer 4-bit codes in groups along K: the numbers of GPTQ, AWQ and AutoRound files, in one plain packing."""

from __future__ import annotations

import dataclasses

import torch

from omniloom.errors import ConfigError, suggest
from omniloom.quantization.codecs.base import Codec, Fields, FieldSpec, Shape, register_codec
from omniloom.quantization.codecs.chunks import decode_rows, encode_rows
from omniloom.quantization.codecs.nibbles import constant, lookup_pairs, pack_low_first, pair_table, unpack_low_first
from omniloom.quantization.codecs.scales import groups_of, scale_groups, split_groups

_SCALE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@register_codec("int4_group")
@dataclasses.dataclass(frozen=True)
class Int4Group(Codec):
    """``weight = (code - zero) · scale`` with one scale per ``group_size`` columns (-1: one per row).

    Fields: ``packed`` U8 (N, ceil(K/2)), even k in the low nibble; ``scale`` (N, G) in ``scale_dtype``, which is
    float16 in files; ``zero`` U8 (N, G), only if not symmetric. G = ceil(K/group_size), the last group may be shorter.

    Encoding rounds to the nearest as AutoRound does with no tuning steps. Symmetric: zero is 8 and the scale takes the
    sign that puts the group's extreme value on code 0, so scales **may be negative**. Not symmetric: the range from the
    smaller of minimum and 0 to the larger of maximum and 0 is divided by 15. A stored zero may be 16, as GPTQ files
    hold zero - 1. Codes are computed with the scale as it is stored. Outside of float16's range (a scale above 65504 or
    below 6e-8) groups saturate or flush; ``scale_dtype="float32"`` avoids it.
    """

    group_size: int = 128
    symmetric: bool = True
    scale_dtype: str = "float16"

    name = "int4_group"
    bits = 4.0

    def __post_init__(self) -> None:
        if self.group_size != -1 and self.group_size < 1:
            raise ConfigError(f"int4_group: group_size {self.group_size}; it must be -1 (the whole row) or at least 1")
        if self.scale_dtype not in _SCALE_DTYPES:
            hint = suggest(self.scale_dtype, _SCALE_DTYPES)
            raise ConfigError(
                f"int4_group: unknown scale_dtype {self.scale_dtype!r}{hint} ({', '.join(_SCALE_DTYPES)})"
            )

    def _size(self, columns: int) -> int:
        return columns if self.group_size == -1 else self.group_size

    def specs(self, shape: Shape) -> dict[str, FieldSpec]:
        rows, columns = shape
        grid = (rows, groups_of(columns, self._size(columns)))
        specs = {
            "packed": FieldSpec((rows, groups_of(columns, 2)), torch.uint8),
            "scale": FieldSpec(grid, _SCALE_DTYPES[self.scale_dtype]),
        }
        return specs if self.symmetric else {**specs, "zero": FieldSpec(grid, torch.uint8)}

    def encode(self, weight: torch.Tensor) -> Fields:
        fields = encode_rows(weight, self._encode)
        return dict(zip(self.specs((weight.shape[0], weight.shape[1])), fields, strict=True))

    def _encode(self, part: torch.Tensor) -> tuple[torch.Tensor, ...]:
        columns = part.shape[1]
        groups = split_groups(part, self._size(columns))
        low, high = groups.amin(dim=2).clamp(max=0), groups.amax(dim=2).clamp(min=0)
        if self.symmetric:
            scale = self._store(torch.where(-low > high, low, high) / -8)
            zero = torch.full_like(scale, 8.0, dtype=torch.float32)
        else:
            scale = self._store((high / 2 - low / 2) / 7.5)  # (high - low) / 15 without overflow, and equal to it
            zero = (-low / scale.float()).round().clamp(0, 15)
        codes = ((groups / scale.float().unsqueeze(2)).round() + zero.unsqueeze(2)).clamp(0, 15)
        packed = pack_low_first(codes.to(torch.uint8).flatten(1)[:, :columns])
        return (packed, scale) if self.symmetric else (packed, scale, zero.to(torch.uint8))

    def _store(self, scale: torch.Tensor) -> torch.Tensor:
        info = torch.finfo(_SCALE_DTYPES[self.scale_dtype])
        least = info.smallest_normal * info.eps if self.scale_dtype == "float16" else info.smallest_normal
        most = info.max if self.scale_dtype == "float16" else info.max / (8 if self.symmetric else 16)
        size = scale.abs().clamp(least, most)
        return torch.where(scale == 0, 1.0, torch.where(scale < 0, -size, size)).to(_SCALE_DTYPES[self.scale_dtype])

    def decode(self, fields: Fields, shape: Shape, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        packed, scale, size, columns = fields["packed"], fields["scale"], self._size(shape[1]), shape[1]
        table = pair_table(constant(range(-8, 8) if self.symmetric else range(16), packed))

        def step(rows: slice) -> torch.Tensor:
            values = lookup_pairs(packed[rows], table)[:, :columns]
            if not self.symmetric:
                values = _subtract_groups(values, fields["zero"][rows].float(), size)
            return scale_groups(values, scale[rows].float(), size)

        return decode_rows(shape, dtype, packed.device, step)

    def reference_decode(self, fields: Fields, shape: Shape) -> torch.Tensor:
        """Return what ``decode`` returns in float32, written as the format is defined."""
        size = self._size(shape[1])
        codes = unpack_low_first(fields["packed"], shape[1]).float()
        zero = torch.full_like(fields["scale"], 8.0) if self.symmetric else fields["zero"]
        spread = [t.float().repeat_interleave(size, dim=1)[:, : shape[1]] for t in (zero, fields["scale"])]
        return (codes - spread[0]) * spread[1]


def _subtract_groups(values: torch.Tensor, zero: torch.Tensor, size: int) -> torch.Tensor:
    if values.shape[1] % size == 0:
        return (values.unflatten(1, (-1, size)) - zero.unsqueeze(-1)).flatten(1)
    return values - zero.repeat_interleave(size, dim=1)[:, : values.shape[1]]
