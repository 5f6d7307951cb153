"""Quantizing modules that are loaded already."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from omniloom import Omni
from omniloom.errors import ConfigError
from omniloom.quantization import build_quant_config, quantize_
from omniloom.quantization.linear import QuantizedLinear
from tests.engine.asking import asked, content
from tests.fixtures.reference import load
from tests.fixtures.tiny import FAMILIES


def layers(model: nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if isinstance(module, QuantizedLinear)]


def test_a_diffusers_module(tiny_folder: Any) -> None:
    model = load(tiny_folder("flux"), dtype=torch.float32).transformer
    biases = {path: m.bias.clone() for path, m in model.named_modules() if isinstance(m, nn.Linear)}
    selection = quantize_(model, "fp8", ignored_layers=["to_q"])
    assert layers(model) == list(selection.quantized)
    assert "transformer_blocks.0.attn.to_q" in selection.skipped
    for path, bias in biases.items():
        assert torch.equal(model.get_submodule(path).bias, bias)


def test_a_transformers_module(tiny_folder: Any) -> None:
    model = load(tiny_folder("flux"), dtype=torch.float32).text_encoder_2
    ids = torch.arange(12).reshape(1, 12)
    with torch.no_grad():
        dense = model(ids).last_hidden_state
        selection = quantize_(model, {"method": "int8"}, name="text_encoder_2")
        result = model(ids).last_hidden_state
    assert layers(model) == list(selection.quantized) and not selection.skipped
    assert 1e-4 < float((result - dense).norm() / dense.norm()) < 0.1


def test_a_module_of_ones_own() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32, bias=False))
    assert set(quantize_(model, build_quant_config("int8")).quantized) == {"0", "2"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "quantize_: give one method for this module, not None"),
        ("none", "give one method for this module"),
        ({"transformer": "fp8"}, "give one method for this module"),
        ("gptq", "'gptq' describes weights that are quantized already"),
        ({"method": "int8", "is_checkpoint_int8_serialized": True}, "describes weights that are quantized already"),
        ({"method": "int8", "ignored_layers": ["*"]}, "matches no layer of model"),
        ("int9", "unknown quantization method"),
    ],
)
def test_refused_before_anything_changes(config: Any, message: str) -> None:
    model = nn.Sequential(nn.Linear(64, 32))
    weight = model[0].weight
    with pytest.raises(ConfigError, match=message):
        quantize_(model, config)
    assert type(model[0]) is nn.Linear and model[0].weight is weight


def test_twice_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(64, 32))
    quantize_(model, "int8")
    with pytest.raises(ConfigError, match="matches no layer of model"):
        quantize_(model, "fp8")


@pytest.mark.parametrize("method", ["mxfp4", "bitsandbytes"])
@pytest.mark.parametrize("family", ["flux", "qwen-image", "z-image"])
def test_what_is_kept_matters(tiny_folder: Any, family: str, method: str) -> None:
    """X4: less error with conditioning, modulation and final layers kept. Half of it in trained models; here all layers
    are drawn alike, and it is what their number lets one expect."""
    model = load(tiny_folder(family), dtype=torch.float32)
    errors = []
    prompt, params = asked(FAMILIES[family].request(), seed=5, output_type="latent")
    dense: Any = None
    for options in (None, {}, {"all_layers": True}):
        pipe = copy.copy(model)
        pipe.transformer = copy.deepcopy(model.transformer)
        if options is not None:
            quantize_(pipe.transformer, method, **options)
        with Omni.from_pipeline(pipe) as omni:
            result = content(omni.generate(prompt, params)[0])
        if dense is None:
            dense = result
        else:
            errors.append(float(((result - dense) ** 2).sum() ** 0.5 / (dense**2).sum() ** 0.5))
    assert errors[0] < 0.95 * errors[1]


def test_report_of_a_pipeline_that_was_quantized_before(tiny_folder: Any) -> None:
    pipe = load(tiny_folder("flux"), dtype=torch.float32)
    selection = quantize_(pipe.transformer, "int8")
    with Omni.from_pipeline(pipe) as omni:
        part = omni.report.to_dict()["components"]["transformer"]
        assert part["quantized_layers"] == sorted(selection.quantized)
        assert part["codecs"] == {"int8_channel": len(selection.quantized)}
        assert sum(part["kernels"].values()) == len(selection.quantized)
        assert part["bytes_after"] == part["bytes"]
        assert part["method"] is None  # whoever quantized it knows; the layers say how they are stored
        assert "codecs" not in omni.report.to_dict()["components"]["text_encoder"]
    with pytest.raises(ConfigError, match="cannot be used with from_pipeline: quantize the pipeline's modules before"):
        Omni.from_pipeline(pipe, quantization_config="int8")
