"""MXFP8: E4M3 numbers in blocks of 32 with a power of two as scale, weights and activations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omniloom.quantization.methods.base import OnlineConfig, method_config

if TYPE_CHECKING:
    from omniloom.quantization.scheme import LayerScheme


@method_config
class Mxfp8Config(OnlineConfig):
    """MXFP8 after the OCP microscaling specification; weights quantized online take the largest exponent below amax."""

    method = "mxfp8"
    serialized_key = "is_checkpoint_mxfp8_serialized"
    stored_dtypes = frozenset({"F8_E4M3", "F8_E8M0", "U8"})

    is_checkpoint_mxfp8_serialized: bool = False

    def scheme(self, path: str, shape: tuple[int, int]) -> LayerScheme:
        from omniloom.quantization.codecs import get_codec
        from omniloom.quantization.scheme import Activation, LayerScheme

        codec = get_codec("mxfp8", rounding="floor")
        return LayerScheme(codec, Activation(codec))
