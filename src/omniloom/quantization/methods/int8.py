"""INT8 weights (one scale per output channel) and activations (one scale per token)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omniloom.errors import ConfigError
from omniloom.quantization.methods.base import OnlineConfig, method_config, one_of

if TYPE_CHECKING:
    from omniloom.quantization.scheme import LayerScheme


@method_config
class Int8Config(OnlineConfig):
    """Symmetric INT8, 32-bit sums. ``activation_scheme``: only "dynamic" exists. Keys are those of vLLM's ``int8``."""

    method = "int8"
    serialized_key = "is_checkpoint_int8_serialized"
    stored_dtypes = frozenset({"I8"})

    is_checkpoint_int8_serialized: bool = False
    activation_scheme: str = "dynamic"

    def check(self) -> None:
        if self.activation_scheme == "static":
            raise ConfigError(
                "option quantization.int8.activation_scheme='static': int8 activations are 'dynamic' only"
            )
        one_of(self, "activation_scheme", ("dynamic",))

    def scheme(self, path: str, shape: tuple[int, int]) -> LayerScheme:
        from omniloom.quantization.codecs import get_codec
        from omniloom.quantization.scheme import Activation, LayerScheme

        return LayerScheme(get_codec("int8_channel"), Activation(get_codec("int8_channel")))
