"""FP8 (E4M3) weights and activations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omniloom.errors import ConfigError
from omniloom.quantization.methods.base import OnlineConfig, QuantizationConfig, method_config, one_of

if TYPE_CHECKING:
    from omniloom.quantization.scheme import LayerScheme


@method_config
class Fp8Config(OnlineConfig):
    """FP8 weights; activations are rounded to FP8 where the device multiplies FP8, else the layer is weight-only.

    ``weight_granularity``: one scale per output "channel" (the default: an outlier row harms no other), per "tensor"
    or per "block" of ``weight_block_size`` (rows, columns). ``activation_scheme``: "dynamic" computes one scale per
    token, per block of columns with block weights; "static" uses the ``input_scale`` of a serialized checkpoint.
    Keys of vLLM's ``fp8`` format and of DeepSeek's block format are understood on disk.
    """

    method = "fp8"
    serialized_key = "is_checkpoint_fp8_serialized"
    stored_dtypes = frozenset({"F8_E4M3"})
    layout_keys = ("activation_scheme", "weight_block_size")

    is_checkpoint_fp8_serialized: bool = False
    activation_scheme: str = "dynamic"
    weight_granularity: str | None = None
    weight_block_size: tuple[int, ...] | None = None

    def check(self) -> None:
        one_of(self, "activation_scheme", ("dynamic", "static"))
        block = self.weight_block_size
        if block is None and self.weight_granularity == "block":
            block = (128, 128)
        if block is not None and (len(block) != 2 or not all(type(n) is int and n > 0 for n in block)):
            raise ConfigError(f"option quantization.fp8.weight_block_size={list(block)!r}: give [rows, columns]")
        object.__setattr__(self, "weight_block_size", block)
        if self.weight_granularity is None:
            object.__setattr__(self, "weight_granularity", "block" if block else "channel")
        one_of(self, "weight_granularity", ("channel", "tensor", "block"))
        if block and self.weight_granularity != "block":
            raise ConfigError(
                f"quantization method 'fp8': weight_block_size={list(block)} contradicts "
                f"weight_granularity={self.weight_granularity!r}"
            )
        if block and self.activation_scheme == "static":
            raise ConfigError("quantization method 'fp8': weight_block_size needs activation_scheme 'dynamic'")

    def check_online(self) -> None:
        super().check_online()
        if self.activation_scheme == "static":
            raise ConfigError(
                "quantization method 'fp8' with activation_scheme='static' needs input scales, which only a "
                "serialized checkpoint has (omniloom does not calibrate): use such a checkpoint, or 'dynamic'"
            )

    def scheme(self, path: str, shape: tuple[int, int]) -> LayerScheme:
        from omniloom.quantization.codecs import get_codec
        from omniloom.quantization.scheme import Activation, LayerScheme

        if self.weight_block_size:
            rows, columns = self.weight_block_size
            codec = get_codec("fp8_block", rows=rows, columns=columns)
            activation = get_codec("fp8_block", rows=1, columns=columns)
        else:
            codec = get_codec(f"fp8_{self.weight_granularity}")
            activation = get_codec("fp8_tensor" if self.activation_scheme == "static" else "fp8_channel")
        static = self.activation_scheme == "static"
        return LayerScheme(codec, Activation(activation, static=static, native_only=True))

    @classmethod
    def from_disk(cls, raw: Any, name: str = "", stored: Any = None) -> QuantizationConfig:
        if not raw.get("weight_block_size"):  # the tensors will tell; until then what the format's producer writes
            raw = {"weight_granularity": "tensor", **raw}
        return super().from_disk(raw, name, stored)
