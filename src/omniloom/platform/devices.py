"""Accelerators that the installed torch can use, and what their generation is capable of."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Device:
    """One accelerator. ``id`` is torch's name for it, ``backend`` is "cuda", "rocm", "xpu" or "mps".

    capability: "sm_90", "gfx942" or ``None``. bf16, fp8: whether matrix products in it run in hardware.
    """

    id: str
    backend: str
    name: str
    capability: str | None
    total_bytes: int | None
    free_bytes: int | None
    bf16: bool
    fp8: bool


def detect_devices() -> tuple[Device, ...]:
    """List the accelerators, best kind first. Imports torch."""
    import torch

    return (*_cuda(torch), *_xpu(torch), *_mps(torch))


def cuda_precision(major: int, minor: int) -> tuple[bool, bool]:
    """Return whether a CUDA compute capability has (bf16, fp8) matrix products: Ampere 8.0, Ada 8.9."""
    return (major, minor) >= (8, 0), (major, minor) >= (8, 9)


def rocm_precision(arch: str) -> tuple[bool, bool]:
    """Return whether an AMD architecture ("gfx942:sramecc+") has (bf16, fp8) matrix products."""
    name = arch.partition(":")[0]
    bf16 = name.startswith(("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12"))
    return bf16, name.startswith(("gfx94", "gfx95", "gfx12"))


def _cuda(torch: Any) -> list[Device]:
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        if torch.version.hip:
            arch = getattr(facts, "gcnArchName", "")
            backend, capability, precision = "rocm", arch.partition(":")[0] or None, rocm_precision(arch)
        else:
            backend, capability = "cuda", f"sm_{facts.major}{facts.minor}"
            precision = cuda_precision(facts.major, facts.minor)
        free = _free(lambda i=index: torch.cuda.mem_get_info(i)[0])
        found.append(Device(f"cuda:{index}", backend, facts.name, capability, facts.total_memory, free, *precision))
    return found


def _xpu(torch: Any) -> list[Device]:
    if not hasattr(torch, "xpu") or not torch.xpu.is_available():
        return []
    found = []
    for index in range(torch.xpu.device_count()):
        facts = torch.xpu.get_device_properties(index)
        free = _free(lambda i=index: torch.xpu.mem_get_info(i)[0])
        found.append(Device(f"xpu:{index}", "xpu", facts.name, None, facts.total_memory, free, True, False))
    return found


def _mps(torch: Any) -> list[Device]:
    if not torch.backends.mps.is_available():
        return []
    total = _free(torch.mps.recommended_max_memory)
    used = _free(torch.mps.driver_allocated_memory)
    free = None if total is None or used is None else max(0, total - used)
    return [Device("mps", "mps", "Apple GPU", None, total, free, False, False)]


def _free(ask: Any) -> int | None:
    """Ask a driver for a number of bytes; some refuse (another process holds the device, an old driver)."""
    try:
        return int(ask())
    except (RuntimeError, AttributeError):
        return None
