from __future__ import annotations

from pathlib import Path

import pytest
from diffusers.utils.hub_utils import _add_variant

from omniloom.checkpoint.names import scan


@pytest.mark.parametrize(
    ("name", "base", "variant", "role"),
    [
        ("model.safetensors", "model", None, "single"),
        ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model", None, "single"),
        ("diffusion_pytorch_model.non_ema.safetensors", "diffusion_pytorch_model", "non_ema", "single"),
        ("model-00001-of-00002.safetensors", "model", None, "shards"),
        ("model.fp16-00001-of-00002.safetensors", "model", "fp16", "shards"),
        ("model-00001-of-00002.fp16.safetensors", "model", "fp16", "shards"),
        ("model.safetensors.index.json", "model", None, "index"),
        ("model.safetensors.index.fp16.json", "model", "fp16", "index"),
        ("model.fp16.safetensors.index.json", "model", "fp16", "index"),
        (_add_variant("diffusion_pytorch_model.safetensors", "bf16"), "diffusion_pytorch_model", "bf16", "single"),
        (
            _add_variant("diffusion_pytorch_model.safetensors.index.json", "bf16"),
            "diffusion_pytorch_model",
            "bf16",
            "index",
        ),
    ],
)
def test_known_names(tmp_path: Path, name: str, base: str, variant: str | None, role: str) -> None:
    (tmp_path / name).touch()
    (found,) = scan(tmp_path)
    assert (found.base, found.variant) == (base, variant)
    assert getattr(found, role) == ([name] if role == "shards" else name)


@pytest.mark.parametrize(
    "name",
    [
        "my_model.safetensors",
        "model2.safetensors",
        "model_fp16.safetensors",
        "model.bin",
        "model.safetensors.part",
        "model-1-of-2.safetensors",
        "pytorch_model.bin.index.json",
        "model.safetensors.index.json.bak",
        ".model.safetensors",
    ],
)
def test_other_names_are_ignored(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert scan(tmp_path) == []
