"""AutoRound, also known as INC: integer weights in groups, or microscaling formats."""

from __future__ import annotations

from typing import Any

from omniloom.errors import ConfigError
from omniloom.quantization.methods.base import QuantizationConfig, check_strings, method_config, one_of, rename

_NAMES = {"weight_bits": "bits", "to_quant_block_names": "block_name_to_quantize", "symmetric": "sym"}
# What AutoRound writes about how it tuned the weights; of no use to a reader.
_TUNING = [
    "amp",
    "autoround_version",
    "batch_size",
    "dataset",
    "device",
    "enable_minmax_tuning",
    "enable_norm_bias_tuning",
    "enable_quanted_input",
    "enable_torch_compile",
    "export_format",
    "gradient_accumulate_steps",
    "iters",
    "low_gpu_mem_usage",
    "lr",
    "minmax_lr",
    "nsamples",
    "quant_lm_head",
    "scale_dtype",
    "seed",
    "seqlen",
    "super_bits",
    "super_group_size",
]


@method_config
class IncConfig(QuantizationConfig):
    """AutoRound's ``quantization_config``: integers of ``bits`` in groups of ``group_size``, or ``data_type`` "mx_fp".

    ``group_size`` -1 is a whole row. ``block_name_to_quantize``: only layers below these names are quantized.
    ``extra_config``: what differs for single layers, by name or regular expression.
    """

    method = "inc"
    names = ("auto-round",)
    layout_keys = ("bits", "group_size", "sym", "data_type", "packing_format")

    is_checkpoint_serialized: bool = False
    bits: int = 4
    group_size: int = 128
    sym: bool = True
    data_type: str = "int"
    packing_format: str = "auto_round:auto_gptq"
    block_name_to_quantize: tuple[str, ...] | None = None
    extra_config: dict[str, Any] | None = None
    act_bits: int = 16
    act_group_size: int | None = None
    act_data_type: str | None = None
    act_dynamic: bool | None = None
    act_sym: bool | None = None
    backend: str = "auto"
    modules_to_not_convert: tuple[str, ...] = ()

    def check(self) -> None:
        one_of(self, "bits", (2, 3, 4, 5, 6, 7, 8))
        if self.group_size < 1 and self.group_size != -1:
            raise ConfigError(f"option quantization.inc.group_size={self.group_size}: positive, or -1 for a whole row")
        check_strings(self, "block_name_to_quantize")

    @classmethod
    def translate(cls, given: dict[str, Any]) -> dict[str, Any]:
        given = {key: value for key, value in rename(given, _NAMES, cls.method).items() if key not in _TUNING}
        blocks = given.get("block_name_to_quantize")
        if isinstance(blocks, str):
            blocks = [name.strip() for name in blocks.split(",") if name.strip()]
        elif blocks and isinstance(blocks, (list, tuple)) and all(isinstance(part, (list, tuple)) for part in blocks):
            blocks = [name for part in blocks for name in part]  # older files list every block of each group
        if "block_name_to_quantize" in given:
            given["block_name_to_quantize"] = blocks or None
        return given
