"""bitsandbytes formats: NF4 and FP4 in blocks, and LLM.int8 rows; always weight-only here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omniloom.errors import ConfigError
from omniloom.quantization.methods.base import OnlineConfig, method_config, one_of, rename

if TYPE_CHECKING:
    from omniloom.quantization.scheme import LayerScheme

_HF_NAMES = {
    "_load_in_4bit": "load_in_4bit",
    "_load_in_8bit": "load_in_8bit",
    "bnb_4bit_quant_type": "quant_type",
    "bnb_4bit_use_double_quant": "compress_statistics",
    "llm_int8_skip_modules": "modules_to_not_convert",
}
_HF_DEFAULTS = {"quant_type": "fp4", "compress_statistics": False}  # other than ours
_HF_WITHOUT_EFFECT = (
    "bnb_4bit_compute_dtype",
    "bnb_4bit_quant_storage",
    "llm_int8_threshold",
    "llm_int8_enable_fp32_cpu_offload",
    "llm_int8_has_fp16_weight",
    "bnb_4bit_target_parameters",
)


@method_config
class BitsAndBytesConfig(OnlineConfig):
    """4-bit weights in blocks of ``block_size`` along the flattened matrix, or 8-bit rows with ``load_in_8bit``.

    ``quant_type``: "nf4" or "fp4". ``compress_statistics``: the blocks' scales are quantized as well. The keys of
    transformers' and diffusers' BitsAndBytesConfig are understood too; with them, their defaults hold ("fp4", no
    double quantization).
    """

    method = "bitsandbytes"
    names = ("bnb", "bitsandbytes_4bit", "bitsandbytes_8bit")
    presets = {"bitsandbytes_8bit": {"load_in_8bit": True}}
    serialized_key = "is_checkpoint_bitsandbytes_serialized"
    stored_dtypes = frozenset({"U8", "I8"})
    layout_keys = ("quant_type", "compress_statistics", "block_size", "load_in_8bit")

    is_checkpoint_bitsandbytes_serialized: bool = False
    quant_type: str = "nf4"
    compress_statistics: bool = True
    block_size: int = 64
    load_in_8bit: bool = False

    def check(self) -> None:
        one_of(self, "quant_type", ("nf4", "fp4"))
        one_of(self, "block_size", tuple(2**n for n in range(5, 13)))

    def scheme(self, path: str, shape: tuple[int, int]) -> LayerScheme:
        from omniloom.quantization.codecs import get_codec
        from omniloom.quantization.scheme import LayerScheme

        if self.load_in_8bit:
            return LayerScheme(get_codec("int8_rowmax"))
        double = self.compress_statistics
        return LayerScheme(
            get_codec("bnb4", quant_type=self.quant_type, block_size=self.block_size, double_quant=double)
        )

    @classmethod
    def translate(cls, given: dict[str, Any]) -> dict[str, Any]:
        huggingface = {"load_in_4bit", *_HF_NAMES, *_HF_WITHOUT_EFFECT} & given.keys()
        if not huggingface:
            return given
        given = rename(given, _HF_NAMES, cls.method)
        four, eight = given.pop("load_in_4bit", None), given.get("load_in_8bit", False)
        if bool(four) == bool(eight) and four is not None:
            raise ConfigError(f"quantization method 'bitsandbytes': load_in_4bit={four} with load_in_8bit={eight}")
        for key in _HF_WITHOUT_EFFECT:
            given.pop(key, None)
        if given.get("modules_to_not_convert", ()) is None:
            del given["modules_to_not_convert"]
        return {**_HF_DEFAULTS, **given}
