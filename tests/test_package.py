"""The package as a whole: importing it costs nothing, its public names are there, its metadata is what it says."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import omniloom

ROOT = Path(__file__).parents[1]


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_light() -> None:
    code = """
import json, sys, time
before = set(sys.modules)
start = time.process_time()
import omniloom
seconds = time.process_time() - start
omniloom.__version__, omniloom.errors, omniloom.SamplingParams, omniloom.RuntimeConfig, omniloom.Output
print(json.dumps([seconds, sorted(set(sys.modules) - before)]))
"""
    seconds, loaded = json.loads(run_python(code))
    heavy = {name.partition(".")[0] for name in loaded} & {"torch", "diffusers", "transformers", "numpy", "PIL", "rich"}
    assert not heavy
    assert seconds < 0.05


def test_import_has_no_side_effects() -> None:
    code = """
import logging, os, sys, threading, warnings
def look():
    return dict(os.environ), list(warnings.filters), logging.root.handlers[:], threading.active_count(), sys.excepthook
before = look()
import omniloom
assert look() == before
"""
    assert run_python(code) == ""


def test_public_names() -> None:
    assert set(omniloom.__all__) <= set(dir(omniloom))
    for name in omniloom.__all__:
        assert getattr(omniloom, name) is not None
    from omniloom.omni import Omni

    assert omniloom.Omni is Omni
    with pytest.raises(AttributeError, match="no attribute 'Omny'"):
        _ = omniloom.Omny


def test_version_has_one_source() -> None:
    assert importlib.metadata.version("omniloom") == omniloom.__version__


def test_at_most_ten_dependencies_each_with_a_range() -> None:
    requirements = [r for r in importlib.metadata.requires("omniloom") or [] if "extra ==" not in r]
    assert 0 < len(requirements) <= 10
    for requirement in requirements:
        assert ">=" in requirement and "<" in requirement.replace("<=", ""), requirement
        assert "==" not in requirement


def test_licence_is_shipped() -> None:
    files = {path.name for path in importlib.metadata.files("omniloom") or []}
    assert {"LICENSE", "NOTICE"} <= files
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")


def build(target: str, folder: Path) -> list[str]:
    """Build the wheel or the sdist from the checkout and list what is in it."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [archive] = folder.iterdir()
    if target == "wheel":
        return zipfile.ZipFile(archive).namelist()
    with tarfile.open(archive) as tar:
        return [name.partition("/")[2] for name in tar.getnames()]


def test_the_wheel_holds_the_package_and_the_demo_model(tmp_path: Path) -> None:
    names = build("wheel", tmp_path)
    assert {"omniloom/__init__.py", "omniloom/py.typed", "omniloom/cli/app.py"} <= set(names)
    assert {name.partition("/")[0] for name in names} == {"omniloom", f"omniloom-{omniloom.__version__}.dist-info"}
    if (ROOT / "demo" / "model").is_dir():
        assert "omniloom/demo_model/model_index.json" in names
        assert any(name.startswith("omniloom/demo_model/") and name.endswith(".safetensors") for name in names)


def test_the_sdist_holds_what_builds_the_wheel(tmp_path: Path) -> None:
    names = build("sdist", tmp_path)
    assert {"pyproject.toml", "LICENSE", "NOTICE", "README.md", "Makefile", "src/omniloom/__init__.py"} <= set(names)
    assert "tests/test_package.py" in names
    if (ROOT / "demo" / "model").is_dir():
        assert "demo/model/model_index.json" in names
