"""Run diffusion transformers and omni models on any hardware.

with omniloom.Omni("demo") as omni:
    output = omni.generate("a fox on blue", omniloom.SamplingParams(seed=1))[0]
    output.images[0].save("fox.png")

Names are imported when they are first used, so that ``import omniloom`` costs nothing and loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from omniloom._version import __version__

if TYPE_CHECKING:
    from omniloom import errors as errors
    from omniloom.config import RuntimeConfig
    from omniloom.engine.output import Output
    from omniloom.engine.params import SamplingParams
    from omniloom.omni import Omni

__all__ = ["Omni", "Output", "RuntimeConfig", "SamplingParams", "__version__", "errors"]

_HOMES = {
    "Omni": "omniloom.omni",
    "Output": "omniloom.engine.output",
    "RuntimeConfig": "omniloom.config",
    "SamplingParams": "omniloom.engine.params",
}


def __getattr__(name: str) -> object:
    if name == "errors":
        return importlib.import_module("omniloom.errors")
    if name not in _HOMES:
        raise AttributeError(f"module 'omniloom' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
