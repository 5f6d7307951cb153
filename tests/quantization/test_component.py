"""Which component gets which config."""

from __future__ import annotations

import json

import pytest

from omniloom.errors import ConfigError
from omniloom.quantization import (
    ComponentQuantizationConfig,
    build_quant_config,
    check_components,
    component_config,
)
from omniloom.quantization.component import covering, is_disabled
from omniloom.quantization.methods.fp8 import Fp8Config
from omniloom.quantization.methods.int8 import Int8Config

FP8, INT8 = Fp8Config(), Int8Config()
WAN = ["text_encoder", "transformer", "transformer_2", "vae"]


def test_names_match_at_dots() -> None:
    names = ["transformer", "transformer.blocks", "vae"]
    assert covering(names, "transformer.norm") == "transformer"
    assert covering(names, "transformer.blocks.3") == "transformer.blocks"
    for other in ("transformer_2", "transformer_2.blocks", "vae_x", "my.transformer", ""):
        assert covering(names, other) is None


def test_longest_listed_prefix_wins() -> None:
    config = ComponentQuantizationConfig({"transformer": FP8, "transformer.blocks.0": None}, INT8)
    assert config.resolve("transformer") is FP8
    assert config.resolve("transformer.blocks.1") is FP8
    assert config.resolve("transformer.blocks.0.ff") is None
    assert config.resolve("transformer.blocks.01") is FP8
    assert config.resolve("transformer_2") is INT8
    assert ComponentQuantizationConfig({"transformer": FP8}).resolve("transformer_2") is None


def test_a_plain_config_is_for_the_denoisers() -> None:
    assert component_config(FP8, "transformer") is FP8
    assert component_config(FP8, "transformer_2.blocks.0") is FP8
    assert component_config(FP8, "text_encoder", denoiser=False) is None
    assert component_config(None, "transformer") is None


def test_a_default_reaches_encoders_but_not_decoders() -> None:
    config = build_quant_config({"default": "fp8", "transformer_2": "int8", "text_encoder_2": None})
    got = {name: component_config(config, name, denoiser=name.startswith("transformer")) for name in WAN}
    assert got == {"transformer": FP8, "transformer_2": INT8, "text_encoder": FP8, "vae": None}
    assert component_config(config, "text_encoder_2", denoiser=False) is None
    for name in ("audio_vae", "vocoder", "image_encoder", "latent_upsampler", "code2wav", "controlnet"):
        assert component_config(config, name, denoiser=False) is None
        assert component_config(build_quant_config({name: "fp8"}), name, denoiser=False) == FP8


def test_disabled() -> None:
    config = build_quant_config({"transformer": "none", "default": "fp8"})
    assert is_disabled(config, "transformer") and is_disabled(config, "transformer.blocks")
    assert not is_disabled(config, "transformer_2")
    assert not is_disabled(FP8, "transformer") and not is_disabled(None, "transformer")


def test_round_trip_and_hash() -> None:
    config = build_quant_config({"transformer": {"method": "fp8", "ignored_layers": ["a"]}, "vae": None})
    plain = json.loads(json.dumps(config.to_dict()))  # type: ignore[union-attr]
    assert plain == {"transformer": plain["transformer"], "vae": None, "default": None}
    assert build_quant_config(plain) == config and hash(build_quant_config(plain)) == hash(config)
    assert config != build_quant_config({"transformer": "fp8", "vae": None})
    empty = ComponentQuantizationConfig({})
    assert build_quant_config(empty.to_dict()) == empty
    only = build_quant_config({"default": "mxfp8"})
    assert build_quant_config(only.to_dict()) == only  # type: ignore[union-attr]


def test_components_that_do_not_exist() -> None:
    check_components(None, WAN)
    check_components(FP8, WAN)
    check_components(build_quant_config({"transformer_2": "fp8", "default": "int8"}), WAN)
    with pytest.raises(ConfigError) as error:
        check_components(build_quant_config({"transformer_3": "fp8"}), WAN)
    assert str(error.value) == (
        "quantization names the component 'transformer_3'; did you mean 'transformer_2'? "
        "(this model has text_encoder, transformer, transformer_2, vae)"
    )
    with pytest.raises(ConfigError, match=r"quantization of 'transformer.blocks': parts of a component cannot have"):
        check_components(build_quant_config({"transformer.blocks": {"method": "fp8"}}), WAN)
