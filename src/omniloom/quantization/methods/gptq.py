"""GPTQ checkpoints: integer weights in groups, packed along the input."""

from __future__ import annotations

from typing import Any

from omniloom.errors import ConfigError
from omniloom.quantization.methods.base import QuantizationConfig, method_config, one_of, rename

_UNUSED = ("tokenizer", "dataset", "true_sequential", "damp_percent", "model_name_or_path", "meta")


@method_config
class GptqConfig(QuantizationConfig):
    """GPTQ's ``quantization_config``. ``group_size`` -1 is a whole row; ``desc_act``: groups follow ``g_idx``."""

    method = "gptq"
    layout_keys = ("bits", "group_size", "sym", "desc_act", "checkpoint_format")

    is_checkpoint_serialized: bool = False
    bits: int = 4
    group_size: int = 128
    sym: bool = True
    desc_act: bool = False
    checkpoint_format: str = "gptq"
    dynamic: dict[str, Any] | None = None
    modules_in_block_to_quantize: tuple[Any, ...] | None = None
    lm_head: bool = False
    modules_to_not_convert: tuple[str, ...] = ()

    def check(self) -> None:
        one_of(self, "bits", (2, 3, 4, 8))
        one_of(self, "checkpoint_format", ("gptq", "gptq_v2"))
        if self.group_size < 1 and self.group_size != -1:
            raise ConfigError(f"option quantization.gptq.group_size={self.group_size}: positive, or -1 for a whole row")

    @classmethod
    def translate(cls, given: dict[str, Any]) -> dict[str, Any]:
        given = {key: value for key, value in given.items() if key not in _UNUSED}
        return rename(given, {"weight_bits": "bits"}, cls.method)
