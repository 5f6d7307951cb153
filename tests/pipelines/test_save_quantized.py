from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from omniloom import Omni, SamplingParams
from omniloom.errors import ConfigError, EngineError
from omniloom.pipelines import save_quantized as module
from omniloom.pipelines.save_quantized import save_quantized
from omniloom.quantization import build_quant_config
from omniloom.quantization.linear import QuantizedLinear

METHODS = ["fp8", "int8", "bitsandbytes", "bitsandbytes_8bit", "mxfp8", "mxfp4", "mxfp4_dualscale"]
SPECS: dict[str, Any] = {"mxfp4_dualscale": {"method": "mxfp4_dualscale", "num_bf16_fallback_layers": 1}}
SPECS |= {"fp8_tensor": {"method": "fp8", "weight_granularity": "tensor"}}
SPECS |= {"fp8_block": {"method": "fp8", "weight_block_size": [16, 32]}}
SPECS |= {"fp4": {"method": "bitsandbytes", "quant_type": "fp4", "compress_statistics": False, "block_size": 128}}


def _fields(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for path, layer in model.named_modules():
        if isinstance(layer, QuantizedLinear):
            found |= {f"{path}.{name}": tensor for name, tensor in layer.fields.items()}
    return found


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("method", [*METHODS, "fp8_tensor", "fp8_block", "fp4"])
def test_a_saved_model_is_the_online_one_bit_for_bit(method: str, tiny_folder, tmp_path: Path) -> None:
    folder = tiny_folder("flux")
    config = build_quant_config(SPECS.get(method, method))
    saved = save_quantized(folder, config, tmp_path / "out", max_shard_bytes=20_000)
    files = list((tmp_path / "out" / "transformer").glob("*.safetensors"))
    assert len(files) > 1
    assert saved["transformer"].bytes_after == sum(t.nbytes for file in files for t in load_file(file).values())
    with (
        Omni(folder, dtype="float32", quantization_config=config) as online,
        Omni(tmp_path / "out", dtype="float32") as stored,
    ):
        a, b = (omni._loaded.pipe.transformer for omni in (online, stored))  # type: ignore[union-attr]
        left, right = _fields(a), _fields(b)
        assert list(left) == list(right) and left
        for name in left:
            assert _bits(left[name]).equal(_bits(right[name])), name
        params = SamplingParams(seed=3, num_inference_steps=2, output_type="latent", height=32, width=32)
        x, y = (omni.generate("a cat", params)[0].latents for omni in (online, stored))
        assert x is not None and y is not None and torch.equal(x, y)
        reports = [omni.report.to_dict()["components"]["transformer"] for omni in (online, stored)]
        for key in ("method", "quantized_layers", "codecs", "kernels", "bytes_before", "bytes_after"):
            assert reports[0][key] == reports[1][key], key
        assert set(reports[0]["skipped_layers"]) == set(reports[1]["skipped_layers"])


def test_encoders_of_transformers_and_both_of_wans_transformers(tiny_folder, tmp_path: Path) -> None:
    folder = tiny_folder("wan22-t2v")
    config = build_quant_config({"transformer": "int8", "transformer_2": "fp8", "text_encoder": "mxfp8"})
    save_quantized(folder, config, tmp_path / "out")
    with (
        Omni(folder, dtype="float32", quantization_config=config) as online,
        Omni(tmp_path / "out", dtype="float32") as stored,
    ):
        for name in ("transformer", "transformer_2", "text_encoder"):
            left, right = (_fields(getattr(omni._loaded.pipe, name)) for omni in (online, stored))  # type: ignore[union-attr]
            assert left and all(_bits(left[key]).equal(_bits(right[key])) for key in left | right)


@pytest.mark.parametrize("family", ["qwen-image", "z-image"])
def test_renamed_and_converted_encoders(family: str, tiny_folder, tmp_path: Path) -> None:
    config = build_quant_config({"text_encoder": "int8"})
    save_quantized(tiny_folder(family), config, tmp_path / "out")
    with Omni(tmp_path / "out", dtype="float32") as omni:
        part = omni.report.to_dict()["components"]["text_encoder"]
        assert part["method"] == "int8" and part["quantized_layers"]
    assert "method" not in omni.report.to_dict()["components"]["transformer"]


def test_nothing_is_left_of_a_broken_run(tiny_folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = module.ShardWriter.write
    written = []

    def write(self: Any, name: str, tensor: torch.Tensor) -> None:
        written.append(name)
        if len(written) == 20:
            raise OSError(28, "No space left on device")
        real(self, name, tensor)

    monkeypatch.setattr(module.ShardWriter, "write", write)
    with pytest.raises(EngineError, match="cannot write .*out: No space left on device"):
        save_quantized(tiny_folder("flux"), build_quant_config("fp8"), tmp_path / "out")
    assert len(written) == 20 and not list(tmp_path.iterdir())


def test_what_cannot_be_done_is_said_before_anything_is_written(tiny_folder, tmp_path: Path) -> None:
    folder = tiny_folder("flux")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("x")
    with pytest.raises(ConfigError, match="there is there already: give the name of a new folder"):
        save_quantized(folder, build_quant_config("fp8"), tmp_path / "there")
    with pytest.raises(ConfigError, match="nothing to quantize in .*: give a method"):
        save_quantized(folder, None, tmp_path / "out")
    with pytest.raises(ConfigError, match="names the component 'transformr'; did you mean 'transformer'"):
        save_quantized(folder, build_quant_config({"transformr": {"method": "fp8"}}), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    save_quantized(folder, build_quant_config("fp8"), tmp_path / "out")
    with pytest.raises(ConfigError, match=re.escape("(quantized already: transformer)")):
        save_quantized(tmp_path / "out", None, tmp_path / "again")
    with pytest.raises(ConfigError, match="declares quant_method='fp8' but .* asks for 'int8'"):
        save_quantized(tmp_path / "out", build_quant_config("int8"), tmp_path / "again")


def test_an_entry_that_matches_nothing_is_said(tiny_folder, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = build_quant_config({"method": "fp8", "ignored_layers": ["ff_contxt", "attn"]})
    save_quantized(tiny_folder("flux"), config, tmp_path / "out", given="--quantization")
    [record] = [record for record in caplog.records if record.name.startswith("omniloom")]
    assert record.getMessage().endswith("the entry 'ignored_layers: ff_contxt' matches no layer of transformer")


def test_the_config_says_how(tiny_folder, tmp_path: Path) -> None:
    save_quantized(tiny_folder("flux"), build_quant_config("bitsandbytes"), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "transformer" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "bitsandbytes" and config["load_in_4bit"] is True
    assert config["bnb_4bit_quant_type"] == "nf4" and "proj_out" in config["llm_int8_skip_modules"]
    tensors: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "out" / "transformer").glob("*.safetensors"):
        tensors |= load_file(file)
    state = next(t for name, t in tensors.items() if "quant_state" in name)
    assert json.loads(bytes(state.tolist()))["quant_type"] == "nf4"
    assert {p.name for p in (tmp_path / "out").iterdir()} == {p.name for p in tiny_folder("flux").iterdir()}


@pytest.mark.parametrize("spec", ["bitsandbytes", SPECS["fp4"], "bitsandbytes_8bit"], ids=str)
def test_bitsandbytes_reads_what_was_saved(spec: Any, tiny_folder, tmp_path: Path) -> None:
    # Wide layers: bitsandbytes' AVX-512 decoder is wrong where a block is longer than a row.
    functional = pytest.importorskip("bitsandbytes.functional")
    save_quantized(tiny_folder("flux-256"), build_quant_config(spec), tmp_path / "out")
    tensors: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "out" / "transformer").glob("*.safetensors"):
        tensors |= load_file(file)
    with Omni(tmp_path / "out", dtype="float32") as omni:
        layers = dict(omni._loaded.pipe.transformer.named_modules())  # type: ignore[union-attr]
        quantized = omni.report.to_dict()["components"]["transformer"]["quantized_layers"]
        assert quantized
        for path in quantized:
            weight, ours = tensors[f"{path}.weight"], layers[path].dense_weight(torch.float32)
            if f"{path}.SCB" in tensors:
                assert int(tensors[f"{path}.weight_format"]) == 0
                theirs = weight.float() * (tensors[f"{path}.SCB"].view(-1, 1) / 127)
            else:
                prefix = f"{path}.weight."
                parts = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
                state = functional.QuantState.from_dict(parts, device=torch.device("cpu"))
                assert tuple(state.shape) == ours.shape
                theirs = functional.dequantize_4bit(weight, state).float()
            assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-7), path
