"""SVDQuant checkpoints: 4-bit weights beside a low-rank branch in 16 bits."""

from __future__ import annotations

from omniloom.errors import ConfigError
from omniloom.quantization.methods.base import QuantizationConfig, method_config, one_of


@method_config
class SvdQuantConfig(QuantizationConfig):
    """SVDQuant with a branch of ``rank``. An entry of ``modules_to_not_convert`` is any part of a layer's path."""

    method = "svdquant"
    styles = {"ignored_layers": "vllm", "modules_to_not_convert": "substring"}
    layout_keys = ("rank", "precision")

    is_checkpoint_serialized: bool = False
    rank: int = 32
    precision: str = "nvfp4"
    act_unsigned: bool = False
    activation_bits: int = 4
    modules_to_not_convert: tuple[str, ...] = ()

    def check(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"option quantization.svdquant.rank={self.rank}: must be positive")
        one_of(self, "precision", ("nvfp4", "int4"))
        one_of(self, "act_unsigned", (False,))
        one_of(self, "activation_bits", (4, 16))
