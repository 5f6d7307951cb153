from __future__ import annotations

from pathlib import Path

import pytest

from omniloom.platform import memory
from omniloom.platform.memory import available_bytes, detect_memory, rss_bytes
from tests.platform import trees

GIB = 2**30


def test_machine_without_limits(tmp_path: Path) -> None:
    trees.write(tmp_path, {"proc/meminfo": trees.meminfo(16 * GIB, 10 * GIB)})
    assert detect_memory(tmp_path, "linux") == memory.Memory(16 * GIB, 10 * GIB, None, 10 * GIB)


def test_usable_is_the_smaller_of_machine_and_group(tmp_path: Path) -> None:
    files = trees.v2("/a", {"a": {"memory.max": 4 * GIB, "memory.current": 3 * GIB}})
    trees.write(tmp_path, {**files, "proc/meminfo": trees.meminfo(16 * GIB, 10 * GIB)})
    assert detect_memory(tmp_path, "linux") == memory.Memory(16 * GIB, 10 * GIB, 4 * GIB, GIB)
    assert available_bytes(tmp_path) == GIB
    trees.write(tmp_path, {"proc/meminfo": trees.meminfo(16 * GIB, GIB // 2)})
    assert available_bytes(tmp_path) == GIB // 2


def test_limit_above_the_machine_is_none(tmp_path: Path) -> None:
    files = trees.v2("/a", {"a": {"memory.max": 64 * GIB, "memory.current": 0}})
    trees.write(tmp_path, {**files, "proc/meminfo": trees.meminfo(16 * GIB, 10 * GIB)})
    assert detect_memory(tmp_path, "linux").limit is None
    assert available_bytes(tmp_path) == 10 * GIB


def test_kernel_without_memavailable(tmp_path: Path) -> None:
    text = trees.meminfo(8 * GIB, None, MemFree=GIB, Cached=2 * GIB, Buffers=GIB)
    assert available_bytes(trees.write(tmp_path, {"proc/meminfo": text})) == 4 * GIB


def test_nothing_known(tmp_path: Path) -> None:
    assert detect_memory(tmp_path, "linux") == memory.Memory()


def test_this_process() -> None:
    before = rss_bytes()
    assert 2**20 < before < 2**40
    ballast = bytearray(b"x") * (64 * 2**20)
    assert rss_bytes() - before > 48 * 2**20
    del ballast


def test_rss_from_statm(tmp_path: Path) -> None:
    import os

    trees.write(tmp_path, {"proc/self/statm": "1000 250 30 1 0 99 0\n"})
    assert rss_bytes(tmp_path) == 250 * os.sysconf("SC_PAGE_SIZE")


def test_rss_without_proc_is_the_peak(tmp_path: Path) -> None:
    assert rss_bytes(tmp_path) >= rss_bytes() // 2


def test_macos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vm_stat = (
        "Mach Virtual Memory Statistics: (page size of 16384 bytes)\n"
        "Pages free:                               10000.\n"
        "Pages active:                            300000.\n"
        "Pages inactive:                           20000.\n"
        "Pages speculative:                         1000.\n"
        "Pages purgeable:                            500.\n"
    )
    monkeypatch.setattr(memory, "sysctl", {"hw.memsize": str(16 * GIB)}.get)
    monkeypatch.setattr(memory, "run_tool", lambda command: vm_stat)
    assert detect_memory(tmp_path, "darwin") == memory.Memory(16 * GIB, 31500 * 16384, None, 31500 * 16384)
