"""What this machine can do: CPU features, memory limits, accelerators, and what omniloom chooses because of it.

Nothing here imports torch until devices are asked for.
"""

from __future__ import annotations

from omniloom.platform.choose import Choice, choose_device, choose_dtype, default_device, recommended_dtype
from omniloom.platform.cpu import Cpu
from omniloom.platform.detect import Platform, detect
from omniloom.platform.devices import Device
from omniloom.platform.memory import Memory

__all__ = [
    "Choice",
    "Cpu",
    "Device",
    "Memory",
    "Platform",
    "choose_device",
    "choose_dtype",
    "default_device",
    "detect",
    "recommended_dtype",
]
