"""ModelOpt's configs: the flat form, the nested one, and which algorithms there are."""

from __future__ import annotations

from typing import Any

import pytest

from omniloom.errors import ConfigError
from omniloom.quantization import build_quant_config, config_from_disk
from omniloom.quantization.methods.modelopt import is_modelopt

PRODUCER = {"name": "modelopt", "version": "0.47.0"}


@pytest.mark.parametrize(
    ("algorithm", "method"),
    [
        ("FP8", "modelopt"),
        ("fp8", "modelopt"),
        ("FP8_PER_CHANNEL_PER_TOKEN", "modelopt"),
        ("NVFP4", "modelopt_fp4"),
        ("MXFP8", "modelopt_mxfp8"),
    ],
)
def test_the_algorithm_decides(algorithm: str, method: str) -> None:
    forms: list[dict[str, Any]] = [
        {"quant_method": "modelopt", "quant_algo": algorithm},
        {"method": "MODELOPT", "quant_algo": algorithm},
        {"quant_algo": algorithm, "producer": PRODUCER},
        {"quant_algo": algorithm},
        {"quantization": {"quant_algo": algorithm}},
        {"quantization": {"quant_algo": algorithm}, "producer": PRODUCER},
    ]
    for raw in forms:
        assert is_modelopt(raw)
        for config in (build_quant_config(raw), config_from_disk(raw)):
            assert config.method == method and config.quant_algo == algorithm.upper()  # type: ignore[union-attr]
        assert config_from_disk(raw).serialized  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["modelopt", "modelopt-fp4", "ModelOpt_Mixed", "modelopt_mxfp8"])
def test_without_an_algorithm_the_name_stays(name: str) -> None:
    assert build_quant_config({"quant_method": name}).method == name.lower().replace("-", "_")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "algorithm",
    [
        "FP8_PB_WO",
        "W4A16_NVFP4",
        "NVFP4_AWQ",
        "NVFP4_SVD",
        "W4A8_NVFP4_FP8",
        "W4A8_MXFP4_FP8",
        "W4A16_AWQ",
        "W4A8_AWQ",
        "W8A16",
        "W8A8_SQ_PER_CHANNEL",
        "w4a16_awq",
    ],
)
def test_unsupported_algorithms(algorithm: str) -> None:
    raw = {"quant_method": "modelopt", "quant_algo": algorithm}
    pattern = f"unsupported ModelOpt quant_algo '{algorithm.upper()}'.*supported: FP8, FP8_PER_CHANNEL_PER_TOKEN, NVFP4"
    with pytest.raises(ConfigError, match=pattern):
        build_quant_config(raw)
    with pytest.raises(ConfigError, match=f"^x/config.json, quantization_config: {pattern}"):
        config_from_disk(raw, where="x/config.json")


def test_lists_of_both_forms() -> None:
    nested = {
        "producer": PRODUCER,
        "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["proj_out*"]},
    }
    flat = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["proj_out*"], "producer": PRODUCER}
    assert config_from_disk(nested) == config_from_disk(flat)
    [listed] = config_from_disk(flat).ignore_lists()  # type: ignore[union-attr]
    assert (listed.key, listed.style, listed.entries) == ("exclude_modules", "modelopt", ("proj_out*",))


def test_mixed() -> None:
    raw: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    with pytest.raises(ConfigError, match="quantized_layers must say what each layer has"):
        config_from_disk(raw)
    raw["quantized_layers"] = {"a.b": {"quant_algo": "FP8"}, "c": {"quant_algo": "NVFP4", "group_size": 16}}
    config = config_from_disk(raw)
    assert config.method == "modelopt_mixed" and config.quantized_layers == raw["quantized_layers"]  # type: ignore[union-attr]


def test_what_is_not_modelopts() -> None:
    assert not is_modelopt({"method": "fp8"})
    assert not is_modelopt({"transformer": {"method": "fp8"}})
    assert not is_modelopt({"producer": {"name": "other"}, "quant_method": "fp8"})
