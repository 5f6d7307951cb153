"""AWQ checkpoints: 4-bit weights in groups, interleaved along the output."""

from __future__ import annotations

from typing import Any

from omniloom.errors import ConfigError
from omniloom.quantization.methods.base import QuantizationConfig, method_config, one_of, rename

_NAMES = {"w_bit": "bits", "weight_bits": "bits", "q_group_size": "group_size"}


@method_config
class AwqConfig(QuantizationConfig):
    """AWQ's ``quantization_config``. ``group_size`` -1 is a whole row; ``zero_point``: groups are asymmetric."""

    method = "awq"
    layout_keys = ("bits", "group_size", "zero_point", "version")

    is_checkpoint_serialized: bool = False
    bits: int = 4
    group_size: int = 128
    zero_point: bool = True
    version: str = "gemm"
    modules_to_not_convert: tuple[str, ...] = ()

    def check(self) -> None:
        object.__setattr__(self, "version", self.version.lower())
        one_of(self, "bits", (4,))
        one_of(self, "version", ("gemm", "gemv"))
        if self.group_size < 1 and self.group_size != -1:
            raise ConfigError(f"option quantization.awq.group_size={self.group_size}: positive, or -1 for a whole row")

    @classmethod
    def translate(cls, given: dict[str, Any]) -> dict[str, Any]:
        return rename(given, _NAMES, cls.method)
