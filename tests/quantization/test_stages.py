"""Configs of models with several stages."""

from __future__ import annotations

from typing import Any

import pytest

from omniloom.config import UNSET
from omniloom.errors import ConfigError
from omniloom.quantization import config_from_disk
from omniloom.quantization.stages import pick_user_spec, stage_disk_config, stage_user_spec, without_stage

AUTO_ROUND: dict[str, Any] = {
    "quant_method": "auto-round",
    "bits": 4,
    "group_size": 128,
    "block_name_to_quantize": "thinker.model.layers",
    "extra_config": {"thinker.model.layers.0.mlp.gate": {"bits": 16}, r"^thinker\.model\.layers\..*gate": {"bits": 16}},
}


def test_one_of_the_names() -> None:
    for key in ("quantization_config", "quantization", "diffusion_quantization_config"):
        assert pick_user_spec({key: "fp8", "dtype": "auto"}) == "fp8"
    assert pick_user_spec({"quantization": None}) is None  # given: it switches quantization off
    assert pick_user_spec({"dtype": "auto"}) is UNSET
    with pytest.raises(ConfigError, match="^stage 1: quantization_config and quantization are two names of one option"):
        pick_user_spec({"quantization": "fp8", "quantization_config": "fp8"}, "stage 1")


def test_priorities_of_a_stage() -> None:
    deployment = {"quantization": "int8"}
    assert stage_user_spec({}, deployment) == "int8"
    assert stage_user_spec({"quantization": "fp8"}, deployment) == "fp8"
    engine = {"engine_args": {"quantization_config": {"method": "mxfp8"}}, "quantization": "fp8"}
    assert stage_user_spec(engine, deployment) == {"method": "mxfp8"}
    assert stage_user_spec({"quantization": None}, deployment) is None
    assert stage_user_spec({"engine_args": None}, {}) is UNSET
    with pytest.raises(ConfigError, match="^stage 2, engine_args: "):
        stage_user_spec({"engine_args": {"quantization": 1, "quantization_config": 2}}, {}, "stage 2")


def test_blocks_of_another_stage() -> None:
    config = {"quantization_config": AUTO_ROUND, "thinker_config": {}, "talker_config": {}}
    assert stage_disk_config(config, "talker_config") is None
    assert stage_disk_config(config, "code2wav_config") is None
    thinker: Any = stage_disk_config(config, "thinker_config")
    assert thinker["block_name_to_quantize"] == ["model.layers"]
    assert set(thinker["extra_config"]) == {"model.layers.0.mlp.gate", r"^model\.layers\..*gate"}
    assert config_from_disk(thinker).block_name_to_quantize == ("model.layers",)  # type: ignore[union-attr]
    assert AUTO_ROUND["block_name_to_quantize"] == "thinker.model.layers"  # not changed
    assert stage_disk_config(config, None) == AUTO_ROUND


def test_stage_names_match_at_dots() -> None:
    disk = {**AUTO_ROUND, "block_name_to_quantize": ["thinker2.model.layers", "talker.model"]}
    assert stage_disk_config({"quantization_config": disk}, "thinker_config") is None
    found: Any = stage_disk_config({"quantization_config": disk}, "talker_config")
    assert found["block_name_to_quantize"] == ["thinker2.model.layers", "model"]


def test_a_stages_own_config_wins() -> None:
    own = {"quant_method": "gptq", "bits": 8}
    config = {"quantization_config": AUTO_ROUND, "talker_config": {"text_config": {"quantization_config": own}}}
    assert stage_disk_config(config, "talker_config") == own
    config["talker_config"] = {"quantization_config": own}
    assert stage_disk_config(config, "talker_config") == own


def test_a_top_level_config_without_blocks_is_for_all() -> None:
    top = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["thinker.lm_head", "talker*"]}}
    found: Any = stage_disk_config({"quantization_config": top}, "thinker_config")
    assert found == {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head", "talker*"]}}
    assert stage_disk_config({"quantization_config": "fp8"}, "thinker_config") == "fp8"
    assert stage_disk_config({}, "thinker_config") is None


def test_overrides_clear_it() -> None:
    config = {"quantization_config": {"quant_method": "fp8"}}
    assert stage_disk_config(config, "talker_config", overrides={"quantization_config": None}) is None
    assert stage_disk_config(config, None, overrides={"quantization_config": None}) is None
    other = {"quantization_config": {"quant_method": "int8"}}
    assert stage_disk_config(config, "talker_config", overrides=other) == other["quantization_config"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("thinker.a.b", "a.b"),
        ("re:thinker.a", "re:a"),
        (r"^thinker\.a", "^a"),
        (r"re:^thinker\.a", "re:^a"),
        ("thinker_2.a", "thinker_2.a"),
        ("a.thinker.b", "a.thinker.b"),
        ("thinker", "thinker"),
    ],
)
def test_taking_the_stage_off(name: str, expected: str) -> None:
    for key in ("ignore", "exclude_modules", "ignored_layers", "modules_to_not_convert"):
        assert without_stage({key: [name]}, "thinker") == {key: [expected]}
    assert without_stage({"quantized_layers": {name: 1}}, "thinker") == {"quantized_layers": {expected: 1}}
