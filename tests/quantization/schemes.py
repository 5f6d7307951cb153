"""Schemes and layers that several tests use."""

from __future__ import annotations

import torch
from torch import nn

from omniloom.quantization.codecs import get_codec
from omniloom.quantization.scheme import Activation, LayerScheme

INT8 = get_codec("int8_channel")
FP8 = get_codec("fp8_channel")

SCHEMES = {
    "int8": LayerScheme(INT8, Activation(INT8)),
    "int8_weights": LayerScheme(INT8),
    "int8_rowmax": LayerScheme(get_codec("int8_rowmax"), Activation(INT8)),
    "fp8": LayerScheme(FP8, Activation(FP8, native_only=True)),
    "fp8_emulated": LayerScheme(get_codec("fp8_tensor"), Activation(FP8)),
    "fp8_block": LayerScheme(get_codec("fp8_block")),
    "nf4": LayerScheme(get_codec("bnb4")),
    "mxfp8": LayerScheme(get_codec("mxfp8"), Activation(get_codec("mxfp8"))),
    "mxfp4": LayerScheme(get_codec("mxfp4"), Activation(get_codec("mxfp4"))),
    "mxfp4_dual": LayerScheme(get_codec("mxfp4_dual"), Activation(get_codec("mxfp4_dual"))),
    "int4": LayerScheme(get_codec("int4_group", group_size=32)),
}

STEPS = LayerScheme(
    get_codec("mxfp4"), Activation(get_codec("mxfp4")), Activation(get_codec("mxfp8")), frozenset((0, 3))
)


def dense(n: int = 96, k: int = 64, bias: bool = True, seed: int = 0) -> nn.Linear:
    """A Linear of normal weights, scaled as a trained one's."""
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(k, n, bias=bias)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(n, k, generator=generator) / k**0.5)
        if bias:
            layer.bias.copy_(torch.randn(n, generator=generator))
    return layer.requires_grad_(False)


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, NaNs and signs of zero included."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.cpu().flatten().view(torch.uint8), b.cpu().flatten().view(torch.uint8))


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative L2 error."""
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())
