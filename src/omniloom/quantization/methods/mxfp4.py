"""MXFP4: E2M1 numbers in blocks of 32 with a power of two as scale, weights and activations."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from omniloom.errors import ConfigError
from omniloom.quantization.methods.base import OnlineConfig, check_strings, method_config, one_of

if TYPE_CHECKING:
    from omniloom.quantization.scheme import LayerScheme

_PATH = re.compile(r"\w+(\.\w+)*")
_ROUNDING = {0: "floor", 2: "uos"}


@method_config
class Mxfp4Config(OnlineConfig):
    """MXFP4 weights and activations; a layer can keep MXFP8 activations, always or in some denoising steps.

    ``w4a8_fallback_layers``: full paths, without wildcards. ``w4a8_fallback_steps``: zero-based steps. A layer that is
    ignored stays as it is whatever these lists say. ``mxfp4_scale_alg``: 0 is the OCP rule, 2 the one that takes 7.25
    for the largest number. ``require_smooth_scale``: a serialized layer without ``mul_scale`` is an error.
    """

    method = "mxfp4"
    serialized_key = "is_checkpoint_mxfp4_serialized"
    stored_dtypes = frozenset({"F8_E4M3", "F8_E8M0", "U8"})
    runtime_keys = ("w4a8_fallback_steps", "w4a8_fallback_layers", "mxfp4_scale_alg")

    is_checkpoint_mxfp4_serialized: bool = False
    w4a8_fallback_steps: tuple[int, ...] = ()
    w4a8_fallback_layers: tuple[str, ...] = ()
    require_smooth_scale: bool = False
    mxfp4_scale_alg: int = 0

    def check(self) -> None:
        steps = self.w4a8_fallback_steps
        if not all(type(step) is int and step >= 0 for step in steps):
            raise ConfigError(
                f"option quantization.mxfp4.w4a8_fallback_steps={list(steps)!r}: give denoising steps, 0 is the first"
            )
        object.__setattr__(self, "w4a8_fallback_steps", tuple(sorted(set(steps))))
        check_strings(self, "w4a8_fallback_layers")
        for path in self.w4a8_fallback_layers:
            if not _PATH.fullmatch(path):
                raise ConfigError(
                    f"option quantization.mxfp4.w4a8_fallback_layers: {path!r} is no full path of a layer "
                    "(for example blocks.0.attn1.to_q; wildcards are not allowed here)"
                )
        one_of(self, "mxfp4_scale_alg", tuple(_ROUNDING))
        if self.require_smooth_scale and not self.serialized:
            raise ConfigError(
                "quantization method 'mxfp4': require_smooth_scale needs a serialized checkpoint, "
                "weights that are quantized online have no mul_scale"
            )

    def named_layers(self) -> tuple[tuple[str, str], ...]:
        return tuple(("w4a8_fallback_layers", path) for path in self.w4a8_fallback_layers)

    def scheme(self, path: str, shape: tuple[int, int]) -> LayerScheme:
        from omniloom.quantization.codecs import get_codec
        from omniloom.quantization.scheme import Activation, LayerScheme

        codec = get_codec("mxfp4", rounding=_ROUNDING[self.mxfp4_scale_alg])
        wide = Activation(get_codec("mxfp8", rounding="floor"))
        if path in self.w4a8_fallback_layers:
            return LayerScheme(codec, wide)
        if self.w4a8_fallback_steps:
            return LayerScheme(codec, Activation(codec), wide, frozenset(self.w4a8_fallback_steps))
        return LayerScheme(codec, Activation(codec))
