"""FP8 (E4M3) codes with a float32 scale per tensor, per row or per block: ``weight = codes · scale``.

The formats of vLLM and ModelOpt (tensor), of compressed-tensors and ModelOpt (row), of DeepSeek (block). E4M3 is the
OCP 8-bit floating point specification's type: largest value 448, no infinity, so values are clamped before the cast,
which rounds half to even.
"""

from __future__ import annotations

import dataclasses

import torch

from omniloom.errors import ConfigError
from omniloom.quantization.codecs.base import Codec, Fields, FieldSpec, Shape, register_codec
from omniloom.quantization.codecs.chunks import decode_rows, encode_rows
from omniloom.quantization.codecs.scales import groups_of, positive_scale

LARGEST = 448.0


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Return float8_e4m3fn codes of float32 ``values``, saturating."""
    return values.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def from_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """Return ``codes`` in float32. On a CPU by table: torch's own conversion takes 2.3 times as long."""
    if codes.device.type != "cpu" or torch.compiler.is_compiling():
        return codes.float()
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return table.index_select(0, codes.view(torch.uint8).reshape(-1).to(torch.int32)).view(codes.shape)


@register_codec("fp8_tensor")
@dataclasses.dataclass(frozen=True)
class Fp8Tensor(Codec):
    """One scale for the whole matrix. Fields: ``codes`` F8_E4M3 (N, K); ``scale`` F32 ()."""

    name = "fp8_tensor"
    bits = 8.0

    def specs(self, shape: Shape) -> dict[str, FieldSpec]:
        return {"codes": FieldSpec(tuple(shape), torch.float8_e4m3fn), "scale": FieldSpec((), torch.float32)}

    def encode(self, weight: torch.Tensor) -> Fields:
        low, high = torch.aminmax(weight.detach())  # without a matrix of absolute values
        scale = positive_scale(torch.maximum(-low.float(), high.float()), LARGEST)
        (codes,) = encode_rows(weight, lambda part: (to_e4m3(part.float() / scale),))
        return {"codes": codes, "scale": scale}

    def decode(self, fields: Fields, shape: Shape, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        codes, scale = fields["codes"], fields["scale"]
        return decode_rows(shape, dtype, codes.device, lambda rows: from_e4m3(codes[rows]) * scale)


@register_codec("fp8_channel")
@dataclasses.dataclass(frozen=True)
class Fp8Channel(Codec):
    """One scale per row: per output channel of a weight, per token of an activation.

    Fields: ``codes`` F8_E4M3 (N, K); ``scale`` F32 (N, 1).
    """

    name = "fp8_channel"
    bits = 8.0

    def specs(self, shape: Shape) -> dict[str, FieldSpec]:
        return {"codes": FieldSpec(tuple(shape), torch.float8_e4m3fn), "scale": FieldSpec((shape[0], 1), torch.float32)}

    def encode(self, weight: torch.Tensor) -> Fields:
        codes, scale = encode_rows(weight, self._encode)
        return {"codes": codes, "scale": scale}

    @staticmethod
    def _encode(part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        part = part.float()
        scale = positive_scale(part.abs().amax(dim=1, keepdim=True), LARGEST)
        return to_e4m3(part / scale), scale

    def decode(self, fields: Fields, shape: Shape, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        codes, scale = fields["codes"], fields["scale"]
        return decode_rows(shape, dtype, codes.device, lambda rows: from_e4m3(codes[rows]) * scale[rows])


@register_codec("fp8_block")
@dataclasses.dataclass(frozen=True)
class Fp8Block(Codec):
    """One scale per block of ``rows`` × ``columns`` cells; blocks at the right and lower edge may be smaller.

    Fields: ``codes`` F8_E4M3 (N, K); ``scale`` F32 (ceil(N/rows), ceil(K/columns)), a factor
    (files call it an inverse).
    """

    rows: int = 128
    columns: int = 128

    name = "fp8_block"
    bits = 8.0

    def __post_init__(self) -> None:
        if self.rows < 1 or self.columns < 1:
            raise ConfigError(f"fp8_block: a block of {self.rows} × {self.columns} cells; both must be at least 1")

    def specs(self, shape: Shape) -> dict[str, FieldSpec]:
        blocks = (groups_of(shape[0], self.rows), groups_of(shape[1], self.columns))
        return {"codes": FieldSpec(tuple(shape), torch.float8_e4m3fn), "scale": FieldSpec(blocks, torch.float32)}

    def encode(self, weight: torch.Tensor) -> Fields:
        codes, scale = encode_rows(weight, self._encode, self.rows)
        return {"codes": codes, "scale": scale}

    def _encode(self, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        part = part.float()
        column_amax = _pad_to(part, 0, self.rows).abs().unflatten(0, (-1, self.rows)).amax(dim=1)
        amax = _pad_to(column_amax, 1, self.columns).unflatten(1, (-1, self.columns)).amax(dim=2)
        scale = positive_scale(amax, LARGEST)
        return to_e4m3(part / self._spread(scale, part.shape)), scale

    def _spread(self, scale: torch.Tensor, shape: torch.Size | Shape) -> torch.Tensor:
        by_row = scale.repeat_interleave(self.rows, dim=0)[: shape[0]]
        return by_row.repeat_interleave(self.columns, dim=1)[:, : shape[1]]

    def decode(self, fields: Fields, shape: Shape, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        codes, scale = fields["codes"], fields["scale"]

        def step(rows: slice) -> torch.Tensor:
            part = from_e4m3(codes[rows])
            return part * self._spread(scale[rows.start // self.rows : groups_of(rows.stop, self.rows)], part.shape)

        return decode_rows(shape, dtype, codes.device, step, self.rows)


def _pad_to(matrix: torch.Tensor, dim: int, multiple: int) -> torch.Tensor:
    missing = -matrix.shape[dim] % multiple
    if not missing:
        return matrix
    return torch.nn.functional.pad(matrix, (0, missing) if dim == 1 else (0, 0, 0, missing))
