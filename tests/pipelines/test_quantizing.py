"""Quantizing while loading: one config whatever it is typed into, and errors that name file, key and flag."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import omniloom.omni  # noqa: F401  (registers every option)
from omniloom import Omni
from omniloom.cli.request import Flags, make_job
from omniloom.cli.typed import parse_json_or_file
from omniloom.config import RuntimeConfig
from omniloom.errors import CheckpointError, ConfigError, UserError
from omniloom.quantization import build_quant_config

SPEC: dict[str, Any] = {
    "transformer": {"method": "int8", "ignored_layers": ["img_mlp", "re:.*attn"]},
    "text_encoder": None,
    "default": {"method": "bitsandbytes", "quant_type": "fp4"},
}
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


def typed(**options: Any) -> dict[str, Any]:
    return make_job(Flags("a cat", options=options)).config().to_dict()


def test_every_way_to_say_it_is_the_same(tmp_path: Path) -> None:
    """RB-32."""
    text = json.dumps(SPEC)
    (tmp_path / "q.json").write_text(text)
    (tmp_path / "q.yaml").write_text(
        "transformer:\n  method: int8\n  ignored_layers: [img_mlp, 're:.*attn']\n"
        "text_encoder: null\ndefault:\n  method: bitsandbytes\n  quant_type: fp4\n"
    )
    (tmp_path / "options.json").write_text(json.dumps({"quantization_config": SPEC}))
    dumps = {
        "python": RuntimeConfig.resolve(python={"quantization_config": SPEC}).to_dict(),
        "object": RuntimeConfig.resolve(python={"quantization": build_quant_config(SPEC)}).to_dict(),
        "alias": RuntimeConfig.resolve(python={"diffusion_quantization_config": SPEC}).to_dict(),
        "cli text": typed(quantization=text),
        "cli json": typed(quantization_config=parse_json_or_file(text)),
        "cli file": typed(quantization_config=parse_json_or_file(f"@{tmp_path / 'q.json'}")),
        "cli yaml": typed(quantization_config=parse_json_or_file(f"@{tmp_path / 'q.yaml'}")),
        "config file": make_job(Flags("a cat", config=tmp_path / "options.json")).config().to_dict(),
    }
    first = dumps["python"]
    assert first["quantization_config"]["transformer"]["ignored_layers"] == ["img_mlp", "re:.*attn"]
    for way, dump in dumps.items():
        assert dump == first, way
        assert RuntimeConfig.resolve(dump=dump).to_dict() == first, way


def test_a_name_is_the_same_everywhere() -> None:
    dumps = [
        typed(quantization="fp8"),
        typed(quantization_config={"method": "fp8"}),
        RuntimeConfig.resolve(a={"quantization": "FP8"}).to_dict(),
        RuntimeConfig.resolve(a={"quantization": "int8"}, b={"quantization_config": "fp8"}).to_dict(),
    ]
    assert dumps[0]["quantization_config"]["method"] == "fp8" and all(dump == dumps[0] for dump in dumps)
    assert typed(quantization="none") == RuntimeConfig.resolve().to_dict()


def test_two_names_at_once() -> None:
    for pair in (("quantization", "quantization_config"), ("quantization", "diffusion_quantization_config")):
        with pytest.raises(ConfigError, match="are one option: give only one of them"):
            RuntimeConfig.resolve(python=dict.fromkeys(pair, "fp8"))


@pytest.fixture
def folder(tiny_folder: Any, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_folder("flux"), tmp_path / "model")


def declare(folder: Path, component: str, config: Any) -> Path:
    path = folder / component / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))
    return path


def refused(folder: Path, kind: type[UserError] = ConfigError, **options: Any) -> str:
    with pytest.raises(kind) as error:
        Omni(folder, dtype="float32", **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_an_online_method_over_codes(folder: Path) -> None:
    file = folder / WEIGHTS
    tensors = load_file(file)
    name = "transformer_blocks.0.attn.to_q.weight"
    tensors[name] = (tensors[name] * 100).to(torch.int8)
    save_file(tensors, file)
    message = refused(folder, quantization_config="int8")
    assert re.match(rf"quantization_config.* asks for 'int8', which quantizes dense weights, but '{name}' in ", message)
    assert f"{file} is stored as I8: the weights are quantized already; leave quantization_config" in message
    message = refused(folder, CheckpointError)
    assert name in message and "the file is quantized, and nothing in it says how" in message


@pytest.mark.parametrize("method", ["fp8", "int8", "mxfp8", "mxfp4", "mxfp4_dualscale", "bitsandbytes"])
def test_a_config_of_stored_codes_over_dense_weights(folder: Path, method: str) -> None:
    key = type(build_quant_config(method)).serialized_key  # type: ignore[union-attr]
    message = refused(folder, quantization_config={"method": method, key: True})
    assert message.startswith("quantization_config") and f"quantized with {method!r} already ({key})" in message
    assert f"{folder / WEIGHTS} is stored as F32" in message and f"leave {key} out" in message
    path = declare(folder, "transformer", {"quant_method": method, key: True})
    message = refused(folder, CheckpointError)
    assert message.startswith(f"{path} declares weights that are quantized with {method!r}, but no layer is (")
    assert f"{folder / WEIGHTS} is stored as F32): remove quantization_config from it" in message


def test_a_file_that_says_another_method(folder: Path) -> None:
    path = declare(folder, "transformer", {"quant_method": "int8"})
    message = refused(folder, quantization_config="fp8")
    assert message.startswith(f"{path} declares quant_method='int8' but quantization_config")
    declare(folder, "transformer", {"quant_method": "int9"})
    assert refused(folder).startswith(f"{path}, quantization_config: unknown quantization method 'int9'")


def test_before_any_weight_is_read(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"")
    message = refused(folder, quantization_config={"transformer_2": "fp8"})
    assert message.startswith("quantization names the component 'transformer_2'; did you mean 'transformer'?")
    assert "this model has text_encoder, text_encoder_2, transformer, vae" in message
    assert "unknown quantization method 'fp9'" in refused(folder, quantization_config="fp9")


def test_nothing_to_quantize_and_layers_that_are_not_there(folder: Path) -> None:
    message = refused(folder, quantization_config={"method": "int8", "ignored_layers": ["*"]})
    assert "'int8' matches no layer of transformer" in message
    message = refused(folder, quantization_config={"method": "mxfp4", "w4a8_fallback_layers": ["blocks.0.attn1.to_q"]})
    assert "w4a8_fallback_layers names 'blocks.0.attn1.to_q', which is no layer of the model" in message
    message = refused(folder, quantization_config={"method": "fp8", "activation_scheme": "static"})
    assert "'static' needs input scales" in message


def test_tied_tensors_count_once(tiny_folder: Any) -> None:
    """T5 has its embedding under two names."""
    with Omni(tiny_folder("flux"), dtype="float32") as omni:
        dense = omni.report.to_dict()["components"]["text_encoder_2"]["bytes"]
    with Omni(tiny_folder("flux"), dtype="float32", quantization={"text_encoder_2": "int8"}) as omni:
        part = omni.report.to_dict()["components"]["text_encoder_2"]
    assert part["bytes_before"] == dense > part["bytes_after"]
