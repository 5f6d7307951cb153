"""What the codecs of GGUF's block types share: one field of bytes, rows of whole blocks."""

from __future__ import annotations

import abc

import torch

from omniloom.checkpoint.gguf import TYPES_BY_NAME, GgmlType
from omniloom.errors import ConfigError
from omniloom.quantization.codecs.base import Codec, Fields, FieldSpec, Shape
from omniloom.quantization.codecs.chunks import decode_rows, encode_rows
from omniloom.quantization.codecs.scales import groups_of


class GgufCodec(Codec):
    """Blocks of ``kind.block`` cells along K in ``kind.size`` bytes, little-endian, as they lie in the file.

    Field: ``packed`` U8 (N, K / block · size). K must be a multiple of the block. Values are computed in float32 with
    the operations, and in the order, of ggml's own decoder. ``encode`` raises ``ConfigError`` for types that come from
    files only.
    """

    kind: GgmlType

    def specs(self, shape: Shape) -> dict[str, FieldSpec]:
        return {"packed": FieldSpec((shape[0], groups_of(shape[1], self.kind.block) * self.kind.size), torch.uint8)}

    def problem(self, shape: Shape) -> str | None:
        if shape[1] % self.kind.block:
            return f"{self.kind.name} stores blocks of {self.kind.block} columns, the matrix has {shape[1]}"
        return None

    def encode(self, weight: torch.Tensor) -> Fields:
        problem = self.problem((weight.shape[0], weight.shape[1]))
        if problem:
            raise ConfigError(problem)
        kind = self.kind

        def step(part: torch.Tensor) -> tuple[torch.Tensor]:
            blocks = self.encode_blocks(part.float().reshape(-1, kind.block))
            return (blocks.view(part.shape[0], part.shape[1] // kind.block * kind.size),)

        return {"packed": encode_rows(weight, step)[0]}

    def decode(self, fields: Fields, shape: Shape, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        packed, size = fields["packed"], self.kind.size
        return decode_rows(
            shape,
            dtype,
            packed.device,
            lambda rows: self.decode_blocks(packed[rows].reshape(-1, size)).view(-1, shape[1]),
        )

    @abc.abstractmethod
    def decode_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return float32 (B, block) of ``blocks`` uint8 (B, size)."""

    def encode_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return uint8 (B, size) of ``blocks`` float32 (B, block)."""
        raise ConfigError(f"{self.kind.name} weights come from GGUF files only; omniloom does not make them")


def ggml_type(name: str) -> GgmlType:
    """Return the type called ``name``."""
    return TYPES_BY_NAME[name]


def half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the float16 at byte ``at`` of every block, as float32 (B, 1)."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def half_bytes(values: torch.Tensor) -> torch.Tensor:
    """Return float32 ``values`` (B, 1) as float16 bytes, uint8 (B, 2). What is out of range saturates."""
    return values.clamp(-65504.0, 65504.0).to(torch.float16).view(torch.uint8)


def nibbles(packed: torch.Tensor, run: int) -> torch.Tensor:
    """Return uint8 (B, 2·bytes): of every ``run`` bytes of ``packed`` (B, bytes) the low halves, then the high ones."""
    runs = packed.unflatten(1, (-1, run))
    return torch.stack((runs & 15, runs >> 4), dim=2).flatten(1)


def bit_planes(packed: torch.Tensor, run: int, bits: int) -> torch.Tensor:
    """Return uint8 (B, bytes·8/bits): of every ``run`` bytes the lowest ``bits``, then the next ones, and so on."""
    runs = packed.unflatten(1, (-1, run))
    mask = (1 << bits) - 1
    return torch.stack([(runs >> shift) & mask for shift in range(0, 8, bits)], dim=2).flatten(1)


def signed(codes: torch.Tensor, offset: int) -> torch.Tensor:
    """Return uint8 ``codes`` less ``offset``, as float32."""
    return (codes.to(torch.int8) - offset).float()


def scaled(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return ``values`` (B, cells) times ``scale`` (B, groups), which divide the cells evenly."""
    return (values.unflatten(1, (scale.shape[1], -1)) * scale.unsqueeze(2)).flatten(1)


def scaled_less(values: torch.Tensor, scale: torch.Tensor, less: torch.Tensor) -> torch.Tensor:
    """Return ``values`` (B, cells) times ``scale`` (B, groups) minus ``less`` (B, groups)."""
    return (values.unflatten(1, (scale.shape[1], -1)) * scale.unsqueeze(2) - less.unsqueeze(2)).flatten(1)
