"""The real thing: a model from the disk, a picture on the disk."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image, ImageChops

from omniloom import Omni, SamplingParams
from omniloom.errors import ModelError
from omniloom.pipelines.demo import demo_folder
from tests.cli.conftest import Cli


@pytest.fixture
def flux(tiny_folder: Callable[[str], Path]) -> Path:
    return tiny_folder("flux")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def same_pixels(one: Image.Image, other: Image.Image) -> bool:
    return one.size == other.size and ImageChops.difference(one, other).getbbox() is None


def test_the_picture_is_the_one_that_python_makes(cli: Cli, flux: Path) -> None:
    result = cli(
        "generate", flux, "-p", "a fox", "--size", "64x32", "--steps", 2, "--seed", 3, "--n", 2, "--dtype", "float32",
        "-o", "a.png", "--json", "--report", "r.json",
    )  # fmt: skip
    assert result.code == 0, result.err
    params = SamplingParams(width=64, height=32, num_inference_steps=2, seed=3, num_outputs_per_prompt=2)
    with Omni(flux, dtype="float32") as omni:
        [output] = omni.generate("a fox", params)
    assert output.images is not None
    data = json.loads(result.out)
    assert (data["files"], data["seeds"]) == (["a-0.png", "a-1.png"], [3, 4])
    for index, image in enumerate(output.images):
        with Image.open(f"a-{index}.png") as saved:
            assert same_pixels(saved, image)
            settings = json.loads(saved.text["omniloom"])
    assert (settings["seed"], settings["pipeline"], settings["config"]["dtype"]) == (4, "FluxPipeline", "float32")
    report = json.loads(Path("r.json").read_text())["report"]
    assert report["components"]["transformer"]["class"] == "FluxTransformer2DModel"


def test_a_picture_can_be_made_again_from_its_metadata(cli: Cli, flux: Path) -> None:
    words = ("generate", flux, "-p", "a fox", "--size", "32x32", "--steps", 1)
    assert cli(*words, "-o", "a.png").code == 0
    with Image.open("a.png") as image:
        seed = json.loads(image.text["omniloom"])["seed"]
    assert cli(*words, "--seed", seed, "-o", "b.png").code == 0
    with Image.open("a.png") as one, Image.open("b.png") as other:
        assert same_pixels(one, other)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--size", "65x65"], 2, "nearest"),
        (["--frames", "3"], 2, "num_frames"),
        (["--scheduler", "oiler"], 2, "oiler"),
        (["--set", "vae.tilling=true"], 2, "did you mean 'tiling'"),
        (["--set", "engine.workers=0"], 2, "engine.workers=0"),
    ],
)
def test_what_this_model_cannot_do(cli: Cli, flux: Path, words: list[str], code: int, message: str) -> None:
    result = cli("generate", flux, "-p", "a fox", "-q", *words)
    assert result.code == code
    assert message in result.complaint
    assert os.listdir() == []


@pytest.mark.parametrize("name", ["no-such-folder", "owner/no-such-model"])
def test_what_is_no_model(cli: Cli, name: str) -> None:
    result = cli("generate", name, "-p", "a fox", "-q")
    assert result.code == 3
    assert name in result.complaint
    assert os.listdir() == []


def start(*words: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "omniloom", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_as_a_process_stdout_holds_the_path_and_nothing_else(flux: Path) -> None:
    process = start("generate", flux, "-p", "a fox", "--size", "32x32", "--steps", "1", "-o", "a.png")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (0, "a.png\n")
    for noise in ("Traceback", "Warning", "torchvision", "it/s"):
        assert noise not in err


def test_ctrl_c(flux: Path) -> None:
    process = start("generate", flux, "-p", "a fox", "--size", "256x256", "--steps", "10000", "-o", "a.png")
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("loading vae"):
            break
    time.sleep(1.0)
    for _ in range(4):  # Python loses a signal that arrives inside a callback of its own; people press again
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            out, err = process.communicate(timeout=20)
            break
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "error: interrupted" and "Traceback" not in err
    assert os.listdir() == []


def test_the_demo(cli: Cli) -> None:
    try:
        demo_folder()
    except ModelError:
        pytest.skip("this checkout has no demo model")
    result = cli("generate", "--prompt", "a fox on blue", "--seed", 1, "-o", "demo.png")
    assert (result.code, result.out) == (0, "demo.png\n"), result.err
    with Image.open("demo.png") as image:
        red, _, blue = image.convert("RGB").getpixel((2, 2))
    assert blue > red + 40
