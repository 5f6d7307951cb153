"""GGUF files: every tensor has a type of its own, which the file says."""

from __future__ import annotations

from omniloom.quantization.methods.base import QuantizationConfig, check_strings, method_config


@method_config
class GgufConfig(QuantizationConfig):
    """Weights from a GGUF file. ``gguf_model``: a local file, ``repo/file.gguf`` or ``repo:Q4_K_M``.

    ``unquantized_modules``: layers whose weights are expanded when they are loaded.
    """

    method = "gguf"
    styles = {"ignored_layers": "vllm", "unquantized_modules": "vllm"}
    layout_keys = ("gguf_model",)

    is_checkpoint_serialized: bool = False
    gguf_model: str | None = None
    unquantized_modules: tuple[str, ...] = ()

    def check(self) -> None:
        check_strings(self, "unquantized_modules")
