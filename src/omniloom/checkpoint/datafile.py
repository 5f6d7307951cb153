"""One open checkpoint file: positioned reads from any thread, and a private mapping of the whole of it."""

from __future__ import annotations

import mmap
import os
import sys
import threading
import weakref
from pathlib import Path

from omniloom.errors import CheckpointError

# A private writable mapping counts against the commit limit unless it says otherwise, and a 40 GB file would be
# refused on a 24 GB machine. Python 3.11 does not name the flag; its value is the same on Linux x86 and Arm.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
_HAS_PREADV = hasattr(os, "preadv")
_MAX_READ = 1 << 30  # a single read(2) stops at 2 GiB


class DataFile:
    """A file descriptor that lives as long as somebody holds this object.

    It is closed by the last reference and not by a call, so that a read in flight on another thread can never hit a
    descriptor number that was closed and given to another file meanwhile.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._mapping: weakref.ref[mmap.mmap] | None = None
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened: {(error.strerror or str(error)).lower()}") from error

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` (writable bytes) from ``offset``; raise ``CheckpointError`` where the file ends early."""
        done = 0
        while done < len(buffer):
            part = buffer[done : done + _MAX_READ]
            try:
                count = self._read_some(part, offset + done)
            except OSError as error:
                raise CheckpointError(f"{self.path}: reading at byte {offset + done}: {error.strerror}") from error
            if count == 0:
                raise CheckpointError(
                    f"{self.path}: ends at byte {offset + done}, {offset + len(buffer)} expected: "
                    "the file became shorter after its header was checked"
                )
            done += count

    def _read_some(self, part: memoryview, offset: int) -> int:
        if _HAS_PREADV:
            return os.preadv(self._fd, [part], offset)
        with self._lock:
            os.lseek(self._fd, offset, os.SEEK_SET)
            data = os.read(self._fd, min(len(part), 1 << 24))
        part[: len(data)] = data
        return len(data)

    def mapping(self, end: int) -> mmap.mmap:
        """Return the private (copy-on-write, writable) mapping of the file, which reaches at least to byte ``end``.

        There is one per file; it is unmapped when the last tensor over it is gone, whether or not this object lives.
        """
        with self._lock:
            found = self._mapping() if self._mapping else None
            if found is None:
                size = os.fstat(self._fd).st_size
                if size < end:
                    raise CheckpointError(
                        f"{self.path}: {end} bytes expected, {size} found: "
                        "the file became shorter after its header was checked"
                    )
                found = _map(self._fd, size, self.path)
                self._mapping = weakref.ref(found)
            return found


def _map(fd: int, size: int, path: Path) -> mmap.mmap:
    try:
        if sys.platform == "win32":
            return mmap.mmap(fd, size, access=mmap.ACCESS_COPY)
        return mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE | _NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be mapped ({size} bytes): {error.strerror}") from error
