from __future__ import annotations

from pathlib import Path

import pytest

import omniloom.omni  # noqa: F401  (registers every option)
from omniloom.cli.request import Flags, in_flags, make_job
from omniloom.config import UNSET
from omniloom.errors import ConfigError, RequestError


def test_only_what_was_typed_is_passed_on() -> None:
    job = make_job(Flags("a fox", sampling={"num_inference_steps": None, "seed": 0, "guidance_scale": 0.0}))
    assert job.params.given() == {"seed": 0, "guidance_scale": 0.0}
    assert job.params.num_inference_steps is UNSET
    assert job.prompt == {"prompt": "a fox"}
    assert {key for key in job.config() if job.config().source(key) != "default"} == set()


def test_everything_at_once(tmp_path: Path) -> None:
    from PIL import Image

    for name in ("a.png", "b.png", "m.png"):
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    flags = Flags(
        "a fox",
        negative_prompt="",
        images=(tmp_path / "a.png", tmp_path / "b.png"),
        mask=tmp_path / "m.png",
        size="128x64",
        options={"dtype": "bf16", "device": None},
        settings=("vae.tiling=true", "engine.workers=2"),
    )
    job = make_job(flags)
    assert job.prompt["image"] == [f"{tmp_path}/a.png", f"{tmp_path}/b.png"]
    assert (job.prompt["mask_image"], job.prompt["negative_prompt"]) == (f"{tmp_path}/m.png", "")
    assert job.params.given() == {"width": 128, "height": 64}
    cfg = job.config()
    assert (cfg.dtype, cfg.vae.tiling, cfg.engine.workers) == ("bfloat16", True, 2)
    assert (cfg.source("dtype"), cfg.source("device")) == ("cli", "default")


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "dtype: float32\nvae: {tiling: true}\nparams: {seed: 3, num_inference_steps: 5, guidance_scale: 2}\n"
    )
    job = make_job(
        Flags("x", sampling={"seed": 9}, options={"dtype": "fp16"}, settings=("vae.slicing=true",), config=path)
    )
    assert job.params.given() == {"seed": 9, "num_inference_steps": 5, "guidance_scale": 2}
    cfg = job.config()
    assert (cfg.dtype, cfg.vae.tiling, cfg.vae.slicing) == ("float16", True, True)
    assert (cfg.source("dtype"), cfg.source("vae")) == ("cli", "cli")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("params: [1]", "'params' must be a mapping"),
        ("params: {sede: 1}", "unknown parameter 'sede'; did you mean 'seed'"),
        ("params: {seed: -1}", "seed=-1"),
        ("params: {output_type: latent}", "output_type='latent' cannot be used here"),
        ("dtype: int3", "option dtype='int3': must be one of"),
        ("vae: {tilling: true}", "unknown key 'tilling'"),
    ],
)
def test_what_a_file_may_not_say(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises((ConfigError, RequestError), match=message):
        make_job(Flags("x", config=path))


def test_one_option_typed_two_ways() -> None:
    with pytest.raises(ConfigError, match="--dtype and --set dtype=… are both given"):
        make_job(Flags("x", options={"dtype": "fp16"}, settings=("dtype=fp32",)))


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("num_inference_steps=0: must be from 1 to 5", "--steps 0: must be from 1 to 5"),
        ("num_outputs_per_prompt=-1: no", "--n -1: no"),
        ("height=3: no", "height=3: no"),
        ("anything else", "anything else"),
    ],
)
def test_messages_in_words_of_the_command_line(message: str, expected: str) -> None:
    assert in_flags(message) == expected
