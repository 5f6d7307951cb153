"""Native 8-bit products on NVIDIA GPUs. The products themselves are attributes, so that tests can stand in for them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from omniloom.quantization.codecs.base import Shape
from omniloom.quantization.kernels.activation import fp8_codes, int8_codes
from omniloom.quantization.kernels.base import DeviceFacts, Kernel, Operand, device_facts
from omniloom.quantization.kernels.cpu_int8 import int8_formats, row_scale
from omniloom.quantization.kernels.reference import finish
from omniloom.quantization.scheme import Activation, LayerScheme

_FP8 = ("fp8_tensor", "fp8_channel")


class CudaKernel(Kernel):
    """Base: ``capability`` is the least that is needed, and both sides of the matrix are multiples of ``multiple``."""

    native = True
    kind = "cuda"
    capability: tuple[int, int]
    multiple: int

    def supports(self, scheme: LayerScheme, facts: DeviceFacts, shape: Shape) -> str | None:
        if facts.kind != "cuda" or facts.capability is None or facts.capability < self.capability:
            return f"needs an NVIDIA GPU of compute capability {self.capability[0]}.{self.capability[1]} or newer"
        if shape[0] % self.multiple or shape[1] % self.multiple:
            return f"both sides of {shape} must be multiples of {self.multiple}"
        return self.formats(scheme)


class CudaFp8Kernel(CudaKernel):
    """``torch._scaled_mm``: scales by rows inside of it from Hopper on, applied to its float32 result on Ada."""

    name = "cuda_fp8"
    capability = (8, 9)
    multiple = 16

    def __init__(self, matmul: Callable[..., torch.Tensor] | None = None, rowwise: bool | None = None) -> None:
        self.matmul = matmul or torch._scaled_mm
        self.rowwise = rowwise

    def formats(self, scheme: LayerScheme) -> str | None:
        codec = scheme.activation.codec
        if scheme.codec.name not in _FP8:
            return f"weights are {scheme.codec.name}, not fp8 by tensor or rows"
        if codec is None or codec.name not in _FP8:
            return f"activations are {codec.name if codec else 'not quantized'}, not fp8 by tensor or tokens"
        return None

    def __call__(self, x: torch.Tensor, layer: Operand, activation: Activation) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        n = layer.shape[0]
        if flat.shape[0] == 0:
            return x.new_empty(*x.shape[:-1], n)
        codes, scale = fp8_codes(flat, activation, layer.input_scale)
        fields = layer.fields
        weight_scale = fields["scale"].reshape(-1).to(torch.float32)
        by_tokens = scale.expand(flat.shape[0], 1) if scale.dim() == 2 else scale.reshape(1, 1).expand(flat.shape[0], 1)
        weight = fields["codes"].contiguous().t()  # the product wants its second operand column by column
        rowwise = self.rowwise
        if rowwise is None:
            capability = device_facts(x.device).capability
            rowwise = capability is not None and capability >= (9, 0) and x.dtype == torch.bfloat16
        if rowwise:
            y = self.matmul(
                codes,
                weight,
                scale_a=by_tokens.contiguous(),
                scale_b=weight_scale.expand(n).reshape(1, n).contiguous(),
                out_dtype=torch.bfloat16,
            )
        else:
            one = torch.ones((), device=x.device)
            y = self.matmul(codes, weight, scale_a=one, scale_b=one, out_dtype=torch.float32)
            y = y * weight_scale * by_tokens
        return finish(y, layer.bias, x.dtype).reshape(*x.shape[:-1], n)


class CudaInt8Kernel(CudaKernel):
    """``torch._int_mm`` from Ampere on: exact int32 sums, scaled in float32."""

    name = "cuda_int8"
    capability = (8, 0)
    multiple = 8
    _ROWS = 32  # it refuses 16 rows and fewer

    def __init__(self, matmul: Callable[..., torch.Tensor] | None = None) -> None:
        self.matmul = matmul or torch._int_mm

    def formats(self, scheme: LayerScheme) -> str | None:
        return int8_formats(scheme)

    def __call__(self, x: torch.Tensor, layer: Operand, activation: Activation) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        count = flat.shape[0]
        codes, scale = int8_codes(flat, activation, layer.input_scale)
        if count < self._ROWS:
            codes = F.pad(codes, (0, 0, 0, self._ROWS - count))
        fields = layer.fields
        y = self.matmul(codes, fields["codes"].contiguous().t())[:count].to(torch.float32)
        y = y * row_scale(layer.scheme.codec, fields) * scale
        return finish(y, layer.bias, x.dtype).reshape(*x.shape[:-1], layer.shape[0])
