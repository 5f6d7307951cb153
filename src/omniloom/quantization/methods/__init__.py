"""Quantization methods, one file each: a frozen config that says what is stored and computed for each layer."""

# importing a method's module registers it
from omniloom.quantization.methods import (  # noqa: F401
    ascend,
    awq,
    bitsandbytes,
    compressed_tensors,
    fp8,
    gguf,
    gptq,
    inc,
    int8,
    modelopt,
    mxfp4,
    mxfp4_dualscale,
    mxfp8,
    svdquant,
    torchao,
)
from omniloom.quantization.methods.base import OnlineConfig, QuantizationConfig, get_method, online_methods

__all__ = ["OnlineConfig", "QuantizationConfig", "get_method", "online_methods"]
