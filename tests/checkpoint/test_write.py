from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from omniloom.checkpoint import TensorSource, find_weights
from omniloom.checkpoint.write import ShardWriter
from omniloom.errors import CheckpointError, EngineError

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.int64]


def _tensors(shapes: list[tuple[int, ...]]) -> dict[str, torch.Tensor]:
    made = {}
    for number, shape in enumerate(shapes):
        dtype = DTYPES[number % len(DTYPES)]
        values = torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(number))
        made[f"block.{number}.weight"] = values.to(torch.float32).to(dtype)
    return made


def _specs(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


@settings(max_examples=25, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=9),
    limit=st.integers(1, 500),
    data=st.data(),
)
def test_what_is_written_is_read_by_others_and_by_us(shapes, limit: int, data, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("shards")
    tensors = _tensors(shapes)
    with ShardWriter(folder, "model", _specs(tensors), limit) as writer:
        for name in data.draw(st.permutations(list(tensors))):
            writer.write(name, tensors[name])
    read = {}
    for file in folder.glob("*.safetensors"):
        read |= load_file(file)
    assert set(read) == set(tensors)
    (folder / "config.json").write_text(json.dumps({"model_type": "x"}))
    with TensorSource(find_weights(folder)) as source:
        for name, tensor in tensors.items():
            for found in (read[name], source.read(name)):
                assert found.dtype == tensor.dtype and found.shape == tensor.shape
                assert found.flatten().view(torch.uint8).equal(tensor.flatten().view(torch.uint8))


def test_a_large_model_has_an_index_with_its_size(tmp_path: Path) -> None:
    tensors = _tensors([(10, 10), (10, 10), (10,)])
    with ShardWriter(tmp_path, "diffusion_pytorch_model", _specs(tensors), 450) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    index = json.loads((tmp_path / "diffusion_pytorch_model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert sorted(set(index["weight_map"].values())) == [
        "diffusion_pytorch_model-00001-of-00002.safetensors",
        "diffusion_pytorch_model-00002-of-00002.safetensors",
    ]


def test_wrong_tensors_are_refused(tmp_path: Path) -> None:
    tensors = _tensors([(2, 3), (4,)])
    writer = ShardWriter(tmp_path, "model", _specs(tensors))
    with pytest.raises(ValueError, match="not the announced"):
        writer.write("block.0.weight", torch.zeros(3, 2))
    writer.write("block.0.weight", tensors["block.0.weight"])
    with pytest.raises(ValueError, match="twice"):
        writer.write("block.0.weight", tensors["block.0.weight"])
    with pytest.raises(CheckpointError, match=r"not written: block\.1\.weight"):
        writer.close()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="cannot write into"):
        ShardWriter(tmp_path / "missing", "model", _specs(_tensors([(1,)])))
