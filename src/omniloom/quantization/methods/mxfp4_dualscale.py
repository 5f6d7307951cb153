"""MXFP4 with a second, coarse scale per 512 numbers, weights and activations."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from omniloom.errors import ConfigError
from omniloom.quantization.methods.base import MANY_BLOCKS, OnlineConfig, method_config

if TYPE_CHECKING:
    from omniloom.quantization.scheme import LayerScheme


@method_config
class Mxfp4DualScaleConfig(OnlineConfig):
    """MXFP4 under a 32-bit scale per block of 512, after msModelSlim.

    ``num_bf16_fallback_layers``: so many of a denoiser's first blocks stay as they are (``blocks.N``,
    ``transformer_blocks.N``, ``layers.N``). Only for weights that are quantized online: a serialized checkpoint
    decides for itself.
    """

    method = "mxfp4_dualscale"
    stored_dtypes = frozenset({"F8_E4M3", "F8_E8M0", "U8"})

    is_checkpoint_serialized: bool = False
    num_bf16_fallback_layers: int = 5
    w4a8_fallback_steps: tuple[int, ...] = ()
    w4a8_fallback_layers: tuple[str, ...] = ()

    def check(self) -> None:
        if self.num_bf16_fallback_layers < 0:
            raise ConfigError(
                f"option quantization.mxfp4_dualscale.num_bf16_fallback_layers={self.num_bf16_fallback_layers}: "
                "must be at least 0"
            )
        for key in ("w4a8_fallback_steps", "w4a8_fallback_layers"):
            if getattr(self, key):
                raise ConfigError(f"option quantization.mxfp4_dualscale.{key}: only method 'mxfp4' has such a fallback")

    def keeps(self, path: str) -> str | None:
        block = re.match(MANY_BLOCKS, path)
        if self.serialized or not block or int(block[1]) >= self.num_bf16_fallback_layers:
            return None
        return f"one of the first {self.num_bf16_fallback_layers} blocks (num_bf16_fallback_layers)"

    def scheme(self, path: str, shape: tuple[int, int]) -> LayerScheme:
        from omniloom.quantization.codecs import get_codec
        from omniloom.quantization.scheme import Activation, LayerScheme

        codec = get_codec("mxfp4_dual")
        return LayerScheme(codec, Activation(codec))
