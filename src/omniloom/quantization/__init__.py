"""Quantization: methods, formats, and the layers they apply to. Importing this package loads no torch."""

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

__all__ = [
    "ComponentFacts",
    "ComponentQuantizationConfig",
    "QuantizationConfig",
    "build_quant_config",
    "build_quantization_config",
    "check_components",
    "component_config",
    "config_from_disk",
    "register_quantization_override",
    "resolve_components",
    "resolve_encoder_quant_config",
    "resolve_quant_config_from_disk",
]
