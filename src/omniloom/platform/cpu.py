"""The CPU: its name, the cores this process may use, and the instructions that decide which kernels are fast."""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
from pathlib import Path

from omniloom.platform.cgroup import cpu_quota, usable_cpus
from omniloom.platform.files import ROOT, read_text, sysctl

# our name -> the kernel's name for it, where they differ
_X86 = {
    name: name
    for name in (
        "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx_vnni", "avx512_bf16",
        "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "amx_fp16",
    )
}  # fmt: skip
_ARM = {
    "neon": "asimd",
    "fp16": "asimdhp",
    "dotprod": "asimddp",
    "bf16": "bf16",
    "i8mm": "i8mm",
    "sve": "sve",
    "sve2": "sve2",
}
_MACOS_ARM = {
    "neon": "AdvSIMD",
    "fp16": "FEAT_FP16",
    "dotprod": "FEAT_DotProd",
    "bf16": "FEAT_BF16",
    "i8mm": "FEAT_I8MM",
}

NATIVE_BF16 = ("amx_bf16", "avx512_bf16", "bf16")


@dataclasses.dataclass(frozen=True)
class Cpu:
    """``threads``: logical CPUs that affinity and the control group's quota leave to this process."""

    name: str
    arch: str
    logical: int
    physical: int
    threads: int
    quota: float | None
    features: tuple[str, ...]

    @property
    def native_bf16(self) -> str | None:
        """Return the feature that multiplies bfloat16 matrices in hardware, or ``None``."""
        return next((name for name in NATIVE_BF16 if name in self.features), None)


def detect_cpu(root: Path = ROOT, system: str = sys.platform, allowed: frozenset[int] | None = None) -> Cpu:
    """Read the CPU's facts; ``allowed`` are the logical CPUs this process may run on (default: ask the system)."""
    arch = platform.machine()
    if system == "darwin":
        return _macos(arch)
    blocks = _cpuinfo(root)
    if allowed is None:
        allowed = _affinity()
    first = blocks[0] if blocks else {}
    flags = set((first.get("flags") or first.get("Features") or "").split())
    table = _X86 if "flags" in first else _ARM
    quota = cpu_quota(root)
    return Cpu(
        name=first.get("model name") or first.get("Model") or _arm_name(first) or platform.processor() or arch,
        arch=arch,
        logical=len(blocks) or os.cpu_count() or 1,
        physical=_physical(blocks) or len(blocks) or os.cpu_count() or 1,
        threads=usable_cpus(len(allowed) or 1, quota),
        quota=quota,
        features=tuple(name for name, flag in table.items() if flag in flags),
    )


def _affinity() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _cpuinfo(root: Path) -> list[dict[str, str]]:
    """Return one mapping per logical CPU."""
    text = read_text(root / "proc/cpuinfo") or ""
    blocks = []
    for part in text.split("\n\n"):
        pairs = (line.partition(":") for line in part.splitlines() if ":" in line)
        block = {key.strip(): value.strip() for key, _, value in pairs}
        if "processor" in block:
            blocks.append(block)
    return blocks


def _physical(blocks: list[dict[str, str]]) -> int:
    return len({(b["physical id"], b["core id"]) for b in blocks if "physical id" in b and "core id" in b})


def _arm_name(block: dict[str, str]) -> str | None:
    if "CPU implementer" not in block:
        return None
    return f"ARM implementer {block['CPU implementer']} part {block.get('CPU part', '?')}"


def _macos(arch: str) -> Cpu:
    logical = int(sysctl("hw.logicalcpu") or os.cpu_count() or 1)
    if arch == "arm64":
        features = tuple(n for n, flag in _MACOS_ARM.items() if sysctl(f"hw.optional.{_macos_key(flag)}") == "1")
    else:
        words = f"{sysctl('machdep.cpu.features')} {sysctl('machdep.cpu.leaf7_features')}".lower().replace(".0", "")
        features = tuple(name for name in _X86 if name in words.split() or {"avx": "avx1"}.get(name) in words.split())
    return Cpu(
        name=sysctl("machdep.cpu.brand_string") or arch,
        arch=arch,
        logical=logical,
        physical=int(sysctl("hw.physicalcpu") or logical),
        threads=logical,
        quota=None,
        features=features,
    )


def _macos_key(flag: str) -> str:
    return flag if flag == "AdvSIMD" else f"arm.{flag}"
