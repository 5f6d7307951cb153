"""int8 weights times int8 activations on a CPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from omniloom.quantization.codecs.base import Codec, Fields, Shape
from omniloom.quantization.kernels import packed
from omniloom.quantization.kernels.activation import int8_codes
from omniloom.quantization.kernels.base import DeviceFacts, Kernel, Operand, Prepared, cpu_facts
from omniloom.quantization.kernels.reference import finish
from omniloom.quantization.scheme import Activation, LayerScheme

INT8_WEIGHTS = ("int8_channel", "int8_rowmax")


def row_scale(codec: Codec, fields: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the float32 scale (N) of an int8 codec's rows."""
    if codec.name == "int8_rowmax":
        return fields["row_absmax"].reshape(-1).to(torch.float32) / 127.0
    return fields["scale"].reshape(-1).to(torch.float32)


def int8_formats(scheme: LayerScheme) -> str | None:
    """Say why a scheme is not int8 by rows times int8 by tokens; ``None`` if it is."""
    if scheme.codec.name not in INT8_WEIGHTS:
        return f"weights are {scheme.codec.name}, not int8 by rows"
    codec = scheme.activation.codec
    if codec is None or codec.name != "int8_channel":
        return f"activations are {codec.name if codec else 'not quantized'}, not int8 by tokens"
    return None


class IntMatmulKernel(Kernel):
    """``torch._int_mm`` on the codes as they are stored: exact int32 sums, no second copy of the weights.

    Measured at 3072 x 3072 on a CPU with VNNI and AMX, one thread, 512 rows: 37 ms, float32 252 ms, packed linear
    102 ms; one row: 1.5, 2.4 and 0.7 ms. Without VNNI the same function is a plain loop, 29 times slower than float32.
    """

    name = "cpu_int_mm"
    native = True
    kind = "cpu"

    def formats(self, scheme: LayerScheme) -> str | None:
        return int8_formats(scheme)

    def supports(self, scheme: LayerScheme, facts: DeviceFacts, shape: Shape) -> str | None:
        if facts.kind != "cpu" or not facts.native_int8:
            return "needs a CPU with AVX-512 VNNI or AMX"
        return self.formats(scheme)

    def __call__(self, x: torch.Tensor, layer: Operand, activation: Activation) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        codes, scale = int8_codes(flat, activation, layer.input_scale)
        fields = layer.fields
        y = torch._int_mm(codes, fields["codes"].t()).to(torch.float32)
        y = y.mul_(row_scale(layer.scheme.codec, fields)).mul_(scale)
        return finish(y, layer.bias, x.dtype).reshape(*x.shape[:-1], layer.shape[0])


class PackedInt8Kernel(Kernel):
    """torch's packed dynamic int8 linear with one activation scale per token. The packed weight replaces the codes."""

    name = "cpu_packed_int8"
    native = True
    kind = "cpu"
    note = "activations in 7 bits on a CPU without VNNI, whose byte products saturate otherwise"

    def formats(self, scheme: LayerScheme) -> str | None:
        return int8_formats(scheme)

    @property
    def needs_preparation(self) -> bool:
        return True

    def supports(self, scheme: LayerScheme, facts: DeviceFacts, shape: Shape) -> str | None:
        if facts.kind != "cpu":
            return "torch's packed int8 linear is for CPUs"
        if scheme.activation.static:
            return "static activations are not in torch's packed int8 linear"
        if shape[1] < 2:
            return "needs two columns at least"
        return self.formats(scheme) or packed.problem()

    def prepare(self, fields: Mapping[str, torch.Tensor], scheme: LayerScheme, shape: Shape) -> Prepared:
        operand = packed.pack(fields["codes"], row_scale(scheme.codec, fields))
        return Prepared(operand, shape[0] * shape[1] + 8 * shape[0], streamable=False, replaces=("codes",))

    def recover(self, prepared: Prepared) -> Fields:
        return {"codes": packed.unpack(prepared.operand)}

    def __call__(self, x: torch.Tensor, layer: Operand, activation: Activation) -> torch.Tensor:
        prepared = layer.prepared
        assert prepared is not None
        flat = x.reshape(-1, x.shape[-1]).to(torch.float32)
        if flat.shape[0] == 0:
            return x.new_empty(*x.shape[:-1], layer.shape[0])
        y = packed.multiply(flat, prepared.operand, reduce_range=not cpu_facts().native_int8)
        return finish(y, layer.bias, x.dtype).reshape(*x.shape[:-1], layer.shape[0])
