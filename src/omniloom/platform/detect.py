"""Everything about the machine in one value, for ``omniloom check`` and for reports."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import sys
from pathlib import Path
from typing import Any

from omniloom.config import to_plain
from omniloom.platform.cpu import Cpu, detect_cpu
from omniloom.platform.devices import Device, detect_devices
from omniloom.platform.files import ROOT
from omniloom.platform.memory import Memory, detect_memory

LIBRARIES = ("torch", "diffusers", "transformers", "accelerate", "safetensors", "huggingface_hub", "numpy", "pillow")


@dataclasses.dataclass(frozen=True)
class Platform:
    """The machine as it was when it was looked at. ``devices`` is ``None`` if they were not asked for."""

    os: str
    python: str
    libraries: dict[str, str]
    cpu: Cpu
    memory: Memory
    devices: tuple[Device, ...] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON types."""
        return dict(to_plain(self))


def detect(devices: bool = False, *, root: Path = ROOT) -> Platform:
    """Look at the machine. ``devices=True`` imports torch and asks it for accelerators."""
    return Platform(
        os=platform.platform(),
        python=f"{platform.python_implementation()} {platform.python_version()}",
        libraries={name: version for name in LIBRARIES if (version := _version(name))},
        cpu=detect_cpu(root, sys.platform),
        memory=detect_memory(root, sys.platform),
        devices=detect_devices() if devices else None,
    )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
