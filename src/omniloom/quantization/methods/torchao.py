"""Checkpoints that torchao quantized."""

from __future__ import annotations

from typing import Any

from omniloom.quantization.methods.base import QuantizationConfig, method_config


@method_config
class TorchaoConfig(QuantizationConfig):
    """torchao's ``quantization_config``. ``quant_type``: the name of a scheme, or torchao's own description of it."""

    method = "torchao"
    names = ("torchao_float8_weight_only",)
    presets = {"torchao_float8_weight_only": {"quant_type": "float8_weight_only"}}

    is_checkpoint_serialized: bool = False
    quant_type: str | dict[str, Any] | None = None
    quant_type_kwargs: dict[str, Any] | None = None
    modules_to_not_convert: tuple[str, ...] = ()
