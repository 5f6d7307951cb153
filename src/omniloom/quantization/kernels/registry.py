"""Which kernel a layer runs with on a device: the first that fits, or the fastest of those if asked to measure."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Literal

import torch

from omniloom.errors import ConfigError, suggest
from omniloom.quantization.codecs.base import Shape
from omniloom.quantization.kernels.base import DeviceFacts, Kernel, Operand
from omniloom.quantization.kernels.cpu_int8 import IntMatmulKernel, PackedInt8Kernel
from omniloom.quantization.kernels.cuda import CudaFp8Kernel, CudaInt8Kernel
from omniloom.quantization.kernels.reference import ReferenceKernel, TiledKernel
from omniloom.quantization.scheme import WEIGHT_ONLY, Activation, LayerScheme

Choice = Literal["capability", "measure"]

REFERENCE = ReferenceKernel()
# In the order of preference. A kernel of another kind of device says so itself.
_KERNELS: list[Kernel] = [
    IntMatmulKernel(),
    PackedInt8Kernel(),
    CudaFp8Kernel(),
    CudaInt8Kernel(),
    TiledKernel(),
    REFERENCE,
]
_lock = threading.Lock()
_fastest: dict[tuple[object, ...], Kernel] = {}


def register_kernel(kernel: Kernel) -> None:
    """Add a kernel ahead of the others. Raises ``ValueError`` if its name is taken."""
    if any(other.name == kernel.name for other in _KERNELS):
        raise ValueError(f"kernel {kernel.name!r} is registered already")
    _KERNELS.insert(0, kernel)


def kernels() -> tuple[Kernel, ...]:
    """Return every kernel in the order of preference."""
    return tuple(_KERNELS)


def get_kernel(name: str) -> Kernel:
    """Return a kernel by name. Raises ``ConfigError`` for an unknown one."""
    known = {kernel.name: kernel for kernel in _KERNELS}
    if name not in known:
        raise ConfigError(f"unknown kernel {name!r}{suggest(name, known)} (known: {', '.join(known)})")
    return known[name]


def effective(scheme: LayerScheme, activation: Activation, facts: DeviceFacts, shape: Shape) -> LayerScheme:
    """Return the scheme with the activation that really runs: none where it is ``native_only`` and not native here."""
    scheme = dataclasses.replace(scheme, activation=activation, fallback=None, fallback_steps=frozenset())
    if activation.codec is None or not activation.native_only:
        return scheme
    if any(kernel.native and kernel.supports(scheme, facts, shape) is None for kernel in _KERNELS):
        return scheme
    return dataclasses.replace(scheme, activation=WEIGHT_ONLY)


def fitting(scheme: LayerScheme, facts: DeviceFacts, shape: Shape, streamed: bool = False) -> list[Kernel]:
    """Return the kernels for an effective scheme; ``streamed``: without those whose operand cannot change its tier."""
    return [
        kernel
        for kernel in _KERNELS
        if not (streamed and kernel.needs_preparation) and kernel.supports(scheme, facts, shape) is None
    ]


def choose_kernel(
    scheme: LayerScheme, activation: Activation, facts: DeviceFacts, shape: Shape, *, streamed: bool = False
) -> tuple[Kernel, Activation]:
    """Return the preferred kernel and the activation that it is to run with.

    Raises ``ConfigError`` if the codec cannot hold a matrix of this shape.
    """
    real = effective(scheme, activation, facts, shape)
    found = fitting(real, facts, shape, streamed)
    if not found:
        raise ConfigError(f"{scheme.codec.name} cannot hold a {shape} matrix: {scheme.codec.problem(shape)}")
    return found[0], real.activation


def measure_kernel(
    candidates: Iterable[tuple[Kernel, Operand]], activation: Activation, rows: int, facts: DeviceFacts
) -> Kernel:
    """Return the fastest of the kernels on ``rows`` random tokens, measured once per process and combination."""
    listed = list(candidates)
    first = listed[0][1]
    names = tuple(kernel.name for kernel, _ in listed)
    key = (first.scheme.codec, activation, facts, first.shape, rows, names, torch.get_num_threads())
    with _lock:
        if key not in _fastest:
            device = next(iter(first.fields.values())).device
            x = torch.randn(rows, first.shape[1], device=device)
            times = [(_time(kernel, operand, x, activation), index) for index, (kernel, operand) in enumerate(listed)]
            _fastest[key] = listed[min(times)[1]][0]
        return _fastest[key]


def _time(kernel: Kernel, layer: Operand, x: torch.Tensor, activation: Activation) -> float:
    best = float("inf")
    for turn in range(4):
        begin = time.perf_counter()
        kernel(x, layer, activation)
        if x.device.type == "cuda":
            torch.cuda.synchronize(x.device)
        if turn:
            best = min(best, time.perf_counter() - begin)
    return best


@dataclasses.dataclass(frozen=True)
class KernelRow:
    """``status``: "native"; "emulated" (floating point with the format's rounding); "weight-only"; "unsupported"."""

    scheme: str
    device: str
    status: Literal["native", "emulated", "weight-only", "unsupported"]
    kernel: str | None
    reason: str


def kernel_matrix(
    facts: DeviceFacts | Iterable[DeviceFacts], schemes: Mapping[str, LayerScheme], shape: Shape = (3072, 3072)
) -> list[KernelRow]:
    """Say for every device and named scheme what a layer of this shape would run with, and why."""
    rows = []
    for device in [facts] if isinstance(facts, DeviceFacts) else facts:
        for name, scheme in schemes.items():
            rows.append(_row(name, scheme, device, shape))
    return rows


def _row(name: str, scheme: LayerScheme, facts: DeviceFacts, shape: Shape) -> KernelRow:
    real = effective(scheme, scheme.activation, facts, shape)
    found = fitting(real, facts, shape)
    if not found:
        return KernelRow(name, str(facts), "unsupported", None, scheme.codec.problem(shape) or "no kernel")
    kernel = found[0]
    if kernel.native:
        narrowed = kernel.note and facts.kind == "cpu" and not facts.native_int8
        return KernelRow(name, str(facts), "native", kernel.name, kernel.note if narrowed else "")
    if scheme.activation.codec is None:
        return KernelRow(name, str(facts), "weight-only", kernel.name, "decodes weights; activations stay")
    missing = _missing(scheme, facts, shape)
    if real.activation.codec is None:
        return KernelRow(name, str(facts), "weight-only", kernel.name, f"activations stay as they are: {missing}")
    return KernelRow(name, str(facts), "emulated", kernel.name, f"rounded exactly, multiplied in float32: {missing}")


def _missing(scheme: LayerScheme, facts: DeviceFacts, shape: Shape) -> str:
    """Why no native kernel runs the scheme: what one for its formats says, if there is one for this kind of device."""
    codec = scheme.activation.codec
    text = f"no native product of {scheme.codec.name} x {codec.name if codec else 'float'}"
    for kernel in _KERNELS:
        if kernel.native and kernel.kind == facts.kind and kernel.formats(scheme) is None:
            return f"{text} ({kernel.supports(scheme, facts, shape)})"
    return text
