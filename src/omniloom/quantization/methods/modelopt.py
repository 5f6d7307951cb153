"""NVIDIA ModelOpt checkpoints: one algorithm for all layers, or one per layer.

The producer writes a flat form (``quant_algo``, ``ignore``, ``config_groups``) into a component's ``config.json`` and,
for transformers, a nested one (``quantization: {quant_algo, exclude_modules}``) into ``hf_quant_config.json``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from omniloom.errors import ConfigError, suggest
from omniloom.quantization.methods.base import (
    QuantizationConfig,
    canonical,
    check_strings,
    method_config,
    one_of,
    rename,
)

_METHOD_OF = {
    "FP8": "modelopt",
    "FP8_PER_CHANNEL_PER_TOKEN": "modelopt",
    "NVFP4": "modelopt_fp4",
    "MXFP8": "modelopt_mxfp8",
    "MIXED_PRECISION": "modelopt_mixed",
}


def is_modelopt(raw: Mapping[str, Any]) -> bool:
    """Whether a dict is ModelOpt's, flat or nested."""
    method = raw.get("method") or raw.get("quant_method")
    producer = raw.get("producer")
    if isinstance(producer, Mapping) and producer.get("name") == "modelopt":
        return True
    if isinstance(method, str):
        return canonical(method).startswith("modelopt")
    return "quant_algo" in raw or isinstance(raw.get("quantization"), Mapping)


def normalise(raw: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return method and keys of a ModelOpt dict, flat. Raises ``ConfigError`` for an unsupported algorithm."""
    nested = raw.get("quantization")
    flat = {key: value for key, value in raw.items() if key not in ("quantization", "method", "quant_method")}
    if isinstance(nested, Mapping):
        flat |= nested
    algorithm = flat.get("quant_algo")
    name = canonical(str(raw.get("method") or raw.get("quant_method") or "modelopt"))
    if algorithm:
        flat["quant_algo"] = algorithm = str(algorithm).upper()
        if algorithm not in _METHOD_OF:
            supported = ", ".join(_METHOD_OF)
            hint = suggest(algorithm, _METHOD_OF)
            raise ConfigError(f"unsupported ModelOpt quant_algo {algorithm!r}{hint} (supported: {supported})")
        name = _METHOD_OF[algorithm]
    return name, flat


@dataclasses.dataclass(frozen=True, eq=False)
class _ModelOpt(QuantizationConfig):
    """Keys that all of ModelOpt's algorithms share. ``exclude_modules``: wildcards on the names in the file."""

    styles = {"ignored_layers": "vllm", "exclude_modules": "modelopt"}
    layout_keys: ClassVar[tuple[str, ...]] = ("quant_algo",)
    algorithms: ClassVar[tuple[str, ...]] = ()

    is_checkpoint_serialized: bool = False
    quant_algo: str | None = None
    exclude_modules: tuple[str, ...] = ()
    kv_cache_quant_algo: str | None = None
    config_groups: dict[str, Any] | None = None

    def check(self) -> None:
        if self.quant_algo is not None:
            object.__setattr__(self, "quant_algo", self.quant_algo.upper())
        one_of(self, "quant_algo", (None, *self.algorithms))
        check_strings(self, "exclude_modules")

    @classmethod
    def translate(cls, given: dict[str, Any]) -> dict[str, Any]:
        given = {key: value for key, value in given.items() if key not in ("producer", "kv_cache_scheme")}
        return rename(given, {"ignore": "exclude_modules"}, cls.method)


@method_config
class ModelOptFp8Config(_ModelOpt):
    """FP8 weights with one scale (and static activations), or with one per channel."""

    method = "modelopt"
    names = ("modelopt_fp8",)
    algorithms = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")


@method_config
class ModelOptFp4Config(_ModelOpt):
    """NVFP4: E2M1 numbers in blocks of 16 with an FP8 scale under one scale of the tensor."""

    method = "modelopt_fp4"
    names = ("fp4", "nvfp4")
    algorithms = ("NVFP4",)
    layout_keys = ("quant_algo", "group_size")

    group_size: int = 16

    def check(self) -> None:
        super().check()
        one_of(self, "group_size", (16,))


@method_config
class ModelOptMxfp8Config(_ModelOpt):
    """MXFP8 as ModelOpt writes it."""

    method = "modelopt_mxfp8"
    algorithms = ("MXFP8",)


@method_config
class ModelOptMixedConfig(_ModelOpt):
    """An algorithm per layer. ``quantized_layers``: layer -> ``{quant_algo, group_size}``; others are not quantized."""

    method = "modelopt_mixed"
    algorithms = ("MIXED_PRECISION",)

    group_size: int = 16
    quantized_layers: dict[str, Any] | None = None

    def check(self) -> None:
        super().check()
        if self.serialized and not self.quantized_layers:
            raise ConfigError("quantization method 'modelopt_mixed': quantized_layers must say what each layer has")
