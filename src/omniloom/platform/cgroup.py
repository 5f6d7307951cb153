"""The limits that control groups (version 1, 2 or both) put on this process.

A limit may be set at any level, so every folder from the process's own group up to the mount point counts. In a
container the path in /proc/self/cgroup is often one of the host; /proc/self/mountinfo says which part of the
hierarchy the mount shows.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from omniloom.platform.files import ROOT, read_int, read_text

# Version 1 writes "no limit" as the largest multiple of the page size below 2**63.
_NO_LIMIT = 2**62


@dataclasses.dataclass(frozen=True)
class MemoryLimit:
    """The tightest memory limit, and how many bytes are left below the level that has the least left."""

    limit: int
    available: int


def memory_limit(root: Path = ROOT) -> MemoryLimit | None:
    """Return the memory limit of the control groups of this process, or ``None`` if there is none."""
    found = [
        *(_level(f, "memory.max", "memory.current", "inactive_file") for f in _folders(root, None)),
        *(
            _level(f, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            for f in _folders(root, "memory")
        ),
    ]
    limits = [level for level in found if level]
    if not limits:
        return None
    return MemoryLimit(min(level.limit for level in limits), min(level.available for level in limits))


def cpu_quota(root: Path = ROOT) -> float | None:
    """Return how many CPUs' worth of time the control groups allow, or ``None`` if they do not say."""
    quotas = [_quota_v2(folder) for folder in _folders(root, None)]
    quotas += [_quota_v1(folder) for folder in _folders(root, "cpu")]
    given = [quota for quota in quotas if quota]
    return min(given) if given else None


def _level(folder: Path, limit_file: str, usage_file: str, cache_key: str) -> MemoryLimit | None:
    limit = read_int(folder / limit_file)
    if limit is None or not 0 <= limit < _NO_LIMIT:
        return None
    usage = read_int(folder / usage_file) or 0
    stat = read_text(folder / "memory.stat") or ""
    match = re.search(rf"^{cache_key} (\d+)$", stat, re.MULTILINE)
    cache = min(int(match[1]), usage) if match else 0  # file pages count as usage but give way
    return MemoryLimit(limit, min(limit, max(0, limit - usage + cache)))


def _quota_v2(folder: Path) -> float | None:
    words = (read_text(folder / "cpu.max") or "").split()
    if not words or not words[0].isdecimal():
        return None
    period = int(words[1]) if len(words) > 1 and words[1].isdecimal() else 100_000
    return int(words[0]) / period if period else None


def _quota_v1(folder: Path) -> float | None:
    quota, period = read_int(folder / "cpu.cfs_quota_us"), read_int(folder / "cpu.cfs_period_us")
    return quota / period if quota and period and quota > 0 and period > 0 else None


def usable_cpus(affinity: int, quota: float | None) -> int:
    """Return how many threads are worth starting: a quota of 1.5 CPUs keeps two of them partly busy."""
    return max(1, min(affinity, math.ceil(quota))) if quota else max(1, affinity)


def _folders(root: Path, controller: str | None) -> Iterator[Path]:
    """Yield this process's folder and its parents in the hierarchy of a v1 ``controller``, or of v2 (``None``)."""
    path = _own_path(root, controller)
    mount = _mount(root, controller)
    if path is None or mount is None:
        return
    where, shown = mount
    top = root / where.lstrip("/")
    try:
        inside = PurePosixPath(path).relative_to(shown)
    except ValueError:
        inside = PurePosixPath()  # the process's group lies outside of what is mounted: only the mount itself is seen
    folder = top.joinpath(*(part for part in inside.parts if part != ".."))
    while folder != top:
        yield folder
        folder = folder.parent
    yield top


def _own_path(root: Path, controller: str | None) -> str | None:
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if (controller is None and line.startswith("0::")) or (controller and controller in names.split(",")):
            return path or "/"
    return None


def _mount(root: Path, controller: str | None) -> tuple[str, str] | None:
    """Return where the hierarchy is mounted and which of its folders is mounted there."""
    for line in (read_text(root / "proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        version1 = kind[0] == "cgroup" and controller in kind[2].split(",")
        if version1 or (controller is None and kind[0] == "cgroup2"):
            return _unescape(fields[4]), _unescape(fields[3])
    usual = "sys/fs/cgroup" if controller is None else f"sys/fs/cgroup/{controller}"
    return (f"/{usual}", "/") if (root / usual).is_dir() else None


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
