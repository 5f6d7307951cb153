"""Quantizing activations: exactly emulated in float32, and as codes with one scale per token for native products."""

from __future__ import annotations

import torch

from omniloom.errors import ConfigError, EngineError
from omniloom.quantization.scheme import Activation, LayerScheme

FP8_MAX = 448.0
_TINY = 1e-30


def emulate(x: torch.Tensor, activation: Activation, input_scale: torch.Tensor | None) -> torch.Tensor:
    """Round x (M, K) to the activation's format and back, in float32. Weight-only activations come back unchanged."""
    if activation.codec is None:
        return x
    if activation.static:
        codes, scale = static_codes(x, activation, input_scale)
        return codes.to(torch.float32) * scale
    shape = (x.shape[0], x.shape[1])
    return activation.codec.decode(activation.codec.encode(x), shape, torch.float32)


def static_codes(
    x: torch.Tensor, activation: Activation, input_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x (M, K) with the stored scalar scale; return the codes and the scale (float32).

    Raises ``ConfigError`` if the layer has no ``input_scale`` or the format has no static form.
    """
    name = activation.codec.name if activation.codec is not None else ""
    if input_scale is None:
        raise ConfigError("the scheme asks for static activations, but the layer has no input_scale")
    scale = input_scale.to(torch.float32)
    scaled = x.to(torch.float32) / scale
    if name.startswith("fp8"):
        return scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale
    if name.startswith("int8"):
        return scaled.round().clamp(-128, 127).to(torch.int8), scale
    raise ConfigError(f"activations in {name!r} have no static form (known: fp8, int8)")


def token_scale(x: torch.Tensor, largest: float) -> torch.Tensor:
    """Return the float32 scale (M, 1) that maps each row's largest magnitude to ``largest``; never zero."""
    return x.abs().amax(dim=1, keepdim=True).to(torch.float32).clamp_min(_TINY) / largest


def int8_codes(
    x: torch.Tensor, activation: Activation, input_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x (M, K) as int8 codes and its scale: (M, 1), or a scalar of a static activation."""
    if activation.static:
        return static_codes(x, activation, input_scale)
    scale = token_scale(x, 127.0)
    return (x.to(torch.float32) / scale).round_().clamp_(-128, 127).to(torch.int8), scale


def fp8_codes(
    x: torch.Tensor, activation: Activation, input_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x (M, K) as E4M3 codes and its scale: (M, 1), or a scalar if static or one per tensor."""
    if activation.static:
        return static_codes(x, activation, input_scale)
    scale = token_scale(x, FP8_MAX)
    if activation.codec is not None and activation.codec.name == "fp8_tensor":
        scale = scale.amax()
    return (x.to(torch.float32) / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def current_activation(scheme: LayerScheme) -> Activation:
    """Return the activation of the call that this thread is in: ``fallback`` in the steps in ``fallback_steps``.

    Raises ``EngineError`` if the scheme depends on the denoising step and none is published.
    """
    if scheme.fallback is None or not scheme.fallback_steps:
        return scheme.activation
    from omniloom.diffusion.hooks.state import CALL

    step = getattr(CALL.get(), "step", None)
    if not isinstance(step, int):
        raise EngineError(
            "this layer's activation format depends on the denoising step, and the call names none: "
            "run it through the engine, or publish a call with a step"
        )
    return scheme.fallback if step in scheme.fallback_steps else scheme.activation
