"""The tensors of a GGUF file, as bytes of blocks or decoded."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path

import torch

from omniloom.checkpoint.gguf import GgufHeader, GgufTensor, read_gguf
from omniloom.checkpoint.index import Weights
from omniloom.checkpoint.source import Prefer, TensorSource
from omniloom.checkpoint.storage import empty
from omniloom.errors import CheckpointError

_CELLS = 1 << 20  # decoded at a time: 4 MiB of float32


class GgufSource(TensorSource):
    """A ``TensorSource`` over one file. Plain numbers (F32, F16, BF16, integers) are ordinary tensors.

    A quantized tensor is read as its bytes, uint8 with the last dimension in bytes, until ``expand`` names it: from
    then on ``read`` and ``load_many`` decode it. ``info`` always has the logical shape.
    Raises ``CheckpointError`` as ``read_gguf`` does.
    """

    def __init__(self, file: str | Path | GgufHeader) -> None:
        self.header = file if isinstance(file, GgufHeader) else read_gguf(Path(file).expanduser())
        self._tensors = dict(self.header.tensors)
        super().__init__(Weights([self.header.path], dict(self.header.tensors), {}))

    def info(self, name: str) -> GgufTensor:
        """Where and what ``name`` is. Raises ``CheckpointError`` with the nearest name if there is no such tensor."""
        super().info(name)
        return self._tensors[name]

    def expand(self, names: Iterable[str]) -> None:
        """Decode these tensors from now on, wherever they are read; plain ones stay as they are.

        Raises ``CheckpointError`` for a missing name.
        """
        for name in names:
            info = self.info(name)
            self._tensors[name] = dataclasses.replace(info, dense=info.quantized)

    def fit(self, name: str, shape: tuple[int, ...]) -> None:
        """Give ``name`` the logical shape that the model has, where ``GgufTensor.fitted`` allows it.

        Raises ``CheckpointError`` with both shapes where it does not.
        """
        self._tensors[name] = self.info(name).fitted(tuple(shape))

    def read(
        self,
        name: str,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        out: torch.Tensor | None = None,
        prefer: Prefer = "map",
    ) -> torch.Tensor:
        """As ``TensorSource.read``; ``dense`` for what ``expand`` named."""
        if self.info(name).dense:
            return self.dense(name, dtype=dtype, device=device, out=out)
        return super().read(name, dtype=dtype, device=device, out=out, prefer=prefer)

    def map(self, name: str) -> torch.Tensor:
        """As ``TensorSource.map``. What ``expand`` named is decoded, into memory of its own."""
        return self.dense(name) if self.info(name).dense else super().map(name)

    def dense(
        self,
        name: str,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return ``name`` in numbers, of its logical shape, on ``device`` or in ``out``; float32 by default.

        Blocks are decoded in float32 in bounded chunks and rounded once. Raises ``CheckpointError`` for a missing name
        or a file that ends early, ``ValueError`` for an impossible ``dtype`` or ``out``.
        """
        info = self.info(name)
        if not info.quantized:
            return super().read(name, dtype=dtype, device=device, out=out, prefer="read")
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"tensor {name!r} is {info.dtype}: it is decoded to floating point, not to {dtype}")
        if out is None:
            out = empty(info.shape, dtype or torch.float32, torch.device(device))
        elif tuple(out.shape) != info.shape or dtype not in (None, out.dtype) or not out.dtype.is_floating_point:
            wanted = dtype or "floating point"
            raise ValueError(f"out= for {name!r} has {out.dtype} {tuple(out.shape)}, {wanted} {info.shape} is needed")
        return self._decode(info, out)

    @torch.no_grad()
    def _decode(self, info: GgufTensor, out: torch.Tensor) -> torch.Tensor:
        from omniloom.quantization.codecs.gguf import gguf_codec
        from omniloom.quantization.kernels.decoders import decode_into

        if info.nbytes == 0:
            return out
        if not out.is_contiguous():
            return out.copy_(self._decode(info, empty(info.shape, out.dtype, out.device)))
        codec, kind, file = gguf_codec(info.dtype), info.kind, self._file(info)
        blocks = math.prod(info.shape) // kind.block
        step = max(1, min(blocks, _CELLS // kind.block))
        flat = out.detach().view(blocks, kind.block)
        chunk = torch.empty(step * kind.size, dtype=torch.uint8)
        for first in range(0, blocks, step):
            part = flat[first : first + step]
            count = part.shape[0]
            raw = chunk[: count * kind.size]
            file.read_into(raw.numpy().data, info.offset + first * kind.size)
            fields = {"packed": raw.view(count, kind.size).to(out.device)}
            if out.device.type == "cpu":
                decode_into(codec, fields, (count, kind.block), part)
            else:
                part.copy_(codec.decode(fields, (count, kind.block), out.dtype))
        return out


def open_gguf(path: str | Path) -> GgufSource:
    """Open a ``.gguf`` file. Raises ``CheckpointError`` if it is missing, damaged, foreign or holds no tensor."""
    source = GgufSource(path)
    if not len(source):
        raise CheckpointError(f"{path}: it holds no tensor, only metadata: a vocabulary file? choose the model file")
    return source
