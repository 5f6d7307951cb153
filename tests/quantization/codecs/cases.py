"""Every codec with its parameters, the error that its format has on Gaussian weights, and a bound for any cell."""

from __future__ import annotations

import dataclasses

import torch

from omniloom.quantization.codecs import Codec, get_codec


@dataclasses.dataclass(frozen=True)
class Case:
    """``error``: relative Frobenius error on N(0, 1), 256 × 2048. ``bound``: a cell's largest error / its group's amax.

    ``group``: (rows, columns) of one scale, 0 for all; a number: cells of the flattened matrix.
    """

    name: str
    parameters: tuple[tuple[str, object], ...]
    error: float
    bound: float
    group: tuple[int, int] | int

    @property
    def codec(self) -> Codec:
        return get_codec(self.name, **dict(self.parameters))

    def __str__(self) -> str:
        return "-".join([self.name, *(str(value) for _, value in self.parameters)])

    def amax(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the largest magnitude of each cell's group, in the shape of ``weight``."""
        size = weight.double().abs()
        rows, columns = weight.shape
        if isinstance(self.group, int):
            blocks = size.flatten().split(self.group)
            return torch.cat([block.amax().expand(block.shape) for block in blocks]).view(rows, columns)
        high, wide = self.group[0] or rows, self.group[1] or columns
        out = torch.empty_like(size)
        for top in range(0, rows, high):
            for left in range(0, columns, wide):
                cell = slice(top, top + high), slice(left, left + wide)
                out[cell] = size[cell].amax()
        return out


def _case(name: str, error: float, bound: float, group: tuple[int, int] | int, **parameters: object) -> Case:
    return Case(name, tuple(parameters.items()), error, bound, group)


_E4M3 = 2**-4 * 1.0001
CASES = [
    _case("fp8_tensor", 0.0264, _E4M3, (0, 0)),
    _case("fp8_channel", 0.0264, _E4M3, (1, 0)),
    _case("fp8_block", 0.0264, _E4M3, (128, 128)),
    _case("fp8_block", 0.0264, _E4M3, (1, 128), rows=1),
    _case("int8_channel", 0.0083, 0.5001 / 127, (1, 0)),
    _case("int8_rowmax", 0.0083, 0.5001 / 127, (1, 0)),
    _case("mxfp8", 0.0294, 1 / 8, (1, 32), rounding="floor"),
    _case("mxfp8", 0.0265, _E4M3, (1, 32), rounding="ceil"),
    _case("mxfp4", 0.1151, 1 / 4, (1, 32), rounding="floor"),
    _case("mxfp4", 0.1156, 1 / 4, (1, 32), rounding="ceil"),
    _case("mxfp4", 0.1117, 1 / 4, (1, 32), rounding="uos"),
    _case("mxfp4_dual", 0.1115, 0.2501, (1, 512)),
    *(
        _case("bnb4", error, bound, 64, quant_type=kind, double_quant=double)
        for kind, error, bound in (("nf4", 0.0919, 0.1520), ("fp4", 0.1220, 0.1667))
        for double in (False, True)
    ),
    *(
        _case("int4_group", error, bound, (1, size), group_size=size, symmetric=symmetric)
        for symmetric, bound, errors in (
            (True, 1 / 8 + 2**-9, (0.0859, 0.0950, 0.1034)),
            (False, 2 / 15 + 2**-9, (0.0807, 0.0911, 0.1007)),
        )
        for size, error in zip((32, 64, 128), errors, strict=True)
    ),
    _case("int4_group", 0.132, 1 / 8 + 2**-9, (1, 0), group_size=-1),
    _case("int4_group", 0.1034, 1 / 8 + 2**-7, (1, 128), scale_dtype="bfloat16"),
    _case("int4_group", 0.1007, 2 / 15 + 2**-9, (1, 128), symmetric=False, scale_dtype="float32"),
]


def gaussian(rows: int = 256, columns: int = 2048, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def round_trip(codec: Codec, weight: torch.Tensor) -> torch.Tensor:
    return codec.decode(codec.encode(weight), (weight.shape[0], weight.shape[1]))


def relative(result: torch.Tensor, weight: torch.Tensor) -> float:
    return float((result.double() - weight.double()).norm() / weight.double().norm())
