"""Whether several requests may use one component at a time.

Weights are shared, call state is not. A class is ``CONCURRENT`` only where a hammer test proves it
(``tests/engine/test_concurrency.py``); anything unknown is ``EXCLUSIVE``.
"""

from __future__ import annotations

import enum
from typing import Any

import torch


class CallState(enum.Enum):
    """How requests share a component."""

    COPY = "copy"  # each request or worker has its own: schedulers, guiders, tokenizers, processors
    EXCLUSIVE = "exclusive"  # one call at a time
    CONCURRENT = "concurrent"  # calls may overlap


CONCURRENT_CLASSES = frozenset(
    {
        "AutoencoderKL",
        "AutoencoderTiny",
        "CLIPTextModel",
        "CLIPTextModelWithProjection",
        "FluxTransformer2DModel",
        "SD3Transformer2DModel",
        "T5EncoderModel",
    }
)


def call_state(component: Any) -> CallState:
    """Return how requests may share ``component``."""
    if not isinstance(component, torch.nn.Module):
        return CallState.COPY
    return CallState.CONCURRENT if type(component).__name__ in CONCURRENT_CLASSES else CallState.EXCLUSIVE


class Exclusive:
    """A stand-in for a module whose calls hold ``lock``; otherwise it looks like the module itself."""

    def __init__(self, target: torch.nn.Module, lock: Any) -> None:
        object.__setattr__(self, "_target", target)
        object.__setattr__(self, "_lock", lock)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # isinstance(proxy, AutoencoderKL) holds
        return type(self._target)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return self._target(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if name.startswith("_") or getattr(value, "__self__", None) is not self._target:
            return value

        def locked(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                return value(*args, **kwargs)

        return locked

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._target, name, value)
