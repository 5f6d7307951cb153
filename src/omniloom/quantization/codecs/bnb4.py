"""bitsandbytes' 4-bit formats: blocks of the flattened matrix, a table of 16 values, scales that may be 8-bit too.

NF4 and double quantization: QLoRA (arXiv 2305.14314). The 8-bit table: dynamic tree quantization (arXiv 1511.04561).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from omniloom.errors import ConfigError, suggest
from omniloom.quantization.codecs.base import Codec, Fields, FieldSpec, Shape, register_codec
from omniloom.quantization.codecs.chunks import decode_rows, encode_rows
from omniloom.quantization.codecs.nibbles import constant, lookup_pairs, pair_table
from omniloom.quantization.codecs.scales import FLOAT32, groups_of, split_groups

# fmt: off
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)
# fmt: on
_FP4 = tuple(twelfths / 12 for twelfths in (0, 0.0625, 8, 12, 4, 6, 2, 3))
FP4 = _FP4 + tuple(0.0 - value for value in _FP4)  # by bit pattern, so not sorted; code 8 is +0 as well
CODE_MAPS = {"nf4": NF4, "fp4": FP4}
_ORDERS = {name: tuple(sorted(range(16), key=values.__getitem__)) for name, values in CODE_MAPS.items()}
NESTED_BLOCK = 256
_LEAST = 1e-38  # bitsandbytes' guard of a block's divisor


def _midpoints(ordered: Sequence[float]) -> tuple[float, ...]:
    values = torch.tensor(ordered)
    return tuple(((values[:-1] + values[1:]) / 2).tolist())


def _dynamic_map() -> tuple[float, ...]:
    """Return the 256 sorted float32 values of the signed dynamic 8-bit type.

    Decade d = 0 … 6 spans 0.1 to 1 times 10^(d-6). It is cut into 2^d equal parts, whose centres are values, with both
    signs. 0 and 1 complete the table, so the most negative value is only -0.993.
    """
    values = [torch.tensor([0.0, 1.0])]
    for decade in range(7):
        edges = torch.linspace(0.1, 1.0, 2**decade + 1)
        centres = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)
        values += [centres, -centres]
    return tuple(torch.cat(values).sort().values.tolist())


DYNAMIC_MAP = _dynamic_map()
_BOUNDS = {name: _midpoints([CODE_MAPS[name][code] for code in order]) for name, order in _ORDERS.items()}
_DYNAMIC_BOUNDS = _midpoints(DYNAMIC_MAP)


@register_codec("bnb4")
@dataclasses.dataclass(frozen=True)
class Bnb4(Codec):
    """``quant_type`` "nf4" or "fp4", ``block_size`` cells per scale, ``double_quant``: the scales are stored in 8 bits.

    Fields, with n = N·K, B = ceil(n / block_size): ``packed`` U8 (ceil(n/2), 1), even cells in the **high** nibble;
    then ``absmax`` F32 (B,), or ``absmax_codes`` U8 (B,), ``nested_absmax`` F32 (ceil(B/256),), ``nested_offset`` F32
    () and ``nested_map`` F32 (256,); then ``code_map`` F32 (16,). Both maps are stored, and decoding uses the stored
    ones, as files may carry others. ``weight = code_map[code] · absmax``;
    ``absmax = nested_map[absmax_codes] · nested_absmax + nested_offset``.

    Codes, scales and decoded values are those of bitsandbytes 0.50 on a CPU, bit for bit.
    """

    quant_type: str = "nf4"
    block_size: int = 64
    double_quant: bool = True

    name = "bnb4"
    bits = 4.0

    def __post_init__(self) -> None:
        if self.quant_type not in CODE_MAPS:
            hint = suggest(self.quant_type, CODE_MAPS)
            raise ConfigError(f"bnb4: unknown quant_type {self.quant_type!r}{hint} ({', '.join(CODE_MAPS)})")
        if self.block_size not in [2**power for power in range(5, 13)]:
            raise ConfigError(f"bnb4: block_size {self.block_size}; it must be a power of two from 32 to 4096")

    def specs(self, shape: Shape) -> dict[str, FieldSpec]:
        cells = shape[0] * shape[1]
        blocks = groups_of(cells, self.block_size)
        packed = {"packed": FieldSpec((groups_of(cells, 2), 1), torch.uint8)}
        code_map = {"code_map": FieldSpec((16,), torch.float32)}
        if not self.double_quant:
            return {**packed, "absmax": FieldSpec((blocks,), torch.float32), **code_map}
        return {
            **packed,
            "absmax_codes": FieldSpec((blocks,), torch.uint8),
            "nested_absmax": FieldSpec((groups_of(blocks, NESTED_BLOCK),), torch.float32),
            "nested_offset": FieldSpec((), torch.float32),
            "nested_map": FieldSpec((len(DYNAMIC_MAP),), torch.float32),
            **code_map,
        }

    def encode(self, weight: torch.Tensor) -> Fields:
        flat = weight.detach().reshape(-1)
        full = flat.shape[0] // self.block_size * self.block_size
        packed, absmax = encode_rows(flat[:full].unflatten(0, (-1, self.block_size)), self._encode_blocks)
        packed = packed.flatten()
        if full < flat.shape[0]:
            tail = flat[full:].float()
            last = tail.abs().amax().clamp(min=_LEAST)
            packed = torch.cat((packed, self._pack(tail / last)))  # full blocks are multiplied: so bitsandbytes does
            absmax = torch.cat((absmax, last.unsqueeze(0)))
        scales = _nest(absmax) if self.double_quant else {"absmax": absmax}
        return {"packed": packed.unsqueeze(1), **scales, "code_map": constant(CODE_MAPS[self.quant_type], weight)}

    def _encode_blocks(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = blocks.float()
        absmax = blocks.abs().amax(dim=1)
        scaled = blocks * (1.0 / absmax.clamp(min=_LEAST)).unsqueeze(1)
        return self._pack(scaled).unflatten(0, (-1, self.block_size // 2)), absmax

    def _pack(self, scaled: torch.Tensor) -> torch.Tensor:
        scaled = scaled.flatten()
        if scaled.shape[0] % 2:
            scaled = torch.nn.functional.pad(scaled, (0, 1))
        ranks = torch.zeros(scaled.shape, dtype=torch.uint8, device=scaled.device)
        for bound in _BOUNDS[self.quant_type]:  # encodes twice as fast as with torch.bucketize on a CPU, and equal
            ranks += scaled > bound
        packed = (ranks[::2] << 4) | ranks[1::2]
        order = _ORDERS[self.quant_type]
        if order == tuple(range(16)):
            return packed
        by_byte = [order[byte >> 4] << 4 | order[byte & 15] for byte in range(256)]
        return torch.tensor(by_byte, dtype=torch.uint8, device=scaled.device).index_select(0, packed.to(torch.int32))

    def decode(self, fields: Fields, shape: Shape, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        cells = shape[0] * shape[1]
        absmax = self.block_scales(fields).unsqueeze(1)
        packed = fields["packed"].flatten()
        missing = absmax.shape[0] * self.block_size // 2 - packed.shape[0]
        if missing:
            packed = torch.nn.functional.pad(packed, (0, missing))
        blocks = packed.unflatten(0, (-1, self.block_size // 2))
        table = pair_table(fields["code_map"].float(), high_first=True)
        out = decode_rows(
            (absmax.shape[0], self.block_size),
            dtype,
            packed.device,
            lambda rows: lookup_pairs(blocks[rows], table) * absmax[rows],
        )
        return out.flatten()[:cells].unflatten(0, tuple(shape))

    def reference_decode(self, fields: Fields, shape: Shape) -> torch.Tensor:
        """Return what ``decode`` returns in float32, written as the format is defined."""
        packed, cells = fields["packed"].flatten(), shape[0] * shape[1]
        codes = torch.stack((packed >> 4, packed & 15), dim=1).flatten()[:cells]
        absmax = self.block_scales(fields).repeat_interleave(self.block_size)[:cells]
        return (fields["code_map"].float()[codes.long()] * absmax).unflatten(0, tuple(shape))

    def block_scales(self, fields: Fields) -> torch.Tensor:
        """Return the float32 scale of every block, (B,)."""
        if "absmax" in fields:
            return fields["absmax"].float()
        codes = fields["absmax_codes"]
        scale = fields["nested_absmax"].float().repeat_interleave(NESTED_BLOCK)[: codes.shape[0]]
        absmax = fields["nested_map"].float().index_select(0, codes.to(torch.int32)) * scale + fields["nested_offset"]
        return absmax.clamp(-FLOAT32.max, FLOAT32.max)


def _nest(absmax: torch.Tensor) -> Fields:
    """Return the fields of scales ``absmax`` (B,) F32 in 8 bits: what is left of them without their mean."""
    blocks = absmax.shape[0]
    mean = absmax.mean()
    mean = torch.where(mean.isfinite(), mean, (absmax / blocks).sum())  # their sum may overflow
    groups = split_groups((absmax - mean).unsqueeze(0), NESTED_BLOCK)[0]
    largest = groups.abs().amax(dim=1)
    scaled = (groups * (1.0 / largest).unsqueeze(1)).clamp(-1.0, 1.0)
    # bitsandbytes on a CPU looks codes up on a grid of 65536 points; the exact midpoints differ in one scale of 1000.
    on_grid = torch.floor((scaled + 1.0) * 0.5 * 65535 + 0.5) * (2 / 65535) - 1.0
    codes = torch.bucketize(on_grid, constant(_DYNAMIC_BOUNDS, absmax), out_int32=True)
    codes = torch.where(largest.unsqueeze(1) > 0, codes, 0)
    return {
        "absmax_codes": codes.flatten()[:blocks].to(torch.uint8),
        "nested_absmax": largest,
        "nested_offset": mean,
        "nested_map": constant(DYNAMIC_MAP, absmax),
    }
