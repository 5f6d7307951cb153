"""How one layer is stored and computed: the value that methods produce and that the quantized Linear carries."""

from __future__ import annotations

import dataclasses

from omniloom.quantization.codecs.base import Codec


@dataclasses.dataclass(frozen=True)
class Activation:
    """How activations are quantized before the multiply.

    ``codec``: the format, its rows are tokens; ``None`` leaves them as they are (weight-only). ``static``: with the
    layer's stored ``input_scale`` instead of a scale computed per call. ``native_only``: where the device has no matmul
    for the pair of formats, the layer is computed weight-only; otherwise the rounding is emulated exactly.
    """

    codec: Codec | None = None
    static: bool = False
    native_only: bool = False


WEIGHT_ONLY = Activation()


@dataclasses.dataclass(frozen=True)
class LayerScheme:
    """What a method does with one layer.

    ``fallback``: the activation of the denoising steps in ``fallback_steps`` (zero-based; MXFP4's W4A8 steps).
    """

    codec: Codec
    activation: Activation = WEIGHT_ONLY
    fallback: Activation | None = None
    fallback_steps: frozenset[int] = frozenset()
