"""From every spelling of a spec to the config that it stands for."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from omniloom.errors import ConfigError
from omniloom.quantization import (
    ComponentQuantizationConfig,
    build_quant_config,
    build_quantization_config,
    config_from_disk,
    factory,
    register_quantization_override,
)
from omniloom.quantization.methods import QuantizationConfig, online_methods
from omniloom.quantization.methods.base import method_config
from omniloom.quantization.methods.bitsandbytes import BitsAndBytesConfig
from omniloom.quantization.methods.fp8 import Fp8Config
from omniloom.quantization.methods.gguf import GgufConfig
from omniloom.quantization.methods.inc import IncConfig
from omniloom.quantization.methods.int8 import Int8Config

METHODS = [
    "ascend",
    "awq",
    "bitsandbytes",
    "compressed-tensors",
    "fp8",
    "gguf",
    "gptq",
    "inc",
    "int8",
    "modelopt",
    "modelopt_fp4",
    "modelopt_mixed",
    "modelopt_mxfp8",
    "mxfp4",
    "mxfp4_dualscale",
    "mxfp8",
    "svdquant",
    "torchao",
]


def test_the_examples_of_the_documentation() -> None:
    assert build_quant_config("fp8") == Fp8Config()
    assert build_quant_config({"method": "fp8", "activation_scheme": "static"}) == Fp8Config(activation_scheme="static")
    assert build_quant_config("bitsandbytes") == BitsAndBytesConfig()
    assert build_quant_config("auto-round", bits=4, group_size=128) == IncConfig(bits=4, group_size=128)
    assert build_quant_config({"method": "gguf", "gguf_model": "model.gguf"}) == GgufConfig(gguf_model="model.gguf")
    parts = build_quant_config({"transformer": {"method": "fp8"}, "vae": None})
    assert parts == ComponentQuantizationConfig({"transformer": Fp8Config(), "vae": None})
    assert build_quant_config(None) is None
    assert build_quantization_config is build_quant_config


@pytest.mark.parametrize("spec", ["none", "None", "NONE", " none ", None])
def test_nothing(spec: str | None) -> None:
    assert build_quant_config(spec) is None


def test_a_config_is_returned_as_it_is() -> None:
    for config in (Fp8Config(), ComponentQuantizationConfig({"vae": None})):
        assert build_quant_config(config) is config


@pytest.mark.parametrize("spec", ["FP8", "Fp8", " fp8"])
def test_letter_case_does_not_matter(spec: str) -> None:
    assert build_quant_config(spec) == Fp8Config()


@pytest.mark.parametrize(
    ("alias", "method"),
    [
        *(("auto-round", "inc"), ("auto_round", "inc"), ("AutoRound".replace("R", "-r"), "inc"), ("inc", "inc")),
        *(("fp4", "modelopt_fp4"), ("nvfp4", "modelopt_fp4"), ("modelopt-fp4", "modelopt_fp4")),
        *(("torchao_float8_weight_only", "torchao"), ("bnb", "bitsandbytes"), ("bitsandbytes_4bit", "bitsandbytes")),
        *(
            ("compressed_tensors", "compressed-tensors"),
            ("modelslim", "ascend"),
            ("mxfp4-dualscale", "mxfp4_dualscale"),
        ),
    ],
)
def test_aliases(alias: str, method: str) -> None:
    assert build_quant_config(alias).get_name() == method  # type: ignore[union-attr]
    assert build_quant_config({"method": alias}) == build_quant_config({"quant_method": alias})


def test_what_presets_stand_for() -> None:
    assert build_quant_config("bitsandbytes_8bit") == BitsAndBytesConfig(load_in_8bit=True)
    assert build_quant_config("torchao_float8_weight_only").quant_type == "float8_weight_only"  # type: ignore[union-attr]


def test_keywords_win_over_a_dict() -> None:
    config = build_quant_config({"method": "inc", "bits": 4, "sym": False}, bits=8)
    assert config == IncConfig(bits=8, sym=False)
    assert build_quant_config("inc", weight_bits=8) == IncConfig(bits=8)
    modelopt = build_quant_config({"quant_method": "modelopt", "quant_algo": "FP8"}, ignored_layers=["a"])
    assert modelopt.ignored_layers == ("a",)  # type: ignore[union-attr]


@pytest.mark.parametrize("spec", [None, "none", Fp8Config(), {"transformer": None}])
def test_keywords_without_a_method(spec: Any) -> None:
    with pytest.raises(ConfigError, match="keys bits need a method's name"):
        build_quant_config(spec, bits=4)


def test_json_text() -> None:
    spec = {"transformer": {"method": "int8", "ignored_layers": ["proj"]}, "vae": None}
    assert build_quant_config(json.dumps(spec)) == build_quant_config(spec)
    with pytest.raises(ConfigError, match="is not valid JSON"):
        build_quant_config('{"method": fp8}')


def test_unknown_methods() -> None:
    with pytest.raises(ConfigError) as error:
        build_quant_config("int9")
    assert str(error.value) == (
        "unknown quantization method 'int9'; did you mean 'int8'? (supported: " + ", ".join(METHODS) + ")"
    )
    for spec in ({"method": "fp9"}, {"transformer": "fp9"}, {"transformer": {"method": "fp9"}, "vae": None}):
        with pytest.raises(ConfigError, match="unknown quantization method 'fp9'.*did you mean 'fp[48]'"):
            build_quant_config(spec)


def test_unknown_keys() -> None:
    with pytest.raises(ConfigError) as error:
        build_quant_config({"method": "int8", "activation_schema": "dynamic"})
    assert str(error.value) == (
        "unknown key 'activation_schema' in quantization method 'int8'; did you mean 'activation_scheme'? (allowed: "
        "activation_scheme, all_layers, ignored_layers, is_checkpoint_int8_serialized, modules_to_not_convert)"
    )
    with pytest.raises(ConfigError, match="quantization of 'transformer': unknown key 'bits'"):
        build_quant_config({"transformer": {"method": "int8", "bits": 4}})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({}, "must have a 'method' or 'quant_method' key or be a per-component config; got the keys (none)"),
        ({"methode": "fp8"}, "must have a 'method' or 'quant_method' key"),
        ({"activation_scheme": "dynamic"}, "must have a 'method' or 'quant_method' key"),
        ({"transformr": "fp8"}, "got the keys transformr; did you mean 'transformer'?"),
        ({"method": 8}, "must have a 'method' or 'quant_method' key"),
        ({"method": "fp8", "quant_method": "int8"}, "method='fp8' and another quant_method='int8'"),
        ({"transformer": {"transformer": None}}, "must have a 'method' or 'quant_method' key"),
        ({"transformer": {"vae": None}, "vae": None}, "quantization of 'transformer': give a method, not a map"),
        (8, "cannot be of type int"),
        (["fp8"], "cannot be of type list"),
        ({"method": "fp8", "ignored_layers": "img_mlp"}, "quantization.fp8.ignored_layers='img_mlp': must be of type"),
        ({"method": "fp8", "ignored_layers": [1]}, "ignored_layers=[1]: must be a list of layer names"),
        ({"method": "fp8", "all_layers": 1}, "quantization.fp8.all_layers=1: must be of type bool"),
    ],
)
def test_bad_specs(spec: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        build_quant_config(spec)
    assert "\n" not in str(error.value)


def test_component_maps() -> None:
    both = {"transformer": Fp8Config(), "text_encoder": None}
    same: list[Any] = [
        {"transformer": "fp8", "text_encoder": "none"},
        {"transformer": "fp8", "text_encoder": None},
        {"transformer": {"method": "fp8"}, "text_encoder": "None"},
        {"transformer": {"quant_method": "fp8"}, "text_encoder": {"method": "none"}},
        {"transformer": Fp8Config(), "text_encoder": None},
    ]
    for spec in same[:3] + same[4:]:
        assert build_quant_config(spec) == ComponentQuantizationConfig(both), spec
    default = build_quant_config({"transformer_2": "int8", "default": "fp8"})
    assert default == ComponentQuantizationConfig({"transformer_2": Int8Config()}, Fp8Config())
    assert build_quant_config({"default": "int8"}) == ComponentQuantizationConfig({}, Int8Config())
    unknown_name = build_quant_config({"my_part": {"method": "fp8"}})  # the pipeline will say whether it has it
    assert unknown_name == ComponentQuantizationConfig({"my_part": Fp8Config()})


def test_modelopt_shapes_inside_a_component_map() -> None:
    config = build_quant_config({"transformer": {"quant_algo": "NVFP4", "producer": {"name": "modelopt"}}})
    assert config.components["transformer"].method == "modelopt_fp4"  # type: ignore[union-attr]


@pytest.fixture
def overrides(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    monkeypatch.setattr(factory, "_OVERRIDES", {})
    yield factory._OVERRIDES


def test_overrides(overrides: dict[str, Any]) -> None:
    register_quantization_override("My-Method", lambda **keys: Int8Config(**keys))
    register_quantization_override("fp8", lambda **keys: Fp8Config(weight_granularity="tensor", **keys))
    assert build_quant_config("my_method", all_layers=True) == Int8Config(all_layers=True)
    assert build_quant_config({"method": "my-method"}) == Int8Config()
    assert build_quant_config("fp8").weight_granularity == "tensor"  # type: ignore[union-attr]
    assert config_from_disk({"quant_method": "my_method", "all_layers": True}) == Int8Config(all_layers=True)
    with pytest.raises(ConfigError, match="unknown quantization method 'other'.*my_method"):
        build_quant_config("other")
    with pytest.raises(TypeError, match="builder must be callable"):
        register_quantization_override("x", None)  # type: ignore[arg-type]
    register_quantization_override("bad", lambda **keys: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match="'bad' returned no QuantizationConfig"):
        build_quant_config("bad")


def test_a_wrong_key_of_an_override_is_an_error_of_ours(overrides: dict[str, Any]) -> None:
    register_quantization_override("mine", lambda *, level=1: Int8Config())
    with pytest.raises(
        ConfigError, match="quantization method 'mine': its builder got an unexpected keyword argument 'bits'"
    ):
        build_quant_config("mine", bits=3)


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="'fp8' is registered twice"):

        @method_config
        class Again(QuantizationConfig):
            method = "fp8"


def test_disk_configs() -> None:
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "modules_to_not_convert": ["head"]}
    config = config_from_disk(fp8)
    assert config == Fp8Config(
        is_checkpoint_fp8_serialized=True, weight_granularity="tensor", modules_to_not_convert=("head",)
    )
    assert config.serialized
    for method in ("int8", "mxfp8", "bitsandbytes"):
        assert config_from_disk({"quant_method": method, "modules_to_not_convert": ["x"], "unknown": 1}).serialized  # type: ignore[union-attr]
    assert not config_from_disk({"quant_method": "int8", "is_checkpoint_int8_serialized": False}).serialized  # type: ignore[union-attr]
    assert not config_from_disk({"quant_method": "int8"}, stored_dtypes=["BF16", "F32"]).serialized  # type: ignore[union-attr]
    assert config_from_disk({"quant_method": "int8"}, stored_dtypes=["BF16", "I8"]).serialized  # type: ignore[union-attr]
    assert config_from_disk("fp8") == Fp8Config()
    assert config_from_disk("none") is None
    assert config_from_disk({}) is None and config_from_disk({"bits": 4}) is None
    old = config_from_disk({"load_in_4bit": True})
    assert old == BitsAndBytesConfig(
        is_checkpoint_bitsandbytes_serialized=True, quant_type="fp4", compress_statistics=False
    )


@pytest.mark.parametrize("raw", [{"quant_method": "fp9"}, {"quant_method": "fp8", "activation_scheme": "odd"}])
def test_errors_of_disk_configs_name_the_file(raw: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^a/config.json, quantization_config: .*(supported|must be one of)"):
        config_from_disk(raw, where="a/config.json")


def test_online_methods() -> None:
    assert online_methods() == ["bitsandbytes", "fp8", "int8", "mxfp4", "mxfp4_dualscale", "mxfp8"]


def test_configs_need_no_torch() -> None:
    code = (
        "import sys; from omniloom.quantization import build_quant_config as b\n"
        "b({'transformer': 'fp8', 'default': 'mxfp4'}).to_dict(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
