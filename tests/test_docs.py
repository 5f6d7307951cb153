"""The examples in the README and the docs are part of the contract: they run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from omniloom.cli.app import app
from omniloom.config import options

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_python_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for code in blocks(page, "python"):
        exec(compile(code, str(page), "exec"), names)
    assert list(tmp_path.glob("*.png"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_commands_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (page.parent / target).exists(), target
    help_text = CliRunner().invoke(app, ["generate", "--help"], env={"COLUMNS": "200"}).output
    for line in re.findall(r"^omniloom generate .*$", text, flags=re.MULTILINE):
        for flag in re.findall(r"(--[a-z-]+)", line):
            assert flag in help_text, flag
    for command in re.findall(r"^make ([a-z-]+)", text, flags=re.MULTILINE):
        assert re.search(rf"^{command}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE), command


def test_every_option_is_documented() -> None:
    text = (ROOT / "docs" / "usage.md").read_text(encoding="utf-8")
    for name in options():
        assert name == "quantization_config" or f"`{name}`" in text, name
