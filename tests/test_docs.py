"""The examples in the README and the docs are part of the contract: they run as they stand."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from omniloom.cli.app import app, main
from omniloom.config import options
from omniloom.quantization import build_quant_config
from omniloom.quantization.catalog import as_markdown, known_devices
from omniloom.quantization.methods import get_method

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
METHOD_PAGES = sorted((ROOT / "docs" / "quantization").glob("*.md"))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_python_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for code in blocks(page, "python"):
        exec(compile(code, str(page), "exec"), names)
    assert list(tmp_path.glob("*.png")) or page.parent.name == "quantization"


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


@pytest.mark.parametrize("page", METHOD_PAGES, ids=lambda page: page.name)
def test_commands_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    commands = [line for block in blocks(page, "") for line in block.splitlines() if line.startswith("omniloom ")]
    assert commands
    for command in commands:
        assert main([*shlex.split(command)[1:], *(["--quiet"] if " methods" not in command else [])]) == 0, command


@pytest.mark.parametrize("method", ["fp8", "int8", "bitsandbytes", "mxfp8", "mxfp4", "mxfp4_dualscale"])
def test_every_key_of_a_method_is_documented_with_its_default(method: str) -> None:
    page = ROOT / "docs" / "quantization" / f"{method.removesuffix('_dualscale')}.md"
    text = page.read_text(encoding="utf-8") + (page.parent / "online.md").read_text(encoding="utf-8")
    text = text.split("`mxfp4_dualscale`:\n")[1] if method == "mxfp4_dualscale" else text
    config = get_method(method)()
    written = dict(re.findall(r"^\| `(\w+)` \| `?([^`|]+)`? \|", text, flags=re.MULTILINE))
    for field in dataclasses.fields(config):
        if field.name not in written:
            assert f"`{field.name}`" in text, field.name
        elif written[field.name].strip() != "none":
            default = build_quant_config(method).to_dict()[field.name]  # type: ignore[union-attr]
            assert json.loads(written[field.name]) == default, field.name


def test_the_table_of_methods_is_what_the_command_prints() -> None:
    text = (ROOT / "docs" / "quantization" / "overview.md").read_text(encoding="utf-8")
    table = re.search(r"<!-- methods table -->\n(.*?)<!-- end of methods table -->", text, flags=re.DOTALL)
    assert table is not None
    assert table[1].strip() == as_markdown(known_devices()).strip(), "run: omniloom methods --all --markdown"


def test_every_option_is_documented() -> None:
    text = (ROOT / "docs" / "usage.md").read_text(encoding="utf-8")
    for name in options():
        assert f"`{name}`" in text, name
