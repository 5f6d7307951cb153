"""Which device and which compute dtype omniloom takes when the user does not say, each with its reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from omniloom.errors import ConfigError
from omniloom.platform.cpu import Cpu, detect_cpu
from omniloom.platform.devices import Device, detect_devices

_ORDER = ("cuda", "rocm", "xpu", "mps")


@dataclasses.dataclass(frozen=True)
class Choice:
    """A value and, in one line, why it was chosen."""

    value: str
    reason: str


def default_device() -> str:
    """Return the device to run on: cuda (also ROCm) before xpu before mps before cpu. Imports torch."""
    return choose_device(detect_devices()).value


def recommended_dtype(device: str) -> str:
    """Return the compute dtype for ``device`` ("cpu", "cuda:1", …). Imports torch unless it is "cpu"."""
    return choose_dtype(device).value


def choose_device(devices: Sequence[Device]) -> Choice:
    """Choose among ``devices``; of several of one kind, the first."""
    for backend in _ORDER:
        for device in devices:
            if device.backend == backend:
                return Choice(device.id.partition(":")[0], f"{device.name} is there")
    return Choice("cpu", "torch finds no CUDA, ROCm, XPU or MPS device")


def choose_dtype(device: str, *, cpu: Cpu | None = None, devices: Sequence[Device] | None = None) -> Choice:
    """Choose the compute dtype for ``device``; ``cpu`` and ``devices`` are detected if not given.

    Raises ``ConfigError`` for a device that is not there.
    """
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return _for_cpu(cpu or detect_cpu())
    devices = detect_devices() if devices is None else devices
    wanted = device if index or kind == "mps" else f"{device}:0"
    found = next((d for d in devices if d.id == wanted), None)
    if found is None:
        there = ", ".join(["cpu", *(d.id for d in devices)])
        raise ConfigError(f"device {device!r} is not there (torch finds: {there})")
    return _for_accelerator(found)


def _for_cpu(cpu: Cpu) -> Choice:
    feature = cpu.native_bf16
    if feature:
        return Choice("bfloat16", f"the CPU multiplies bfloat16 in hardware ({feature})")
    # Measured on AVX2 without native bf16: a bf16 linear runs at 7 GFLOP/s per core, an fp32 one at 60.
    return Choice("float32", "the CPU only emulates bfloat16, several times slower than float32")


def _for_accelerator(device: Device) -> Choice:
    if device.backend == "mps":
        return Choice("float32", "exact on every Apple GPU; float16 halves the memory but some models overflow in it")
    if device.bf16:
        return Choice("bfloat16", f"{device.name} multiplies bfloat16 in hardware")
    return Choice("float16", f"{device.name} ({device.capability}) has no bfloat16 units")
