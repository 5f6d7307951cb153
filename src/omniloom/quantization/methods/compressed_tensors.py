"""Checkpoints of the compressed-tensors library: groups of layers, each with a scheme of its own."""

from __future__ import annotations

from typing import Any

from omniloom.quantization.methods.base import QuantizationConfig, check_strings, method_config, one_of

_FORMATS = (
    "dense",
    "int-quantized",
    "float-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "naive-quantized",
    "mixed-precision",
)


@method_config
class CompressedTensorsConfig(QuantizationConfig):
    """compressed-tensors' ``quantization_config``.

    ``config_groups``: which layers (``targets``) have which weights and activations. ``ignore``: full paths, ``re:``
    and a regular expression, or class names.
    """

    method = "compressed-tensors"
    styles = {"ignored_layers": "vllm", "ignore": "compressed-tensors"}
    layout_keys = ("format",)

    is_checkpoint_serialized: bool = False
    format: str | None = None
    config_groups: dict[str, Any] | None = None
    ignore: tuple[str, ...] = ()
    kv_cache_scheme: dict[str, Any] | None = None
    quantization_status: str | None = None

    def check(self) -> None:
        one_of(self, "format", (None, *_FORMATS))
        check_strings(self, "ignore")
