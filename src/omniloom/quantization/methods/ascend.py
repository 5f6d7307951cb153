"""msModelSlim checkpoints: a description file beside the weights tags every tensor."""

from __future__ import annotations

from omniloom.quantization.methods.base import QuantizationConfig, method_config


@method_config
class AscendConfig(QuantizationConfig):
    """Weights with a ``quant_model_description*.json`` beside them, which says how each layer is stored."""

    method = "ascend"
    names = ("modelslim", "msmodelslim")

    is_checkpoint_serialized: bool = False
