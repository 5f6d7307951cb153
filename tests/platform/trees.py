"""Fake /proc and /sys trees."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

X86 = """\
processor\t: {index}
vendor_id\t: AuthenticAMD
model name\t: AMD EPYC 7763 64-Core Processor
physical id\t: {socket}
core id\t\t: {core}
flags\t\t: fpu sse2 {flags}
"""
ARM = """\
processor\t: {index}
BogoMIPS\t: 50.00
Features\t: fp {flags}
CPU implementer\t: 0x41
CPU part\t: 0xd4f
"""


def write(root: Path, files: Mapping[str, str | int]) -> Path:
    """Write ``files`` (path below root -> content) and return ``root``."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n" if isinstance(content, int) else content)
    return root


def cpuinfo(flags: str, threads: int = 4, per_core: int = 2, template: str = X86) -> str:
    blocks = (template.format(index=i, socket=0, core=i // per_core, flags=flags) for i in range(threads))
    return "\n".join(blocks) + "\n"


def meminfo(total: int, available: int | None = None, **more: int) -> str:
    lines = {"MemTotal": total, **more} | ({} if available is None else {"MemAvailable": available})
    return "".join(f"{name}:{value // 1024:>16} kB\n" for name, value in lines.items())


def mount(where: str, kind: str, options: str = "rw", shown: str = "/") -> str:
    return f"31 23 0:26 {shown} {where} rw,nosuid shared:9 - {kind} {kind} {options}\n"


def v2(path: str, levels: Mapping[str, Mapping[str, str | int]], shown: str = "/") -> dict[str, str | int]:
    """A cgroup v2 hierarchy: ``levels`` maps a folder ("", "a", "a/b") to its files."""
    files: dict[str, str | int] = {
        "proc/self/cgroup": f"0::{path}\n",
        "proc/self/mountinfo": mount("/sys/fs/cgroup", "cgroup2", shown=shown),
    }
    for folder, content in levels.items():
        for name, value in content.items():
            files[f"sys/fs/cgroup/{folder}/{name}"] = value
    return files


def v1(path: str, levels: Mapping[str, Mapping[str, str | int]], controller: str = "memory") -> dict[str, str | int]:
    """A cgroup v1 hierarchy of one controller."""
    files: dict[str, str | int] = {
        "proc/self/cgroup": f"9:pids:/x\n4:{controller}:{path}\n1:name=systemd:/\n",
        "proc/self/mountinfo": mount(f"/sys/fs/cgroup/{controller}", "cgroup", f"rw,{controller}"),
    }
    for folder, content in levels.items():
        for name, value in content.items():
            files[f"sys/fs/cgroup/{controller}/{folder}/{name}"] = value
    return files
