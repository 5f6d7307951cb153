"""Kernels for every codec: decode the weights, multiply in floating point; activations are emulated exactly."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from omniloom.quantization.codecs.base import Shape
from omniloom.quantization.kernels.activation import emulate
from omniloom.quantization.kernels.base import DeviceFacts, Kernel, Operand, device_facts
from omniloom.quantization.kernels.decoders import SCRATCH, decode_into
from omniloom.quantization.kernels.tiles import row_spans, take, tile_rows
from omniloom.quantization.scheme import Activation, LayerScheme


def product_dtype(x: torch.Tensor, activation: Activation) -> torch.dtype:
    """Return the dtype that products run in: float32 where codes are emulated, else ``x``'s own where that is fast."""
    if x.dtype in (torch.float32, torch.float64):
        return x.dtype
    if activation.codec is not None:
        return torch.float32
    facts = device_facts(x.device)
    if facts.kind == "cpu" and not (x.dtype == torch.bfloat16 and facts.native_bf16):
        return torch.float32
    return x.dtype


def finish(y: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Add the bias in the accumulator's precision and round once to ``dtype``."""
    if bias is not None:
        y = y + bias.to(y.dtype)
    return y.to(dtype)


class ReferenceKernel(Kernel):
    """Decodes the whole matrix per call. Runs everywhere, traces under ``torch.compile``, and has gradients of x."""

    name = "reference"

    def supports(self, scheme: LayerScheme, facts: DeviceFacts, shape: Shape) -> str | None:
        return scheme.codec.problem(shape)

    def __call__(self, x: torch.Tensor, layer: Operand, activation: Activation) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        dtype = product_dtype(x, activation)
        weight = layer.scheme.codec.decode(layer.fields, layer.shape, dtype)
        y = F.linear(emulate(flat, activation, layer.input_scale).to(dtype), weight)
        return finish(y, layer.bias, x.dtype).reshape(*x.shape[:-1], layer.shape[0])


class TiledKernel(Kernel):
    """Decodes a few rows of the matrix at a time on a CPU, so that the dense tile is multiplied while it is in cache.

    The memory it needs is one tile, not one layer. A result does not depend on whether the caller was compiled.
    """

    name = "cpu_tiled"

    def supports(self, scheme: LayerScheme, facts: DeviceFacts, shape: Shape) -> str | None:
        if facts.kind != "cpu":
            return "decoding tile by tile is for CPUs"
        if row_spans(scheme.codec, shape, tile_rows(shape)) is None:
            return f"{scheme.codec.name} does not store a few rows of {shape} together"
        return scheme.codec.problem(shape)

    def __call__(self, x: torch.Tensor, layer: Operand, activation: Activation) -> torch.Tensor:
        codec, shape, fields = layer.scheme.codec, layer.shape, layer.fields
        rows = tile_rows(shape)
        tiles = row_spans(codec, shape, rows)
        assert tiles is not None
        flat = x.reshape(-1, x.shape[-1])
        dtype = product_dtype(x, activation)
        flat = emulate(flat, activation, layer.input_scale).to(dtype)
        y = flat.new_empty(flat.shape[0], shape[0])
        for index, spans in enumerate(tiles):
            start = index * rows
            stop = min(shape[0], start + rows)
            tile = SCRATCH.get("tile", (stop - start) * shape[1], dtype).view(stop - start, shape[1])
            decode_into(codec, take(fields, spans), (stop - start, shape[1]), tile)
            torch.mm(flat, tile.t(), out=y[:, start:stop])
        return finish(y, layer.bias, x.dtype).reshape(*x.shape[:-1], shape[0])
