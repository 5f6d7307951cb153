from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from omniloom.errors import EngineError, MemoryLimitError, RequestError
from tests.cli.conftest import Cli
from tests.cli.fake import FakeOmni


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeOmni]:
    class Fresh(FakeOmni):
        calls: list[dict[str, Any]] = []

    monkeypatch.setattr("omniloom.omni.Omni", Fresh)
    return Fresh


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_last_line_on_stdout_is_the_path(cli: Cli, fake: type[FakeOmni]) -> None:
    result = cli("generate", "--prompt", "a fox", "-o", "sub/fox.png")
    assert (result.code, result.out) == (0, "sub/fox.png\n")
    assert "a library prints this" in result.err
    assert "loading transformer" in result.err and "step 2/2" in result.err
    assert result.err.splitlines()[-1].startswith("16x16, 2 steps at 4.0 steps/s, seed 1234, ")
    assert fake.calls[-1] == {"unloaded": True}
    assert os.listdir("sub") == ["fox.png"]


def test_only_typed_flags_reach_the_model(cli: Cli, fake: type[FakeOmni]) -> None:
    cli("generate", "-p", "a fox")
    call = fake.calls[0]
    assert (call["model"], call["prompt"], call["params"].given()) == ("demo", {"prompt": "a fox"}, {})
    assert all(call["config"].source(key) == "default" for key in call["config"])


def test_every_flag_reaches_the_model(cli: Cli, fake: type[FakeOmni]) -> None:
    Image.new("RGB", (8, 8)).save("in.png")
    words = (
        "generate some/model -p fox --negative-prompt ugly --image in.png --mask in.png --size 64x32 --steps 4 "
        "--seed 0 --n 2 --guidance-scale 0 --true-cfg-scale 1.5 --strength 0.25 --max-sequence-length 77 --frames 3 "
        "--fps 12 --dtype fp32 --device cpu --scheduler euler --set vae.tiling=true -o out.png"
    )
    assert cli(*words.split()).code == 0
    call = fake.calls[0]
    assert call["model"] == "some/model"
    assert call["prompt"] == {"prompt": "fox", "negative_prompt": "ugly", "image": ["in.png"], "mask_image": "in.png"}
    assert call["params"].given() == {
        "num_inference_steps": 4,
        "height": 32,
        "width": 64,
        "guidance_scale": 0.0,
        "true_cfg_scale": 1.5,
        "seed": 0,
        "num_outputs_per_prompt": 2,
        "num_frames": 3,
        "fps": 12.0,
        "strength": 0.25,
        "max_sequence_length": 77,
    }
    cfg = call["config"]
    assert (cfg.dtype, cfg.device, cfg.vae.tiling) == ("float32", "cpu", True)
    assert cfg.scheduler["name"] == "euler"
    assert sorted(os.listdir()) == ["in.png", "out-0.png", "out-1.png"]


def test_metadata(cli: Cli, fake: type[FakeOmni], here: Path) -> None:
    (here / "my-model").mkdir()
    cli("generate", here / "my-model", "-p", "a fox", "--seed", 5, "--n", 2, "--steps", 3, "-o", "a.png")
    with Image.open("a-1.png") as image:
        settings = json.loads(image.text["omniloom"])
        assert image.text["parameters"].startswith("a fox\nSteps: 3, Seed: 6, Size: 16x16")
    assert (settings["model"], settings["seed"], settings["index"], settings["pipeline"]) == (
        "my-model",
        6,
        1,
        "FakePipeline",
    )
    assert settings["params"]["num_inference_steps"] == 3
    assert (settings["config"]["dtype"], settings["config"]["device"]) == ("float32", "cpu")
    assert str(here) not in json.dumps(settings)
    assert "secret" not in json.dumps(settings)


def test_folder_and_default_names(cli: Cli, fake: type[FakeOmni]) -> None:
    assert cli("generate", "-p", "x").out == "omniloom-1234.png\n"
    assert cli("generate", "-p", "x").out == "omniloom-1234-2.png\n"
    assert cli("generate", "-p", "x", "-o", "new", "--n", 2).out == "new/omniloom-1234.png\nnew/omniloom-1235.png\n"


def test_a_named_file_is_overwritten(cli: Cli, fake: type[FakeOmni], here: Path) -> None:
    (here / "a.png").write_bytes(b"old")
    assert cli("generate", "-p", "x", "-o", "a.png").code == 0
    with Image.open("a.png") as image:
        assert image.size == (16, 16)


def test_json_and_report(cli: Cli, fake: type[FakeOmni]) -> None:
    result = cli("generate", "-p", "x", "-o", "a.png", "--json", "--report", "r/report.json")
    data = json.loads(result.out)
    assert data["files"] == ["a.png"]
    assert (data["seeds"], data["prompt"], data["params"]["width"]) == ([1234], "x", 16)
    assert data["metrics"]["steps"] == 2 and data["metrics"]["seconds_load"] >= 0
    report = json.loads(Path("r/report.json").read_text())
    assert report["report"]["pipeline"] == "FakePipeline"
    assert report["files"] == ["a.png"]


def test_quiet_says_nothing_but_the_path(cli: Cli, fake: type[FakeOmni]) -> None:
    fake.warnings = ["guidance_scale has no effect"]
    result = cli("generate", "-p", "x", "-o", "a.png", "-q")
    assert (result.out, result.err) == ("a.png\n", "a library prints this\n")


def test_warnings_of_the_model_are_told(cli: Cli, fake: type[FakeOmni]) -> None:
    fake.warnings = ["guidance_scale has no effect"]
    result = cli("generate", "-p", "x", "-o", "a.png")
    assert "warning: guidance_scale has no effect" in result.err.splitlines()


def test_video(cli: Cli, fake: type[FakeOmni]) -> None:
    fake.moving = True
    assert cli("generate", "-p", "x", "-o", "a.gif", "--fps", 10, "--n", 2).out == "a-0.gif\na-1.gif\n"
    with Image.open("a-0.gif") as image:
        assert image.info["duration"] == 100


def test_pictures_asked_for_as_a_video_are_not_lost(cli: Cli, fake: type[FakeOmni]) -> None:
    result = cli("generate", "-p", "x", "-o", "a.gif")
    assert (result.code, result.out) == (0, "a.png\n")
    assert "warning: this model makes images, so a.png is written instead of a.gif" in result.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-p", ""], "the prompt is empty"),
        (["-p", " \t\n"], "the prompt is empty"),
        (["-p", "x", "--size", "1024x"], "--size '1024x': must be WIDTHxHEIGHT"),
        (["-p", "x", "--size", "-64x64"], "--size '-64x64': must be WIDTHxHEIGHT"),
        (["-p", "x", "--size", "0x64"], "each side must be from 1 to"),
        (["-p", "x", "--size", "100000x10000"], "each side must be from 1 to"),
        (["-p", "x", "--steps", "0"], "--steps 0: must be from 1 to"),
        (["-p", "x", "--steps", "-1"], "--steps -1: must be from 1 to"),
        (["-p", "x", "--steps", "1.5"], "'--steps'"),
        (["-p", "x", "--steps", "true"], "'--steps'"),
        (["-p", "x", "--steps", "99999999"], "--steps 99999999: must be from 1 to"),
        (["-p", "x", "--n", "0"], "--n 0: must be from 1 to"),
        (["-p", "x", "--n", "1000"], "--n 1000: must be from 1 to"),
        (["-p", "x", "--seed", "-1"], "--seed -1: must be from 0 to"),
        (["-p", "x", "--seed", "18446744073709551616"], "--seed 18446744073709551616: must be from 0 to"),
        (["-p", "x", "--guidance-scale", "nan"], "--guidance-scale nan: must be a number"),
        (["-p", "x", "--guidance-scale", "-1"], "--guidance-scale -1"),
        (["-p", "x", "--strength", "1.5"], "--strength 1.5: must be a number from 0 to 1"),
        (["-p", "x", "--frames", "0"], "--frames 0"),
        (["-p", "x", "--fps", "0"], "--fps 0"),
        (["-p", "x", "--max-sequence-length", "0"], "--max-sequence-length 0"),
        (["-p", "x", "-o", "a.bmp"], "cannot write '.bmp' files"),
        (["-p", "x", "--dtype", "int3"], "option dtype='int3': must be one of"),
        (["-p", "x", "--device", "tpu"], "option device='tpu': must be one of"),
        (["-p", "x", "--set", "vae"], "must be key=value"),
        (["-p", "x", "--set", "tiling=true"], "unknown option 'tiling'"),
        (["-p", "x", "--image", "none.png"], "none.png does not exist"),
        (["-p", "x", "--mask", "none.png"], "a mask needs an image"),
        (["-p", "x", "--config", "none.yaml"], "cannot read the configuration file none.yaml"),
        (["-p", "x", "--report", "."], "--report .: is a folder"),
    ],
)
def test_bad_input_is_refused_before_a_model_is_loaded(
    cli: Cli, fake: type[FakeOmni], words: list[str], message: str
) -> None:
    result = cli("generate", *words)
    assert result.code == 2
    assert message in result.complaint
    assert fake.calls == [] and os.listdir() == []


@pytest.mark.parametrize(
    ("error", "code"),
    [(RequestError("size 65x65"), 2), (MemoryLimitError("m"), 4), (EngineError("e"), 5), (KeyboardInterrupt(), 130)],
)
def test_failures_while_running(cli: Cli, fake: type[FakeOmni], error: BaseException, code: int) -> None:
    fake.error = error
    result = cli("generate", "-p", "x", "-o", "a.png", "--report", "r.json", "-q")
    assert (result.code, result.out) == (code, "")
    assert fake.calls[-1] == {"unloaded": True}
    assert os.listdir() == []
