"""Host memory: what there is, what this process may use, and what it uses now."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from pathlib import Path

from omniloom.platform.cgroup import memory_limit
from omniloom.platform.files import ROOT, read_text, run_tool, sysctl


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of host memory; ``None`` where the system does not say.

    total, available: of the machine. limit: of the control groups. usable: what this process can still get.
    """

    total: int | None = None
    available: int | None = None
    limit: int | None = None
    usable: int | None = None


def detect_memory(root: Path = ROOT, system: str = sys.platform) -> Memory:
    """Read the machine's memory and the limits of control groups (version 1 and 2, any level)."""
    total, available = _macos() if system == "darwin" else _linux(root)
    group = memory_limit(root)
    limit = group.limit if group and (total is None or group.limit < total) else None
    left = [n for n in (available, group.available if group else None) if n is not None]
    return Memory(total, available, limit, min(left) if left else None)


def available_bytes(root: Path = ROOT) -> int | None:
    """Return how many more bytes of host memory this process can get, or ``None`` if the system does not say."""
    return detect_memory(root).usable


def rss_bytes(root: Path = ROOT) -> int:
    """Return the resident memory of this process: one small read on Linux. macOS only knows the peak so far."""
    text = read_text(root / "proc/self/statm")
    if text:
        return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE")
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _linux(root: Path) -> tuple[int | None, int | None]:
    text = read_text(root / "proc/meminfo") or ""
    kib = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    available = kib.get("MemAvailable")
    if available is None and "MemFree" in kib:  # kernels before 3.14
        available = kib["MemFree"] + kib.get("Cached", 0) + kib.get("Buffers", 0)
    total = kib.get("MemTotal")
    return (None if total is None else total * 1024), (None if available is None else available * 1024)


def _macos() -> tuple[int | None, int | None]:
    total = sysctl("hw.memsize")
    text = run_tool(["/usr/bin/vm_stat"])
    page = re.search(r"page size of (\d+) bytes", text)
    pages = {name: int(value) for name, value in re.findall(r"^Pages ([a-z ]+):\s+(\d+)\.$", text, re.MULTILINE)}
    free = sum(pages.get(name, 0) for name in ("free", "inactive", "speculative", "purgeable"))
    return int(total) if total.isdecimal() else None, free * int(page[1]) if page and pages else None
