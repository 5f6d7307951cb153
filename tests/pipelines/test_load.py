"""From what the user typed to a plan: where the model is, what it needs, and whether it fits."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from omniloom import Omni
from omniloom.config import RuntimeConfig
from omniloom.errors import ConfigError, MemoryLimitError, ModelError
from omniloom.pipelines import load
from tests.fixtures.reference import load as load_by_diffusers


def test_what_does_not_fit_is_refused_before_anything_is_read(tiny_folder, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(load, "available_bytes", lambda: 1000)
    with pytest.raises(MemoryLimitError, match="GiB for its weights in bfloat16") as caught:
        Omni(tiny_folder("flux"), dtype="bfloat16", device="cpu", on_load=lambda name, *_: read.append(name))
    assert caught.value.exit_code == 4 and not read
    Omni(tiny_folder("flux"), dtype="float32", device="cpu").unload()  # mapped: needs no memory of its own


def test_the_plan_counts_the_bytes_that_are_converted(tiny_folder, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    pipe = load_by_diffusers(tiny_folder("flux"), dtype=torch.bfloat16)
    pipe.save_pretrained(folder)
    tensors = [t for c in pipe.components.values() if isinstance(c, torch.nn.Module) for t in c.state_dict().values()]
    tied = pipe.text_encoder_2.shared.weight.numel()  # stored once, listed twice by the module
    floats = sum(t.numel() for t in tensors if t.is_floating_point()) - tied
    for dtype, expected in (("float32", 4 * floats), ("bfloat16", 0)):
        with Omni(folder, dtype=dtype, device="cpu") as omni:
            plan = omni.report.to_dict()["plan"]
            assert plan["needed_bytes"] == expected
            assert (plan["dtype"], plan["device"], plan["folder"]) == (dtype, "cpu", str(folder))


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"dtype": "float64"}, ConfigError, "must be one of auto, float32"),
        ({"device": "gpu"}, ConfigError, "must be one of auto, cpu, cuda"),
        ({"device": "cuda:7"}, ConfigError, "not available here; see: omniloom check"),
        ({"engine": {"workers": 0}}, ConfigError, "must be from 1 to 64"),
        ({"engine": {"workers": True}}, ConfigError, "engine.workers=True"),
        ({"quantization_config": "fp9"}, ConfigError, "unknown quantization method 'fp9'; did you mean 'fp8'"),
        ({"variant": "fp16"}, ModelError, "no files of variant 'fp16'"),
        ({"offline": "yes"}, ConfigError, "must be true or false"),
    ],
)
def test_wrong_options_are_one_line(tiny_folder, options: dict, error: type[Exception], said: str) -> None:
    if options.get("device") == "cuda:7" and torch.cuda.device_count() > 7:
        pytest.skip("there is such a device")
    with pytest.raises(error) as caught:
        Omni(tiny_folder("flux"), **{"device": "cpu", **options})
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_config_and_keywords_meet(tiny_folder) -> None:
    config = RuntimeConfig.resolve(file={"dtype": "bfloat16", "vae": {"tiling": True}, "device": "cpu"})
    with Omni(tiny_folder("flux"), config=config, vae={"slicing": True}, dtype=torch.float32) as omni:
        assert omni.config.dtype == "float32"
        assert omni.config.vae.tiling and omni.config.vae.slicing
        dump = omni.config.to_dict()
    assert RuntimeConfig.resolve(dump=dump) == omni.config


def test_defaults_of_a_folder(tiny_folder, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder("flux"), tmp_path / "model")
    (folder / "omniloom.json").write_text('{"defaults": {"num_inference_steps": 3, "height": 32, "width": 32}}')
    with Omni(folder, dtype="float32", device="cpu") as omni:
        [out] = omni.generate("a fox")
        assert out.metrics["steps"] == 3 and out.images[0].size == (32, 32)
        assert omni.defaults.num_inference_steps == 3
    for text, said in (
        ("{", "not valid"),
        ('{"defaults": 3}', "must be an object"),
        ('{"defaults": {"stepz": 1}}', "stepz"),
    ):
        (folder / "omniloom.json").write_text(text)
        with pytest.raises(ModelError, match=said):
            Omni(folder, dtype="float32", device="cpu")


def test_from_pipeline_keeps_what_the_object_is(tiny_folder) -> None:
    pipe = load_by_diffusers(tiny_folder("flux"))
    for options in ({"dtype": "bfloat16"}, {"device": "cpu"}, {"base": "x"}):
        with pytest.raises(ConfigError, match="cannot be used with from_pipeline"):
            Omni.from_pipeline(pipe, **options)
    with Omni.from_pipeline(pipe, scheduler={"shift": 7.0}) as omni:
        assert omni._pipe.scheduler.config.shift == 7.0
    assert pipe.scheduler.config.shift != 7.0
