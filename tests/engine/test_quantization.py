"""Every online method from a folder to a picture, with the report, the biases and the errors checked."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from omniloom import Omni
from omniloom.errors import ConfigError
from omniloom.quantization import build_quant_config
from omniloom.quantization.linear import QuantizedLinear
from omniloom.quantization.rules import select_layers
from tests.engine.asking import asked, content
from tests.fixtures.reference import load
from tests.fixtures.tiny import FAMILIES

# method -> (spec, the declared relative error of its weights)
METHODS: dict[str, tuple[dict[str, Any], float]] = {
    "fp8": ({"method": "fp8"}, 0.0264),
    "fp8-tensor": ({"method": "fp8", "weight_granularity": "tensor"}, 0.0264),
    "fp8-block": ({"method": "fp8", "weight_block_size": [32, 32]}, 0.0264),
    "int8": ({"method": "int8"}, 0.0083),
    "nf4": ({"method": "bitsandbytes"}, 0.0920),
    "fp4": ({"method": "bitsandbytes", "quant_type": "fp4", "compress_statistics": False}, 0.1220),
    "llm-int8": ({"method": "bitsandbytes", "load_in_8bit": True}, 0.0083),
    "mxfp8": ({"method": "mxfp8"}, 0.0294),
    "mxfp4": ({"method": "mxfp4"}, 0.1151),
    "mxfp4-w4a8": ({"method": "mxfp4", "w4a8_fallback_steps": [0]}, 0.1151),
    "mxfp4_dualscale": ({"method": "mxfp4_dualscale", "num_bf16_fallback_layers": 0}, 0.1115),
}
# family -> its encoders that are named explicitly
ENCODERS = {"flux": ["text_encoder_2"], "qwen-image": ["text_encoder"], "z-image": [], "wan22-t2v": ["text_encoder"]}
EXTRA = [("flux", "fp8", {"all_layers": True}), ("flux", "nf4", {"all_layers": True})]
CASES = [(family, method, {}) for family in ENCODERS for method in METHODS if family == "flux" or "-" not in method]


def picture(omni: Omni, family: str, output_type: str = "latent") -> np.ndarray:
    prompt, params = asked(FAMILIES[family].request(), seed=5, output_type=output_type)
    return content(omni.generate(prompt, params)[0])


@pytest.fixture(scope="module")
def dense(tiny_folder: Any) -> Any:
    """The same pipelines as the libraries load them, and what they give."""
    known: dict[str, tuple[Any, np.ndarray]] = {}

    def get(family: str) -> tuple[Any, np.ndarray]:
        if family not in known:
            with Omni(tiny_folder(family, outlier=0.0), dtype="float32") as omni:
                known[family] = load(tiny_folder(family, outlier=0.0), dtype=torch.float32), picture(omni, family)
        return known[family]

    return get


def dense_bytes(model: nn.Module) -> int:
    tensors = [*model.parameters(), *model.buffers()]
    return sum(tensor.nbytes for tensor in {t.data_ptr(): t for t in tensors}.values())


def assert_quantized(
    part: dict[str, Any],
    model: nn.Module,
    reference: nn.Module,
    config: Any,
    bound: float,
    normal: bool = True,
    stored: nn.Module | None = None,
) -> None:
    """Report, bytes, biases and weights of one component are what its config says. ``normal``: no outliers in them.

    ``stored``: the component in the files' type, which is what gets quantized, where it is computed in another.
    """
    chosen = select_layers(reference, config, component="model")
    assert part["method"] == config.method
    assert part["quantized_layers"] == sorted(chosen.quantized)
    assert part["skipped_layers"] == dict(chosen.skipped)
    names = [scheme.codec.name for scheme in chosen.quantized.values()]
    assert part["codecs"] == {name: names.count(name) for name in set(names)}
    assert sum(part["kernels"].values()) == len(names)
    linears = {path: m for path, m in reference.named_modules() if isinstance(m, nn.Linear)}
    before = dense_bytes(reference)
    saved = 0
    for path, scheme in chosen.quantized.items():
        weight = linears[path].weight
        saved += weight.nbytes - scheme.codec.nbytes((weight.shape[0], weight.shape[1]))
    assert part["bytes_before"] == before
    assert abs(part["bytes_after"] - (before - saved)) <= 0.05 * (before - saved)
    assert part["bytes"] == part["bytes_after"] < before
    errors = []
    for path, linear in linears.items():
        layer: Any = model.get_submodule(path)
        assert isinstance(layer, QuantizedLinear) is (path in chosen.quantized), path
        if linear.bias is not None:
            assert type(layer.bias) is nn.Parameter and layer.bias.dtype == linear.bias.dtype
            assert torch.equal(layer.bias, linear.bias), path
        if path in chosen.quantized:
            source: Any = (stored or reference).get_submodule(path)
            wanted, codec = source.weight.detach(), chosen.quantized[path].codec
            exact = codec.decode(codec.encode(wanted), (wanted.shape[0], wanted.shape[1]))
            assert torch.equal(layer.dense_weight(torch.float32), exact), path
            errors.append(float((exact - wanted.float()).norm() / wanted.float().norm()))
        else:
            assert torch.equal(layer.weight, linear.weight), path
    assert max(errors) < (1.5 if normal else 3) * bound, (max(errors), bound)
    assert np.median(errors) > 0.4 * bound, (np.median(errors), bound)


@pytest.mark.parametrize(("family", "method", "more"), [*CASES, *EXTRA])
def test_every_method(tiny_folder: Any, dense: Any, family: str, method: str, more: dict[str, Any]) -> None:
    spec, bound = METHODS[method]
    config: Any = build_quant_config({**spec, **more})
    reference, expected = dense(family)
    denoisers = [name for name in ("transformer", "transformer_2") if getattr(reference, name, None) is not None]
    named = [*denoisers, *([] if "w4a8" in method else ENCODERS[family])]
    with Omni(
        tiny_folder(family, outlier=0.0), dtype="float32", quantization_config=dict.fromkeys(named, config)
    ) as omni:
        report = omni.report.to_dict()["components"]
        for name in named:
            model, dense_model = getattr(omni._loaded.pipe, name), getattr(reference, name)  # type: ignore[union-attr]
            assert_quantized(report[name], model, dense_model, config, bound, normal=name in denoisers)
        assert all("method" not in part for name, part in report.items() if name not in named)
        result = picture(omni, family)
    assert np.isfinite(result).all()
    distance = np.linalg.norm(result - expected) / np.linalg.norm(expected)
    assert distance > 1e-4, distance
    if bound < 0.01:
        assert distance < 0.3, distance


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("method", ["fp8", "int8", "nf4", "mxfp4"])
def test_other_compute_dtypes(tiny_folder: Any, method: str, dtype: str) -> None:
    spec, bound = METHODS[method]
    config: Any = build_quant_config(spec)
    reference = load(tiny_folder("flux", outlier=0.0), dtype=getattr(torch, dtype))
    named = {"transformer": config, "text_encoder_2": config}
    with Omni(tiny_folder("flux", outlier=0.0), dtype=dtype, quantization_config=named) as omni:
        part = omni.report.to_dict()["components"]["transformer"]
        model = omni._loaded.pipe.transformer  # type: ignore[union-attr]
        exact = load(tiny_folder("flux", outlier=0.0), dtype=torch.float32).transformer
        assert_quantized(part, model, reference.transformer, config, bound, stored=exact)
        assert np.isfinite(picture(omni, "flux", "np")).all()


def test_steps_are_for_denoisers(tiny_folder: Any) -> None:
    spec = {"text_encoder_2": {"method": "mxfp4", "w4a8_fallback_steps": [0]}}
    with pytest.raises(ConfigError, match=r"text_encoder_2.*w4a8_fallback_steps.*no denoising steps"):
        Omni(tiny_folder("flux"), dtype="float32", quantization_config=spec)


@pytest.mark.parametrize(
    "spec",
    [
        "int8",
        {"transformer": "int8"},
        {"transformer_2": "int8"},
        {"transformer": "int8", "transformer_2": "fp8"},
        {"default": {"method": "int8", "ignored_layers": ["transformer_2.blocks.0"]}, "text_encoder": None},
    ],
)
def test_both_transformers_of_wan(tiny_folder: Any, dense: Any, spec: Any, caplog: Any) -> None:
    """RB-34: each gets what it is asked for, and the sampler calls both."""
    reference, expected = dense("wan22-t2v")
    with Omni(tiny_folder("wan22-t2v", outlier=0.0), dtype="float32", quantization_config=spec) as omni:
        report = omni.report.to_dict()["components"]
        result = picture(omni, "wan22-t2v")
        pipe: Any = omni._loaded.pipe  # type: ignore[union-attr]
        for name in ("transformer", "transformer_2", "text_encoder"):
            found = {path for path, m in getattr(pipe, name).named_modules() if isinstance(m, QuantizedLinear)}
            config: Any = build_quant_config(spec)
            if not isinstance(spec, str):
                config = config.resolve(name)
            elif name == "text_encoder":
                config = None
            wanted = set(select_layers(getattr(reference, name), config, component=name).quantized) if config else set()
            assert found == wanted, name
            assert report[name].get("quantized_layers", []) == sorted(found)
    if isinstance(spec, dict) and "default" in spec:
        first = [path for path in report["transformer"]["quantized_layers"] if path.startswith("blocks.0.")]
        assert first and not any(p.startswith("blocks.0.") for p in report["transformer_2"]["quantized_layers"])
    assert not caplog.records  # an entry that is good for one of them is no mistake
    distance = np.linalg.norm(result - expected) / np.linalg.norm(expected)
    assert 1e-4 < distance < 0.3, distance


def test_an_entry_that_matches_nowhere_is_said_once(tiny_folder: Any, caplog: Any) -> None:
    spec = {"method": "int8", "ignored_layers": ["img_mpl", "attn1"]}
    with Omni(tiny_folder("wan22-t2v"), dtype="float32", quantization_config=spec):
        pass
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("omniloom")]
    [message] = messages
    assert message.startswith("quantization_config")
    assert message.endswith("the entry 'ignored_layers: img_mpl' matches no layer of transformer, transformer_2")


def test_prompts_still_matter(tiny_folder: Any) -> None:
    """RB-07: with only the MLPs quantized the prompt still decides; and skipped layers are exact."""
    spec = {"method": "int8", "ignored_layers": ["re:.*attn", "single_transformer_blocks"]}
    tiny = FAMILIES["flux"]
    with Omni(tiny_folder("flux"), dtype="float32", quantization_config=spec) as omni:
        part = omni.report.to_dict()["components"]["transformer"]
        assert part["quantized_layers"] and all(".ff" in path for path in part["quantized_layers"])
        outputs = []
        for text in tiny.prompts:
            prompt, params = asked(tiny.request(prompt=text), seed=5, output_type="latent")
            outputs.append(content(omni.generate(prompt, params)[0]))
    assert np.linalg.norm(outputs[0] - outputs[1]) / np.linalg.norm(outputs[0]) >= 1e-2


def test_an_instance_and_a_name_are_the_same(tiny_folder: Any) -> None:
    config: Any = build_quant_config("int8")
    dumps = []
    for given in ({"quantization_config": config}, {"quantization": "int8"}, {"quantization": config.to_dict()}):
        with Omni(tiny_folder("flux"), dtype="float32", **given) as omni:
            dumps.append((omni.config.to_dict(), picture(omni, "flux").tobytes()))
    assert dumps[0] == dumps[1] == dumps[2]
    assert dumps[0][0]["quantization_config"] == {"method": "int8", **dataclasses.asdict(config)} | {
        "ignored_layers": [],
        "modules_to_not_convert": [],
    }
