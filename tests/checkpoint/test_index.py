from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from omniloom.checkpoint import TensorSource, Weights, find_weights, single_file
from omniloom.errors import CheckpointError, ModelError
from tests.checkpoint.writer import same_bits, save_shards, write_index

BASE = "diffusion_pytorch_model"


def shard(*names: str, value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full((4, 2), value) for name in names}


def right_shards() -> list[dict[str, torch.Tensor]]:
    return [shard("a.weight", "a.bias", value=1.0), shard("b.weight", value=2.0), shard("c.weight", value=3.0)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_shards(tmp_path / "transformer", right_shards(), BASE)
    return tmp_path / "transformer"


def values(weights: Weights) -> dict[str, float]:
    with TensorSource(weights) as source:
        return {name: source.read(name).mean().item() for name in source.names()}


RIGHT = {"a.weight": 1.0, "a.bias": 1.0, "b.weight": 2.0, "c.weight": 3.0}


def refused(folder: Path, *words: str, variant: str | None = None, kind: type[ModelError] = CheckpointError) -> None:
    with pytest.raises(kind) as caught:
        find_weights(folder, variant)
    message = str(caught.value)
    assert "\n" not in message
    for word in (str(folder), *words):
        assert word in message


# --- with an index -----------------------------------------------------------------------------------------------


def test_only_what_the_index_lists_is_loaded(folder: Path) -> None:
    """RB-28: stale shards, another variant and a copy one level up, all with other values, change nothing."""
    wrong = shard(*RIGHT, value=-9.0)
    save_file(wrong, folder / f"{BASE}-00001-of-00002.safetensors")
    save_file(wrong, folder / f"{BASE}-00002-of-00002.safetensors")
    save_file(wrong, folder / f"{BASE}.safetensors")
    save_file(wrong, folder / "model.fp16.safetensors")
    save_file(wrong, folder / "unrelated.safetensors")
    save_shards(folder, [wrong, shard("d.weight", value=-9.0)], BASE, variant="fp16")
    save_file(wrong, folder.parent / f"{BASE}.safetensors")
    (folder / f"{BASE}.bin").write_bytes(b"not looked at")
    weights = find_weights(folder)
    assert values(weights) == RIGHT
    assert weights.files == [folder / f"{BASE}-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert weights.nbytes == 4 * 8 * 4
    for file in weights.files:
        for name, tensor in load_file(file).items():
            assert same_bits(TensorSource(weights).read(name), tensor)


def test_metadata_of_every_shard(folder: Path) -> None:
    assert list(find_weights(folder).metadata.values()) == [{"format": "pt"}] * 3


def test_missing_shards_are_named_with_a_tensor(folder: Path) -> None:
    name = f"{BASE}-00002-of-00003.safetensors"
    (folder / name).unlink()
    refused(folder, name, "'b.weight'", "1 of 3 shards", f"{BASE}.safetensors.index.json")


def test_a_key_absent_from_its_shard(folder: Path) -> None:
    name = f"{BASE}-00002-of-00003.safetensors"
    save_file(shard("other", value=0.0), folder / name)
    refused(folder, name, "'b.weight'")


def test_a_key_in_two_shards(folder: Path) -> None:
    name = f"{BASE}-00003-of-00003.safetensors"
    save_file(shard("c.weight", "b.weight", value=-9.0), folder / name)
    refused(folder, name, "'b.weight'", f"{BASE}-00002-of-00003.safetensors")


def test_a_key_that_the_index_does_not_list(folder: Path) -> None:
    name = f"{BASE}-00003-of-00003.safetensors"
    save_file(shard("c.weight", "extra.weight", value=3.0), folder / name)
    refused(folder, name, "'extra.weight'", "not listed")


def test_a_damaged_shard_is_named(folder: Path) -> None:
    path = folder / f"{BASE}-00003-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    refused(folder, path.name, "truncated")


def test_a_folder_in_place_of_a_shard(folder: Path) -> None:
    path = folder / f"{BASE}-00003-of-00003.safetensors"
    path.unlink()
    path.mkdir()
    refused(folder, path.name, "missing")


@pytest.mark.parametrize(
    "place", ["../x.safetensors", "/x.safetensors", "a/../../x.safetensors", "..\\x.safetensors", ""]
)
def test_an_index_cannot_leave_its_folder(folder: Path, place: str) -> None:
    save_file(shard("a", value=0.0), folder.parent / "x.safetensors")
    write_index(folder / f"{BASE}.safetensors.index.json", {"a": place})
    refused(folder, "'a'", f"{BASE}.safetensors.index.json")


def test_an_index_of_pickles(folder: Path) -> None:
    write_index(folder / f"{BASE}.safetensors.index.json", {"a": "pytorch_model-00001-of-00002.bin"})
    refused(folder, "'a'", ".bin", kind=ModelError)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 5}}', "\xff", "[" * 50_000]
    + ['{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}'],
)
def test_an_invalid_index(folder: Path, text: str) -> None:
    (folder / f"{BASE}.safetensors.index.json").write_text(text, encoding="latin-1")
    refused(folder, f"{BASE}.safetensors.index.json")


def test_two_indices_for_one_model(folder: Path) -> None:
    save_shards(folder, right_shards(), BASE, variant="fp16")
    index = folder / f"{BASE}.safetensors.index.fp16.json"
    (folder / f"{BASE}.fp16.safetensors.index.json").write_text(index.read_text())
    refused(folder, "two indices", variant="fp16")


def test_hub_layout_of_links_is_followed_and_names_stay_the_users(folder: Path, tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        os.rename(path, blobs / f"{number:064x}")
        path.symlink_to(os.path.relpath(blobs / f"{number:064x}", folder))
    assert values(find_weights(folder)) == RIGHT
    name = f"{BASE}-00002-of-00003.safetensors"
    blob = (folder / name).resolve()
    blob.write_bytes(blob.read_bytes()[:-1])
    refused(folder, str(folder / name), "truncated")
    blob.unlink()
    refused(folder, name, "broken link")


# --- variants ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [BASE, "model", "pytorch_model"])
@pytest.mark.parametrize("placement", ["before", "after"])
def test_sharded_variant_in_both_placements(tmp_path: Path, base: str, placement: str) -> None:
    shards = right_shards()
    save_shards(tmp_path, [shard(*RIGHT, value=-9.0)], base)
    if placement == "before":
        save_shards(tmp_path, shards, base, variant="fp16")
    else:
        names = [f"{base}-{n:05d}-of-00003.fp16.safetensors" for n in (1, 2, 3)]
        for name, tensors in zip(names, shards, strict=True):
            save_file(tensors, tmp_path / name)
        weight_map = {key: name for name, tensors in zip(names, shards, strict=True) for key in tensors}
        write_index(tmp_path / f"{base}.fp16.safetensors.index.json", weight_map)
    assert values(find_weights(tmp_path, "fp16")) == RIGHT
    assert set(values(find_weights(tmp_path)).values()) == {-9.0}


def test_single_file_variant(tmp_path: Path) -> None:
    save_file(shard("a", value=1.0), tmp_path / "model.safetensors")
    save_file(shard("a", value=2.0), tmp_path / "model.fp16.safetensors")
    assert values(find_weights(tmp_path)) == {"a": 1.0}
    assert values(find_weights(tmp_path, "fp16")) == {"a": 2.0}


def test_a_variant_is_never_replaced_by_another(tmp_path: Path) -> None:
    save_file(shard("a", value=1.0), tmp_path / "model.safetensors")
    refused(tmp_path, "'fp16'", "no variants", "plain", variant="fp16", kind=ModelError)
    save_file(shard("a", value=1.0), tmp_path / "model.bf16.safetensors")
    refused(tmp_path, "'fp16'", "did you mean 'bf16'", "plain", variant="fp16", kind=ModelError)
    (tmp_path / "model.safetensors").unlink()
    refused(tmp_path, "no plain weights", "'bf16'", kind=ModelError)


# --- without an index --------------------------------------------------------------------------------------------


def test_shards_without_their_index(folder: Path) -> None:
    (folder / f"{BASE}.safetensors.index.json").unlink()
    refused(folder, "3 shards", f"{BASE}.safetensors.index.json", "missing")


def test_single_file_beside_stale_shards_without_index(tmp_path: Path) -> None:
    save_file(shard("a", value=1.0), tmp_path / "model.safetensors")
    save_file(shard("a", value=-9.0), tmp_path / "model-00001-of-00002.safetensors")
    assert values(find_weights(tmp_path)) == {"a": 1.0}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"_class_name": "FluxTransformer2DModel"}, 1.0),
        ({"architectures": ["T5EncoderModel"]}, 2.0),
        ({"model_type": "qwen3"}, 2.0),
        ({"_class_name": "X", "model_type": "qwen3"}, 1.0),
    ],
)
def test_two_base_names_are_decided_by_the_config(tmp_path: Path, config: dict[str, object], expected: float) -> None:
    save_file(shard("a", value=1.0), tmp_path / f"{BASE}.safetensors")
    save_file(shard("a", value=2.0), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert values(find_weights(tmp_path)) == {"a": expected}


@pytest.mark.parametrize("config", [None, "{}", "[]", "{", "\xff"])
def test_two_base_names_without_a_verdict(tmp_path: Path, config: str | None) -> None:
    save_file(shard("a", value=1.0), tmp_path / f"{BASE}.safetensors")
    save_file(shard("a", value=2.0), tmp_path / "model.safetensors")
    if config is not None:
        (tmp_path / "config.json").write_text(config, encoding="latin-1")
    refused(tmp_path, BASE, "model", "config.json", kind=ModelError)


def test_nothing_to_load(tmp_path: Path) -> None:
    refused(tmp_path, "no weights", kind=ModelError)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    refused(tmp_path, "pickle", "pytorch_model.bin", "safe_serialization", kind=ModelError)
    save_file(shard("a", value=1.0), tmp_path / "flux1-dev.safetensors")
    refused(tmp_path, "flux1-dev.safetensors", "path of the file", kind=ModelError)
    refused(tmp_path / "absent", "no such folder", kind=ModelError)


def test_single_file(tmp_path: Path) -> None:
    path = tmp_path / "any-name.safetensors"
    save_file(shard("a", value=1.0), path, metadata={"k": "v"})
    weights = single_file(str(path))
    assert (weights.files, list(weights.tensors), weights.metadata) == ([path], ["a"], {path: {"k": "v"}})
