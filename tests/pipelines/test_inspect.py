from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from omniloom.errors import CheckpointError, ModelError
from omniloom.pipelines.inspect import inspect_model
from tests.cli.timing import cpu_seconds

SIZES = {"F32": 4, "BF16": 2, "U8": 1, "I8": 1}


def sparse(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> int:
    """Write a safetensors file whose tensors take no room on the disk, and return their bytes."""
    header, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        count = SIZES[dtype]
        for side in shape:
            count *= side
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + count]}
        at += count
    raw = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + at)
    return at


def component(folder: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]], **config: Any) -> Path:
    base = "diffusion_pytorch_model" if "_class_name" in config else "model"
    sparse(folder / f"{base}.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def pipeline(folder: Path) -> Path:
    index = {
        "_class_name": "FluxPipeline",
        "_diffusers_version": "0.42.0",
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "image_encoder": [None, None],
        "transformer": ["diffusers", "FluxTransformer2DModel"],
        "some_flag": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model_index.json").write_text(json.dumps(index))
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text("{}")
    component(folder / "text_encoder", {"a": ("F32", (10, 10))}, architectures=["CLIPTextModel"])
    quantization = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    tensors = {"w": ("U8", (64, 32)), "b": ("BF16", (64,))}
    component(folder / "transformer", tensors, _class_name="FluxTransformer2DModel", quantization_config=quantization)
    return folder


def test_a_pipeline(tmp_path: Path) -> None:
    summary = inspect_model(pipeline(tmp_path / "m"))
    assert (summary.kind, summary.pipeline) == ("pipeline", "FluxPipeline")
    scheduler, text, transformer = summary.components
    assert (scheduler.class_name, scheduler.tensors) == ("FlowMatchEulerDiscreteScheduler", 0)
    assert (text.library, text.parameters, text.bytes, text.dtypes) == ("transformers", 100, 400, {"float32": 400})
    assert (transformer.parameters, transformer.bytes) == (64 * 32 + 64, 64 * 32 + 128)
    assert list(transformer.dtypes) == ["uint8", "bfloat16"]
    assert transformer.quantization == {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    data = json.loads(json.dumps(summary.to_dict()))
    assert data["components"]["transformer"]["class"] == "FluxTransformer2DModel"
    assert data["bytes"] == text.bytes + transformer.bytes


def test_a_component_folder(tmp_path: Path) -> None:
    folder = component(tmp_path / "transformer", {"a": ("F32", (2, 3))}, _class_name="SD3Transformer2DModel")
    summary = inspect_model(folder)
    [found] = summary.components
    assert (summary.kind, summary.pipeline) == ("component", None)
    assert (found.name, found.library, found.class_name) == ("transformer", "diffusers", "SD3Transformer2DModel")
    assert found.parameters == 6


def test_a_transformers_component_folder(tmp_path: Path) -> None:
    folder = component(tmp_path / "t5", {"a": ("F32", (2, 3))}, architectures=["T5EncoderModel"], model_type="t5")
    assert inspect_model(folder).components[0].class_name == "T5EncoderModel"


def test_one_file(tmp_path: Path) -> None:
    sparse(tmp_path / "flux-dev.safetensors", {"a": ("I8", (5,)), "b": ("F32", ())})
    summary = inspect_model(tmp_path / "flux-dev.safetensors")
    [found] = summary.components
    assert (summary.kind, found.name, found.class_name) == ("file", "flux-dev", None)
    assert (found.files, found.tensors, found.parameters, found.bytes) == (1, 2, 6, 9)


def test_a_variant(tmp_path: Path) -> None:
    folder = pipeline(tmp_path / "m")
    sparse(folder / "transformer" / "diffusion_pytorch_model.fp16.safetensors", {"w": ("BF16", (7,))})
    plain, fp16 = inspect_model(folder), inspect_model(folder, variant="fp16")
    assert plain.components[2].tensors == 2
    assert fp16.components[2].parameters == 7
    assert fp16.components[1].parameters == 100  # comes in one variant only


def test_missing_component_folder(tmp_path: Path) -> None:
    folder = pipeline(tmp_path / "m")
    (folder / "scheduler" / "scheduler_config.json").unlink()
    (folder / "scheduler").rmdir()
    with pytest.raises(ModelError, match="component 'scheduler'"):
        inspect_model(folder)


def test_a_component_without_its_weights(tmp_path: Path) -> None:
    folder = pipeline(tmp_path / "m")
    (folder / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(ModelError, match="transformer"):
        inspect_model(folder)


@pytest.mark.parametrize("cut", [0, 4, 8, 20, -1])
def test_a_truncated_file(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "x.safetensors"
    sparse(path, {"a": ("F32", (100,))})
    data = path.read_bytes()
    path.write_bytes(data[:cut])
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        inspect_model(path)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"a": 1}', "[" * 100_000])
def test_a_broken_index(tmp_path: Path, content: str) -> None:
    (tmp_path / "model_index.json").write_text(content)
    with pytest.raises(ModelError, match=r"model_index\.json"):
        inspect_model(tmp_path)


def test_foreign_paths(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="neither a pipeline"):
        inspect_model(tmp_path)
    with pytest.raises(ModelError):
        inspect_model(tmp_path / "nothing-here")
    (tmp_path / "x.bin").write_bytes(b"1")
    with pytest.raises(ModelError, match="not a .safetensors file"):
        inspect_model(tmp_path / "x.bin")


def test_tiny_pipeline_counts_what_torch_counts(tiny_folder: Callable[[str], Path]) -> None:
    import diffusers

    folder = tiny_folder("flux")
    model = diffusers.FluxTransformer2DModel.from_pretrained(folder / "transformer")
    found = {c.name: c for c in inspect_model(folder).components}["transformer"]
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.bytes == sum(p.nbytes for p in model.parameters())


def test_twenty_gigabytes_in_under_a_second(tmp_path: Path) -> None:
    """Ten sparse shards of 2 GB and 2000 tensors, as a process, without torch."""
    folder, per_shard, weight_map = tmp_path / "transformer", 200, {}
    folder.mkdir()
    for shard in range(10):
        name = f"diffusion_pytorch_model-{shard + 1:05}-of-00010.safetensors"
        names = [f"blocks.{shard}.layer_{i}.weight" for i in range(per_shard)]
        sparse(folder / name, {n: ("BF16", (1000, 5000)) for n in names})
        weight_map.update(dict.fromkeys(names, name))
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"_class_name": "QwenImageTransformer2DModel"}))
    [found] = inspect_model(folder).components
    assert (found.files, found.tensors, found.bytes) == (10, 2000, 20_000_000_000)
    assert cpu_seconds("inspect", folder) < 1.0
