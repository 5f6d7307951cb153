"""What a user wants against what a checkpoint is."""

from __future__ import annotations

from typing import Any

import pytest

from omniloom.errors import ConfigError
from omniloom.quantization import (
    ComponentFacts,
    build_quant_config,
    config_from_disk,
    resolve_components,
    resolve_encoder_quant_config,
    resolve_quant_config_from_disk,
)
from omniloom.quantization.methods import QuantizationConfig

INT8_DISK = {"quant_method": "int8", "is_checkpoint_int8_serialized": True, "ignored_layers": ["proj_out"]}
MODELOPT_DISK = {"quant_method": "modelopt", "quant_algo": "FP8", "producer": {"name": "modelopt"}}
NVFP4_DISK = {**MODELOPT_DISK, "quant_algo": "NVFP4"}


def user(spec: Any) -> QuantizationConfig:
    config = build_quant_config(spec)
    assert isinstance(config, QuantizationConfig)
    return config


def test_1_the_checkpoint_says_nothing() -> None:
    active = user("int8")
    for disk in (None, {}, {"bits": 4}, "none"):
        assert resolve_quant_config_from_disk(active, disk) is active
        assert resolve_quant_config_from_disk(None, disk) is None


@pytest.mark.parametrize("disk", [INT8_DISK, MODELOPT_DISK, {"quant_method": "fp8", "fmt": "e4m3"}])
def test_2_the_user_says_nothing(disk: dict[str, Any]) -> None:
    found = resolve_quant_config_from_disk(None, disk)
    assert found == config_from_disk(disk) and found is not None and found.serialized


@pytest.mark.parametrize(
    ("spec", "disk", "method"),
    [
        ("fp8", INT8_DISK, "int8"),
        ("int8", MODELOPT_DISK, "modelopt"),
        ("fp8", NVFP4_DISK, "modelopt_fp4"),
        ("nvfp4", MODELOPT_DISK, "modelopt"),
        ("mxfp4", {"quant_method": "mxfp4_dualscale"}, "mxfp4_dualscale"),
        ("fp8", "int8", "int8"),
    ],
)
def test_3_other_methods_are_an_error(spec: str, disk: Any, method: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve_quant_config_from_disk(user(spec), disk, where="m/transformer/config.json", given="--quantization")
    assert str(error.value) == (
        f"m/transformer/config.json declares quant_method={method!r} but --quantization asks for "
        f"{user(spec).method!r}: give {method!r} as well, or leave --quantization out"
    )


@pytest.mark.parametrize(
    ("spec", "disk"),
    [("fp8", MODELOPT_DISK), ("nvfp4", NVFP4_DISK), ("fp4", NVFP4_DISK), ("modelopt_fp4", NVFP4_DISK)],
)
def test_3_generic_names_agree_with_modelopts(spec: str, disk: dict[str, Any]) -> None:
    assert resolve_quant_config_from_disk(user(spec), disk) == config_from_disk(disk)


def test_3_aliases_agree() -> None:
    disk = {"quant_method": "auto-round", "bits": 4, "group_size": 128}
    assert resolve_quant_config_from_disk(user("inc"), disk) == config_from_disk(disk)


def test_4_a_bare_name_keeps_the_users() -> None:
    active = user({"method": "mxfp4", "ignored_layers": ["a"], "w4a8_fallback_steps": [1]})
    assert resolve_quant_config_from_disk(active, "MXFP4") is active


def test_5_serialized_weights_decide() -> None:
    notes: list[str] = []
    active = user({"method": "int8", "ignored_layers": ["img_mlp", "proj_out"]})
    found = resolve_quant_config_from_disk(active, INT8_DISK, where="c.json", note=notes.append)
    assert found == config_from_disk(INT8_DISK)
    assert notes == ["--quantization: layers to ignore are those of c.json, not img_mlp"]


def test_5_equal_ones_keep_the_users() -> None:
    active = user({**INT8_DISK})
    assert resolve_quant_config_from_disk(active, INT8_DISK) is active
    disk = {"quant_method": "int8", "is_checkpoint_int8_serialized": False}
    everything = user({"method": "int8", "all_layers": True})
    assert resolve_quant_config_from_disk(everything, disk) is everything


def test_5_other_ignored_layers_are_the_checkpoints() -> None:
    disk = {**INT8_DISK, "is_checkpoint_int8_serialized": False}
    found = resolve_quant_config_from_disk(user("int8"), disk)
    assert found is not None and found.ignored_layers == ("proj_out",) and not found.serialized


def test_5_mx_formats_are_the_checkpoints() -> None:
    disk = {"quant_method": "auto-round", "bits": 8, "group_size": 32, "data_type": "mx_fp"}
    active = user(
        {"method": "inc", "bits": 8, "group_size": 32, "data_type": "mx_fp", "is_checkpoint_serialized": True}
    )
    found = resolve_quant_config_from_disk(active, disk)
    assert found == config_from_disk(disk) and found is not active


def test_5_another_layout_than_the_stored_one() -> None:
    disk = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    assert resolve_quant_config_from_disk(user("gptq"), disk).group_size == 64  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"^--q asks for group_size=32, but c says .* stored with group_size=64"):
        resolve_quant_config_from_disk(user({"method": "gptq", "group_size": 32}), disk, where="c", given="--q")


def test_6_how_to_run_is_the_users() -> None:
    disk = {"quant_method": "mxfp4", "is_checkpoint_mxfp4_serialized": True, "ignored_layers": ["b"]}
    active = user(
        {
            "method": "mxfp4",
            "w4a8_fallback_steps": [0],
            "w4a8_fallback_layers": ["blocks.0.x"],
            "mxfp4_scale_alg": 2,
            "ignored_layers": ["mine"],
        }
    )
    found: Any = resolve_quant_config_from_disk(active, disk)
    assert found.serialized and found.ignored_layers == ("b",)
    assert (found.w4a8_fallback_steps, found.w4a8_fallback_layers) == ((0,), ("blocks.0.x",))
    assert found.mxfp4_scale_alg == 2 and not found.require_smooth_scale
    smooth: Any = resolve_quant_config_from_disk(active, {**disk, "require_smooth_scale": True})
    assert smooth.require_smooth_scale
    strict = user({"method": "mxfp4", "require_smooth_scale": True, "is_checkpoint_mxfp4_serialized": True})
    assert resolve_quant_config_from_disk(strict, disk).require_smooth_scale  # type: ignore[union-attr]


def test_6_leading_blocks_do_not_unquantize_stored_ones() -> None:
    disk = {"quant_method": "mxfp4_dualscale", "is_checkpoint_serialized": True}
    active = user({"method": "mxfp4_dualscale", "num_bf16_fallback_layers": 9})
    found = resolve_quant_config_from_disk(active, disk)
    assert found is not None and found.keeps("blocks.0.x") is None


def test_6_the_checkpoints_list_is_complete() -> None:
    disk = {"quant_method": "mxfp4", "is_checkpoint_mxfp4_serialized": True}
    found = resolve_quant_config_from_disk(user({"method": "mxfp4", "ignored_layers": ["mine"]}), disk)
    assert found is not None and found.ignored_layers == ()


def parts(**disks: Any) -> list[ComponentFacts]:
    names = ("transformer", "transformer_2", "text_encoder", "vae")
    return [
        ComponentFacts(name, name.startswith("transformer"), disks.get(name), f"m/{name}/config.json") for name in names
    ]


def resolved(spec: Any, **disks: Any) -> dict[str, str | None]:
    found = resolve_components(build_quant_config(spec), parts(**disks))
    return {name: config.method if config else None for name, config in found.items()}


def row(*methods: str | None) -> dict[str, str | None]:
    return dict(zip(("transformer", "transformer_2", "text_encoder", "vae"), methods, strict=True))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("int8", row("int8", "int8", None, None)),
        ({"transformer": "int8"}, row("int8", None, None, None)),
        ({"transformer_2": "int8"}, row(None, "int8", None, None)),
        ({"transformer": "int8", "transformer_2": "fp8"}, row("int8", "fp8", None, None)),
        ({"transformer": "int8", "default": None}, row("int8", None, None, None)),
        ({"default": "fp8"}, row("fp8", "fp8", "fp8", None)),
        ({"default": "fp8", "transformer": None, "vae": "int8"}, row(None, "fp8", "fp8", "int8")),
        ({"default": "nvfp4"}, row("modelopt_fp4", "modelopt_fp4", None, None)),
        (None, row(None, None, None, None)),
    ],
)
def test_components_by_the_user(spec: Any, expected: dict[str, str | None]) -> None:
    assert resolved(spec) == expected


def test_components_by_their_own_checkpoints() -> None:
    assert resolved(None, transformer_2=INT8_DISK) == row(None, "int8", None, None)
    assert resolved("int8", text_encoder=MODELOPT_DISK) == row("int8", "int8", "modelopt", None)
    assert resolved({"transformer": "fp8"}, transformer_2=INT8_DISK) == row("fp8", "int8", None, None)
    assert resolved({"default": "fp8"}, text_encoder=INT8_DISK) == row("fp8", "fp8", "int8", None)


def test_components_that_contradict_their_checkpoints() -> None:
    with pytest.raises(ConfigError, match=r"^m/transformer_2/config.json declares .*--quantization asks for 'fp8'"):
        resolved("fp8", transformer_2=INT8_DISK)
    with pytest.raises(ConfigError, match=r"but --quantization \(transformer_2\) asks for 'fp8'"):
        resolved({"transformer_2": "fp8"}, transformer_2=INT8_DISK)
    with pytest.raises(ConfigError) as error:
        resolved({"transformer": None}, transformer=INT8_DISK)
    assert str(error.value) == (
        "--quantization (transformer) asks for 'transformer' without quantization, but m/transformer/config.json says "
        "that its weights are quantized with 'int8': leave 'transformer' out, or use another checkpoint"
    )
    with pytest.raises(ConfigError, match="names the component 'unet'"):
        resolved({"unet": "fp8"})


def test_disabled_over_a_config_of_dense_weights() -> None:
    disk = {"quant_method": "int8", "is_checkpoint_int8_serialized": False}
    assert resolved({"transformer": None}, transformer=disk) == row(None, None, None, None)


@pytest.mark.parametrize(
    "spec",
    [
        *("modelopt", "modelopt_fp4", "modelopt_mxfp8", "svdquant", "gptq", "awq", "inc", "compressed-tensors"),
        {"method": "fp8", "is_checkpoint_fp8_serialized": True},
    ],
)
def test_encoders_do_not_inherit_stored_formats(spec: Any) -> None:
    assert resolve_encoder_quant_config(user(spec)) is None


def test_encoders() -> None:
    assert resolve_encoder_quant_config(user("int8")) == user("int8")
    assert resolve_encoder_quant_config(None) is None
    assert resolve_encoder_quant_config(None, INT8_DISK) == config_from_disk(INT8_DISK)
    notes: list[str] = []
    found = resolve_encoder_quant_config(user("fp8"), INT8_DISK, where="e.json", given="--q", note=notes.append)
    assert found == config_from_disk(INT8_DISK)
    assert notes == ["e.json declares quant_method='int8', which is used instead of 'fp8' of --q"]
    assert resolve_encoder_quant_config(user("int8"), INT8_DISK) == config_from_disk(INT8_DISK)
