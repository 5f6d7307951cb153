"""Quantization: methods, formats, and the layers they apply to. Importing this package loads no torch."""

from typing import TYPE_CHECKING, Any

from omniloom.quantization.component import ComponentQuantizationConfig, check_components, component_config
from omniloom.quantization.factory import (
    build_quant_config,
    build_quantization_config,
    config_from_disk,
    register_quantization_override,
)
from omniloom.quantization.methods import QuantizationConfig
from omniloom.quantization.resolve import (
    ComponentFacts,
    resolve_components,
    resolve_encoder_quant_config,
    resolve_quant_config_from_disk,
)

if TYPE_CHECKING:
    from omniloom.quantization.live import quantize_

__all__ = [
    "ComponentFacts",
    "ComponentQuantizationConfig",
    "QuantizationConfig",
    "build_quant_config",
    "build_quantization_config",
    "check_components",
    "component_config",
    "config_from_disk",
    "quantize_",
    "register_quantization_override",
    "resolve_components",
    "resolve_encoder_quant_config",
    "resolve_quant_config_from_disk",
]


def __getattr__(name: str) -> Any:
    if name == "quantize_":
        from omniloom.quantization.live import quantize_

        return quantize_
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
