from __future__ import annotations

import os
from pathlib import Path

import pytest

from omniloom.cli import target
from omniloom.cli.target import check_file, plan_target
from omniloom.errors import ConfigError


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_one_file(tmp_path: Path) -> None:
    assert plan_target(f"{tmp_path}/fox.png").paths([7], frames=False) == [tmp_path / "fox.png"]


def test_several_outputs_are_numbered(tmp_path: Path) -> None:
    assert names(plan_target(f"{tmp_path}/fox.JPG").paths([7, 8], frames=False)) == ["fox-0.JPG", "fox-1.JPG"]


def test_a_folder_gets_names_from_the_seeds_and_keeps_what_is_there(tmp_path: Path) -> None:
    for text in (str(tmp_path), f"{tmp_path}/new", f"{tmp_path}/v1.0/"):
        assert names(plan_target(text).paths([7, 8], frames=False)) == ["omniloom-7.png", "omniloom-8.png"]
    (tmp_path / "omniloom-7.png").touch()
    (tmp_path / "omniloom-7-2.png").touch()
    assert names(plan_target(str(tmp_path)).paths([7], frames=False)) == ["omniloom-7-3.png"]


def test_a_folder_whose_name_has_a_suffix(tmp_path: Path) -> None:
    (tmp_path / "v1.0").mkdir()
    assert plan_target(f"{tmp_path}/v1.0").folder == tmp_path / "v1.0"


def test_default_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert plan_target(None).paths([5], frames=False) == [Path("omniloom-5.png")]


def test_no_work_is_lost_to_a_suffix_of_the_other_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "can_write_mp4", lambda: True)
    assert names(plan_target(f"{tmp_path}/a.mp4").paths([1], frames=False)) == ["a.png"]
    assert names(plan_target(f"{tmp_path}/a.png").paths([1], frames=True)) == ["a.mp4"]
    monkeypatch.setattr(target, "can_write_mp4", lambda: False)
    assert names(plan_target(f"{tmp_path}/a.png").paths([1], frames=True)) == ["a.gif"]


@pytest.mark.parametrize("name", ["a.bmp", "a.tiff", "a.png.exe", "a.mov", "out.v2"])
def test_unknown_suffixes(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"allowed: \.png, \.jpg"):
        plan_target(f"{tmp_path}/{name}")


def test_mp4_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "can_write_mp4", lambda: False)
    with pytest.raises(ConfigError, match=r"pip install 'omniloom\[video\]'"):
        plan_target(f"{tmp_path}/a.mp4")


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for text in (f"{tmp_path}/file/a.png", f"{tmp_path}/file", f"{tmp_path}/file/", "", "  "):
        with pytest.raises(ConfigError):
            plan_target(text)
    with pytest.raises(ConfigError, match="is a folder"):
        check_file("--report", tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(ConfigError, match="not writable"):
        plan_target(f"{tmp_path}/locked/new/a.png")
