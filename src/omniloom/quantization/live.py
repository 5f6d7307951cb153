"""Quantizing a module that is loaded already."""

from __future__ import annotations

from typing import Any

import torch

from omniloom.errors import ConfigError
from omniloom.quantization.component import ComponentQuantizationConfig
from omniloom.quantization.convert import quantize_modules
from omniloom.quantization.factory import build_quant_config
from omniloom.quantization.rules import Selection, select_layers


def quantize_(
    module: torch.nn.Module,
    config: Any,
    *,
    name: str = "model",
    device: torch.device | str | None = None,
    **options: Any,
) -> Selection:
    """Quantize the layers of a diffusers or transformers module (or any other) in place, one at a time.

    ``config``: a method's name with ``options``, a dict, or what ``build_quant_config`` returned. ``device``: where the
    quantized layers go. Returns which layers were quantized, and which not and why. Raises ``ConfigError``, before
    anything is changed, for a wrong config, one for several components, or one that matches no layer.
    """
    built = build_quant_config(config, **options)
    if built is None or isinstance(built, ComponentQuantizationConfig):
        raise ConfigError(f"quantize_: give one method for this module, not {config!r}")
    built.check_online()
    selection = select_layers(module, built, component=name)
    quantize_modules(module, selection.quantized, device=device)
    return selection
