"""Named lazy tensors out of safetensors files, component folders and the hub, checked before a tensor is read.

Only ``TensorSource`` needs torch; everything else answers without importing it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from omniloom.checkpoint.hub import resolve_model
from omniloom.checkpoint.index import Weights, find_weights, single_file
from omniloom.checkpoint.safetensors import SafetensorsHeader, TensorInfo, read_header

if TYPE_CHECKING:
    from omniloom.checkpoint.source import TensorSource

__all__ = [
    "SafetensorsHeader",
    "TensorInfo",
    "TensorSource",
    "Weights",
    "find_weights",
    "read_header",
    "resolve_model",
    "single_file",
]


def __getattr__(name: str) -> object:
    if name == "TensorSource":
        from omniloom.checkpoint.source import TensorSource

        return TensorSource
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
