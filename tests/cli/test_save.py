from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from omniloom.cli.save import atomic, describe, save_frames, save_image, save_json
from omniloom.errors import EngineError

SETTINGS: dict[str, Any] = {
    "omniloom": "0.1.0",
    "model": "demo",
    "prompt": "a füchs, \n[bold] on blue ✓",
    "seed": 7,
    "params": {
        "num_inference_steps": 20,
        "width": 64,
        "height": 32,
        "guidance_scale": 3.5,
        "negative_prompt": "ugly",
        "seed": 5,
        "num_outputs_per_prompt": 3,
        "output_type": "pil",
    },
}


def square(side: int = 16, colour: tuple[int, int, int] = (200, 30, 30)) -> Image.Image:
    return Image.new("RGB", (side, side), colour)


def test_png_carries_its_settings(tmp_path: Path) -> None:
    save_image(tmp_path / "new" / "a.png", square(), SETTINGS)
    with Image.open(tmp_path / "new" / "a.png") as image:
        assert json.loads(image.text["omniloom"]) == SETTINGS
        assert image.text["parameters"] == describe(SETTINGS)
        assert image.getpixel((3, 3)) == (200, 30, 30)
    raw = (tmp_path / "new" / "a.png").read_bytes()
    assert b"tEXtomniloom\0" in raw


def test_settings_as_people_read_them() -> None:
    assert describe(SETTINGS).splitlines()[-1] == (
        "Steps: 20, Seed: 7, Size: 64x32, Guidance scale: 3.5, Model: demo, Version: omniloom 0.1.0"
    )
    assert "Negative prompt: ugly" in describe(SETTINGS)


@pytest.mark.parametrize(
    ("name", "kind"), [("a.jpg", "JPEG"), ("a.JPEG", "JPEG"), ("a.webp", "WEBP"), ("a.PNG", "PNG")]
)
def test_the_suffix_decides_the_format(tmp_path: Path, name: str, kind: str) -> None:
    save_image(tmp_path / name, square().convert("RGBA"), SETTINGS)
    with Image.open(tmp_path / name) as image:
        assert image.format == kind
    assert os.listdir(tmp_path) == [name]


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError), atomic(path) as temporary:
        temporary.write_bytes(b"half")
        raise RuntimeError
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.png"]


def test_the_system_refuses(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EngineError, match="cannot write"):
        save_json(tmp_path / "file" / "a.json", {})
    (tmp_path / "a.png").mkdir()
    with pytest.raises(EngineError, match="cannot write"):
        save_image(tmp_path / "a.png", square(), SETTINGS)
    assert sorted(os.listdir(tmp_path)) == ["a.png", "file"]


def test_files_have_the_usual_permissions(tmp_path: Path) -> None:
    save_json(tmp_path / "a.json", {"a": "ü"})
    (tmp_path / "b").touch()
    assert (tmp_path / "a.json").stat().st_mode == (tmp_path / "b").stat().st_mode
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == {"a": "ü"}


def test_gif(tmp_path: Path) -> None:
    save_frames(tmp_path / "a.gif", [square(colour=(i * 60, 0, 0)) for i in range(4)], 10.0)
    with Image.open(tmp_path / "a.gif") as image:
        assert (image.n_frames, image.info["duration"]) == (4, 100)


@pytest.mark.parametrize(("side", "fps"), [(16, 8.0), (17, 23.976)])
def test_mp4(tmp_path: Path, side: int, fps: float) -> None:
    av = pytest.importorskip("av", reason="needs the video extra")
    save_frames(tmp_path / "a.mp4", [square(side, (i * 60, 0, 0)) for i in range(4)], fps)
    with av.open(str(tmp_path / "a.mp4")) as container:
        stream = container.streams.video[0]
        frames = [frame.to_image() for frame in container.decode(stream)]
        assert float(stream.average_rate) == pytest.approx(fps, rel=0.01)
    assert len(frames) == 4 and frames[0].size == (16, 16)
    red, _, _ = frames[3].getpixel((5, 5))
    assert red == pytest.approx(180, abs=12)
    assert os.listdir(tmp_path) == ["a.mp4"]
