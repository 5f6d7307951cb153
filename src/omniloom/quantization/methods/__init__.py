"""Quantization methods, one file each: a frozen config that says what is stored and computed for each layer."""

from omniloom.quantization.methods import ascend as _ascend
from omniloom.quantization.methods import awq as _awq
from omniloom.quantization.methods import bitsandbytes as _bitsandbytes
from omniloom.quantization.methods import compressed_tensors as _compressed_tensors
from omniloom.quantization.methods import fp8 as _fp8
from omniloom.quantization.methods import gguf as _gguf
from omniloom.quantization.methods import gptq as _gptq
from omniloom.quantization.methods import inc as _inc
from omniloom.quantization.methods import int8 as _int8
from omniloom.quantization.methods import modelopt as _modelopt
from omniloom.quantization.methods import mxfp4 as _mxfp4
from omniloom.quantization.methods import mxfp4_dualscale as _mxfp4_dualscale
from omniloom.quantization.methods import mxfp8 as _mxfp8
from omniloom.quantization.methods import svdquant as _svdquant
from omniloom.quantization.methods import torchao as _torchao  # noqa: F401  (importing them fills the registry)
from omniloom.quantization.methods.base import OnlineConfig, QuantizationConfig, get_method, online_methods

__all__ = ["OnlineConfig", "QuantizationConfig", "get_method", "online_methods"]
