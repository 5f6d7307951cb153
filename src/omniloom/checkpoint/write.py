"""Writing a model's tensors as sharded safetensors, one tensor at a time and in any order.

Names, dtypes and shapes are known before the first value is: so the headers are written at once and every tensor goes
straight to its place. Memory is bounded by the largest tensor.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import torch

from omniloom.checkpoint.safetensors import DTYPES
from omniloom.errors import CheckpointError, EngineError, shorten

MAX_SHARD_BYTES = 5 * 10**9
_CODES = {getattr(torch, name): code for code, (_, name) in DTYPES.items() if name and hasattr(torch, name)}

TensorSpecs = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


class ShardWriter:
    """Writes ``<base>.safetensors``, or shards with their index, into a folder that exists.

    ``specs``: name -> (dtype, shape) of everything that will be written. ``close`` (or leaving the ``with`` block
    without an exception) checks that everything came and writes the index. Raises ``EngineError`` where the system
    refuses.
    """

    def __init__(self, folder: Path, base: str, specs: TensorSpecs, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        self._missing = set(specs)
        self._specs = dict(specs)
        self._place: dict[str, tuple[int, int]] = {}  # name -> (file descriptor, offset)
        self._files: list[int] = []
        self._index: dict[str, str] = {}
        shards = _split(specs, max_shard_bytes)
        try:
            for number, names in enumerate(shards, 1):
                single = len(shards) == 1
                file = f"{base}.safetensors" if single else f"{base}-{number:05d}-of-{len(shards):05d}.safetensors"
                self._begin(folder / file, names)
                self._index |= dict.fromkeys(names, file)
        except OSError as error:
            self.abort()
            raise EngineError(f"cannot write into {folder}: {error.strerror or error}") from error
        self._index_path = folder / f"{base}.safetensors.index.json" if len(shards) > 1 else None

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor. Raises ``ValueError`` if it is not the one that was announced, or comes twice."""
        dtype, shape = self._specs[name]
        if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{name!r}: {tensor.dtype} {tuple(tensor.shape)} is not the announced {dtype} {shape}")
        if name not in self._missing:
            raise ValueError(f"{name!r} is written twice")
        if tensor.numel():
            raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
            descriptor, offset = self._place[name]
            try:
                while raw:
                    count = os.pwrite(descriptor, raw[: 1 << 30], offset)
                    raw, offset = raw[count:], offset + count
            except OSError as error:
                raise EngineError(f"cannot write {self._index[name]}: {error.strerror or error}") from error
        self._missing.discard(name)

    def close(self) -> None:
        """Finish the files. Raises ``CheckpointError`` for tensors that never came."""
        if self._missing:
            self.abort()
            raise CheckpointError(f"tensors that were announced and not written: {shorten(sorted(self._missing))}")
        try:
            for descriptor in self._files:
                os.fsync(descriptor)
            if self._index_path is not None:
                total = sum(_nbytes(*spec) for spec in self._specs.values())
                index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(self._index.items()))}
                self._index_path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise EngineError(f"cannot write {self._index_path}: {error.strerror or error}") from error
        finally:
            self.abort()

    def abort(self) -> None:
        """Close the files as they are."""
        while self._files:
            os.close(self._files.pop())

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close() if kind is None else self.abort()

    def _begin(self, path: Path, names: list[str]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        ends = {}
        position = 0
        for name in names:
            dtype, shape = self._specs[name]
            end = position + _nbytes(dtype, shape)
            header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [position, end]}
            ends[name], position = position, end
        raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
        raw += b" " * (-(8 + len(raw)) % 64)  # the data begins at a multiple of 64
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._files.append(descriptor)
        start = 8 + len(raw)
        os.pwrite(descriptor, len(raw).to_bytes(8, "little") + raw, 0)
        os.ftruncate(descriptor, start + position)
        self._place |= {name: (descriptor, start + offset) for name, offset in ends.items()}


def _nbytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * dtype.itemsize


def _split(specs: TensorSpecs, limit: int) -> list[list[str]]:
    """Return the names by shard, in their order; within a shard the widest elements first, so that all are aligned."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, spec in specs.items():
        size = _nbytes(*spec)
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return [sorted(names, key=lambda name: -specs[name][0].itemsize) for names in shards]
