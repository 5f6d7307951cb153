"""Which component of a pipeline gets which quantization config.

A plain config is for the **denoisers** (``transformer``, ``transformer_2``, …) and nothing else: that is where the
memory is, and what people expect of a method's name. ``{"default": "fp8"}`` reaches text encoders as well;
``{"text_encoder": "int8"}`` names one. Parts that decode latents or look at pictures (VAEs, vocoders, image encoders)
are quantized only if they are named.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from omniloom.errors import ConfigError, shorten, suggest
from omniloom.quantization.methods import QuantizationConfig

DEFAULT = "default"
KNOWN_COMPONENTS = (
    "transformer",
    "unet",
    "text_encoder",
    "vae",
    "audio_vae",
    "image_encoder",
    "vision_language_encoder",
    "mllm",
    "llm",
    "ar",
    "dit",
    "thinker",
    "talker",
    "code2wav",
    "token2wav",
    "code_predictor",
    "vocoder",
    "prior",
    "decoder",
    "connectors",
    "latent_upsampler",
    "controlnet",
)
_ONLY_BY_NAME = re.compile(
    r"(.*_)?(vae|vqvae|vocoder|image_encoder|vision_encoder|feature_extractor|safety_checker|code2wav|token2wav"
    r"|speech_tokenizer|latent_upsampler|controlnet)(_\d+)?"
)


@dataclasses.dataclass(frozen=True)
class ComponentQuantizationConfig:
    """A config per component, ``None`` where one stays as it is; ``default`` for components that are not listed."""

    components: Mapping[str, QuantizationConfig | None]
    default: QuantizationConfig | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "components", dict(self.components))

    def resolve(self, prefix: str) -> QuantizationConfig | None:
        """Return the config of the longest listed component that ``prefix`` is or is below, else the default."""
        listed = covering(self.components, prefix)
        return self.default if listed is None else self.components[listed]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types, which ``build_quant_config`` reads."""
        entries = {name: config.to_dict() if config else None for name, config in self.components.items()}
        return {**entries, DEFAULT: self.default.to_dict() if self.default else None}

    def __hash__(self) -> int:
        return hash(json.dumps(self.to_dict(), sort_keys=True))


AnyConfig = QuantizationConfig | ComponentQuantizationConfig


def covering(names: Iterable[str], prefix: str) -> str | None:
    """Return the longest of ``names`` that ``prefix`` is, or is below: ``transformer_2`` is not ``transformer``."""
    found = [name for name in names if prefix == name or prefix.startswith(name + ".")]
    return max(found, key=len, default=None)


def is_known_component(name: str) -> bool:
    """Whether a component map may be recognised by this key."""
    return name == DEFAULT or re.sub(r"_\d+$", "", name) in KNOWN_COMPONENTS


def component_config(config: AnyConfig | None, component: str, *, denoiser: bool = True) -> QuantizationConfig | None:
    """Return what a component gets by the rules above; ``None`` if it stays as it is.

    ``denoiser``: whether the denoising loop calls it. ``component`` may be a path below a component.
    """
    if config is None or isinstance(config, QuantizationConfig):
        return config if denoiser else None
    if covering(config.components, component) is None and not denoiser and _ONLY_BY_NAME.fullmatch(component):
        return None
    return config.resolve(component)


def is_disabled(config: AnyConfig | None, component: str) -> bool:
    """Whether the component is listed with ``None``: it shall be dense."""
    if not isinstance(config, ComponentQuantizationConfig):
        return False
    listed = covering(config.components, component)
    return listed is not None and config.components[listed] is None


def check_components(config: AnyConfig | None, names: Iterable[str]) -> None:
    """Raise ``ConfigError`` if the config lists a component that the model does not have. Reads no weights."""
    if not isinstance(config, ComponentQuantizationConfig):
        return
    names = sorted(names)
    for name in config.components:
        if name in names:
            continue
        whole = covering(names, name)
        if whole is not None:
            raise ConfigError(
                f"quantization of {name!r}: parts of a component cannot have a method of their own; "
                f"give {whole!r} one, with ignored_layers for what stays as it is"
            )
        raise ConfigError(
            f"quantization names the component {name!r}{suggest(name, names)} (this model has {shorten(names, 20)})"
        )
