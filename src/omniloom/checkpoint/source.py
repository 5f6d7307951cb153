"""Named lazy tensors out of checkpoint files: mapped, or copied into storage of their own.

Mapped: the tensor is the file's pages, copy-on-write. Nothing is read until it is touched and there is no second
copy, but touched pages count as resident memory until the last tensor of that file is gone.
Copied: the bytes are read into the tensor's own storage, converted in bounded chunks where another dtype was asked
for. Memory rises by the final bytes and one chunk per thread, nothing stays behind when the tensor is freed.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Literal

import torch

from omniloom.checkpoint.datafile import DataFile
from omniloom.checkpoint.index import Weights
from omniloom.checkpoint.safetensors import TensorInfo
from omniloom.checkpoint.storage import empty
from omniloom.errors import CheckpointError, shorten, suggest

CHUNK_BYTES = 16 << 20
IN_FLIGHT_BYTES = 256 << 20

Prefer = Literal["map", "read"]


class TensorSource:
    """The tensors of one component. Reads may run in parallel; ``close`` waits for none and breaks none of them."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.nbytes = sum(info.nbytes for info in weights.tensors.values())
        self._files: dict[object, DataFile] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._scratch = threading.local()

    def names(self) -> list[str]:
        """All names, in the order in which their bytes lie in the files: reading in this order is sequential."""
        return list(self.weights.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.weights.tensors

    def __len__(self) -> int:
        return len(self.weights.tensors)

    def info(self, name: str) -> TensorInfo:
        """Where and what ``name`` is. Raises ``CheckpointError`` with the nearest name if there is no such tensor."""
        try:
            return self.weights.tensors[name]
        except KeyError:
            where = shorten((file.name for file in self.weights.files), 3)
            raise CheckpointError(f"no tensor {name!r} in {where}{suggest(name, self.weights.tensors)}") from None

    def read(
        self,
        name: str,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        out: torch.Tensor | None = None,
        prefer: Prefer = "map",
    ) -> torch.Tensor:
        """Return tensor ``name``, of the file's shape, on ``device`` or in ``out``.

        ``dtype`` converts floating-point tensors only, bit for bit as ``Tensor.to`` does; integer, bool, complex and
        packed tensors keep theirs. ``out`` must have the right shape and decides dtype and device. ``prefer`` chooses
        what happens where nothing is converted or moved: "map" shares the file's pages, "read" copies.
        Raises ``CheckpointError`` for a missing name or a file that ends early, ``ValueError`` for an impossible
        ``dtype`` or ``out``.
        """
        if prefer not in ("map", "read"):
            raise ValueError(f"prefer={prefer!r}: allowed are 'map' and 'read'")
        info = self.info(name)
        if out is not None:
            _check_out(info, dtype, out)
            return self._copy(info, out)
        wanted = _target_dtype(info, dtype)
        device = torch.device(device)
        if prefer == "map" and device.type == "cpu" and wanted == info.torch_dtype and _mappable(info):
            return self.map(name)
        return self._copy(info, empty(info.torch_shape, wanted, device))

    def map(self, name: str) -> torch.Tensor:
        """Return ``name`` as a CPU tensor over the file's pages (private: writing to it never reaches the file).

        The tensor keeps the mapping alive, also after ``close`` and after the file was deleted; a file that is
        *truncated in place* meanwhile kills the process (SIGBUS), as with any mapping. A tensor that is not aligned
        to its item size, or empty, is copied instead.
        """
        info = self.info(name)
        if not _mappable(info):
            return self._copy(info, empty(info.torch_shape, info.torch_dtype))
        pages = self._file(info).mapping(info.offset + info.nbytes)
        count = info.nbytes // info.itemsize
        flat = torch.frombuffer(pages, dtype=info.torch_dtype, count=count, offset=info.offset)
        return flat.view(info.torch_shape)

    def load_many(
        self,
        names: Iterable[str],
        *,
        dtype_of: Callable[[str], torch.dtype | None] | None = None,
        device: torch.device | str = "cpu",
        workers: int | None = None,
        progress: Callable[[int], None] | None = None,
        prefer: Prefer = "map",
        in_flight: int = IN_FLIGHT_BYTES,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) in the order of ``names``, read ahead by ``workers`` threads.

        At most ``in_flight`` bytes (of results; one tensor alone may be larger) are ahead of the consumer.
        ``progress`` is called on the consumer's thread with the file bytes of each tensor. Closing the iterator
        early cancels what has not begun. Use ``prefer="read"`` where the tensors are only passing through.
        """
        todo = [(name, self.info(name), dtype_of(name) if dtype_of else None) for name in names]
        for _, info, dtype in todo:
            _target_dtype(info, dtype)
        workers = workers or min(8, os.cpu_count() or 1)
        return self._pump(deque(todo), torch.device(device), workers, progress, prefer, in_flight)

    def _pump(
        self,
        todo: deque[tuple[str, TensorInfo, torch.dtype | None]],
        device: torch.device,
        workers: int,
        progress: Callable[[int], None] | None,
        prefer: Prefer,
        in_flight: int,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        ahead: deque[tuple[TensorInfo, int, Future[torch.Tensor]]] = deque()
        pool = ThreadPoolExecutor(workers, thread_name_prefix="omniloom-read")
        flying = 0
        try:
            while todo or ahead:
                while todo:
                    name, info, dtype = todo[0]
                    cost = max(info.nbytes, _result_bytes(info, dtype))
                    if ahead and flying + cost > in_flight:
                        break
                    todo.popleft()
                    flying += cost
                    future = pool.submit(self.read, name, dtype=dtype, device=device, prefer=prefer)
                    ahead.append((info, cost, future))
                info, cost, future = ahead.popleft()
                tensor = future.result()
                del future
                flying -= cost
                if progress:
                    progress(info.nbytes)
                yield info.name, tensor
                del tensor  # do not hold it while the next one is waited for
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def close(self) -> None:
        """Let go of the files. Tensors stay valid; a later read raises ``ValueError``."""
        with self._lock:
            self._closed = True
            self._files.clear()
            self._scratch = threading.local()

    def __enter__(self) -> TensorSource:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _file(self, info: TensorInfo) -> DataFile:
        with self._lock:
            if self._closed:
                raise ValueError(f"the source of {info.file} is closed")
            found = self._files.get(info.file)
            if found is None:
                found = self._files[info.file] = DataFile(info.file)
            return found

    @torch.no_grad()
    def _copy(self, info: TensorInfo, out: torch.Tensor) -> torch.Tensor:
        """Read ``info``'s bytes into ``out`` (right shape, any device), through the scratch chunk where needed."""
        if info.nbytes == 0:
            return out
        file = self._file(info)
        stored = info.torch_dtype
        if not out.is_contiguous():
            return out.copy_(self._copy(info, empty(info.torch_shape, stored)))
        flat = out.detach().view(-1)
        if out.device.type == "cpu" and out.dtype == stored:
            file.read_into(_bytes(flat), info.offset)
            return out
        chunk = self._chunk(info.nbytes, pinned=out.device.type == "cuda")
        step = chunk.numel() // info.itemsize
        for first in range(0, flat.numel(), step):
            part = flat[first : first + step]
            raw = chunk[: part.numel() * info.itemsize]
            file.read_into(_bytes(raw), info.offset + first * info.itemsize)
            part.copy_(raw.view(stored).to(out.device))  # convert where it goes: torch alone would do it on the CPU
        return out

    def _chunk(self, need: int, *, pinned: bool) -> torch.Tensor:
        """This thread's scratch bytes, at most ``CHUNK_BYTES`` of them and grown on demand."""
        key = "pinned" if pinned else "plain"
        chunk: torch.Tensor | None = getattr(self._scratch, key, None)
        size = min(CHUNK_BYTES, -(-need // 64) * 64)
        if chunk is None or chunk.numel() < size:
            chunk = torch.empty(size, dtype=torch.uint8, pin_memory=True) if pinned else empty((size,), torch.uint8)
            setattr(self._scratch, key, chunk)
        return chunk


def _mappable(info: TensorInfo) -> bool:
    return info.nbytes > 0 and info.offset % info.itemsize == 0


def _bytes(flat: torch.Tensor) -> memoryview:
    return flat.view(torch.uint8).numpy().data


def _target_dtype(info: TensorInfo, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype that ``read`` returns for ``info`` when ``dtype`` is asked for."""
    stored = info.torch_dtype
    if dtype is None or dtype == stored:
        return stored
    if not dtype.is_floating_point:
        raise ValueError(f"tensor {info.name!r} is {info.dtype}: only floating-point conversions are made, not {dtype}")
    return dtype if stored.is_floating_point and info.dtype != "F4" else stored


def _result_bytes(info: TensorInfo, dtype: torch.dtype | None) -> int:
    return info.nbytes // info.itemsize * _target_dtype(info, dtype).itemsize


def _check_out(info: TensorInfo, dtype: torch.dtype | None, out: torch.Tensor) -> None:
    wanted = _target_dtype(info, dtype or out.dtype)
    if tuple(out.shape) != info.torch_shape or out.dtype != wanted:
        raise ValueError(
            f"out= for {info.name!r} has {out.dtype} {tuple(out.shape)}, {wanted} {info.torch_shape} is needed"
        )
