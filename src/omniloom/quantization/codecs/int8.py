"""Symmetric int8 with one scale per row: the common W8A8 form and the form bitsandbytes stores."""

from __future__ import annotations

import dataclasses

import torch

from omniloom.quantization.codecs.base import Codec, Fields, FieldSpec, Shape, register_codec
from omniloom.quantization.codecs.chunks import decode_rows, encode_rows
from omniloom.quantization.codecs.scales import positive_scale

LARGEST = 127.0


@register_codec("int8_channel")
@dataclasses.dataclass(frozen=True)
class Int8Channel(Codec):
    """Row scale = amax/127, round half to even: per output channel of a weight, per token of an activation.

    Fields: ``codes`` I8 (N, K); ``scale`` F32 (N, 1). The format of vLLM, compressed-tensors and msModelSlim (dynamic).
    A file may hold the code -128; encoding never makes it.
    """

    name = "int8_channel"
    bits = 8.0

    def specs(self, shape: Shape) -> dict[str, FieldSpec]:
        return {"codes": FieldSpec(tuple(shape), torch.int8), "scale": FieldSpec((shape[0], 1), torch.float32)}

    def encode(self, weight: torch.Tensor) -> Fields:
        codes, scale = encode_rows(weight, self._encode)
        return {"codes": codes, "scale": scale}

    @staticmethod
    def _encode(part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        part = part.float()
        scale = positive_scale(part.abs().amax(dim=1, keepdim=True), LARGEST)
        return (part / scale).round().clamp(-LARGEST, LARGEST).to(torch.int8), scale

    def decode(self, fields: Fields, shape: Shape, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        codes, scale = fields["codes"], fields["scale"]
        return decode_rows(shape, dtype, codes.device, lambda rows: codes[rows].float() * scale[rows])


@register_codec("int8_rowmax")
@dataclasses.dataclass(frozen=True)
class Int8Rowmax(Codec):
    """LLM.int8 as bitsandbytes stores it: the row's maximum itself is kept, ``weight = codes · (row_absmax / 127)``.

    Fields: ``codes`` I8 (N, K); ``row_absmax`` F32 (N,), zero for a row of zeros.
    """

    name = "int8_rowmax"
    bits = 8.0

    def specs(self, shape: Shape) -> dict[str, FieldSpec]:
        return {"codes": FieldSpec(tuple(shape), torch.int8), "row_absmax": FieldSpec((shape[0],), torch.float32)}

    def encode(self, weight: torch.Tensor) -> Fields:
        codes, row_absmax = encode_rows(weight, self._encode)
        return {"codes": codes, "row_absmax": row_absmax}

    @staticmethod
    def _encode(part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        part = part.float()
        amax = part.abs().amax(dim=1)
        factor = LARGEST / amax.clamp(min=1e-36)  # below, 127 / amax overflows; a product, as bitsandbytes rounds it
        return (part * factor.unsqueeze(1)).round().clamp(-LARGEST, LARGEST).to(torch.int8), amax

    def decode(self, fields: Fields, shape: Shape, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        codes, row_absmax = fields["codes"], fields["row_absmax"]
        scale = (row_absmax / LARGEST).clamp(max=torch.finfo(torch.float32).max / LARGEST * (1 - 2**-23)).unsqueeze(1)
        return decode_rows(shape, dtype, codes.device, lambda rows: codes[rows].float() * scale[rows])
