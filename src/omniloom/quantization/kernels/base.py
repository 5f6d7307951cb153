"""What a kernel is, and the facts about a device that decide which kernels it can run."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from omniloom.platform.cpu import NATIVE_BF16, detect_cpu
from omniloom.quantization.codecs.base import Fields, Shape
from omniloom.quantization.scheme import Activation, LayerScheme


@dataclasses.dataclass(frozen=True)
class DeviceFacts:
    """``kind``: "cpu", "cuda", "rocm", or torch's name of another device type. ``capability``: CUDA's (major, minor).

    ``features``: instructions of a CPU, named as ``platform.cpu`` names them.
    """

    kind: str
    capability: tuple[int, int] | None = None
    features: frozenset[str] = frozenset()

    @property
    def native_bf16(self) -> bool:
        """Whether bfloat16 products run in hardware (on a CPU without it they are 7-8 times slower than float32)."""
        if self.kind == "cpu":
            return any(name in self.features for name in NATIVE_BF16)
        return self.kind != "cuda" or self.capability is None or self.capability >= (8, 0)

    @property
    def native_int8(self) -> bool:
        """Whether a CPU multiplies bytes without the 16-bit accumulation that saturates."""
        return not self.features.isdisjoint(("avx512_vnni", "amx_int8"))

    def __str__(self) -> str:
        if self.capability is not None:
            return f"{self.kind} sm_{self.capability[0]}{self.capability[1]}"
        return self.kind


@functools.lru_cache(maxsize=1)
def cpu_facts() -> DeviceFacts:
    """Return the facts of this machine's CPU."""
    return DeviceFacts("cpu", None, frozenset(detect_cpu().features))


@functools.lru_cache(maxsize=64)
def device_facts(device: torch.device) -> DeviceFacts:
    """Return the facts of a device of this machine."""
    if device.type == "cpu":
        return cpu_facts()
    if device.type == "cuda":
        if torch.version.hip:
            return DeviceFacts("rocm")
        return DeviceFacts("cuda", torch.cuda.get_device_capability(device))
    return DeviceFacts(device.type)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What a kernel made of a layer's fields. ``replaces``: fields that it holds, so that the layer drops its own.

    ``nbytes``: of the operand. ``streamable``: whether it may be moved from tier to tier (a packed object may not).
    """

    operand: Any
    nbytes: int
    streamable: bool = True
    replaces: tuple[str, ...] = ()


class Operand(Protocol):
    """A quantized matrix as a kernel sees it."""

    @property
    def scheme(self) -> LayerScheme: ...
    @property
    def shape(self) -> Shape: ...
    @property
    def bias(self) -> torch.Tensor | None: ...
    @property
    def input_scale(self) -> torch.Tensor | None: ...
    @property
    def prepared(self) -> Prepared | None: ...
    @property
    def fields(self) -> Fields: ...


class Kernel(abc.ABC):
    """Multiplies activations with a quantized matrix. ``native``: the scheme's own arithmetic, nothing emulated."""

    name: str
    native: bool = False
    kind: str = ""  # of the devices that it is made for; empty: any
    note: str = ""  # what a user should know about its arithmetic

    def formats(self, scheme: LayerScheme) -> str | None:
        """Say which format of the scheme the kernel does not multiply; ``None`` if it does."""
        return None

    @abc.abstractmethod
    def supports(self, scheme: LayerScheme, facts: DeviceFacts, shape: Shape) -> str | None:
        """Say why a layer of this scheme and (N, K) cannot run here with this kernel; ``None`` if it can."""

    @property
    def needs_preparation(self) -> bool:
        """Whether ``prepare`` must have run before a call."""
        return False

    def prepare(self, fields: Mapping[str, torch.Tensor], scheme: LayerScheme, shape: Shape) -> Prepared:
        """Make the operand. Only called if ``needs_preparation``."""
        raise NotImplementedError(self.name)

    def recover(self, prepared: Prepared) -> Fields:
        """Return the fields that ``prepared`` replaces, bit for bit."""
        return {}

    @abc.abstractmethod
    def __call__(self, x: torch.Tensor, layer: Operand, activation: Activation) -> torch.Tensor:
        """Return x (…, K) times the matrix plus the bias: (…, N) in x's dtype, scaled in float32 and rounded once."""
