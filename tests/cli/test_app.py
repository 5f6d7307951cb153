from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import omniloom
from omniloom import errors
from tests.cli.conftest import Cli
from tests.cli.timing import cpu_seconds


def test_version(cli: Cli) -> None:
    for words in (["version"], ["--version"]):
        result = cli(*words)
        assert (result.code, result.out, result.err) == (0, f"omniloom {omniloom.__version__}\n", "")


def test_help_lists_every_command(cli: Cli) -> None:
    for words in (["--help"], ["-h"], []):
        result = cli(*words)
        assert result.code == 0
        for name in ("generate", "inspect", "check", "version", "Exit codes"):
            assert name in result.out


def test_help_of_generate_lists_every_flag(cli: Cli) -> None:
    out = cli("generate", "--help").out
    flags = (
        "--prompt --negative-prompt --image --mask --output --report --json --quiet --size --steps --seed --n "
        "--guidance-scale --true-cfg-scale --strength --max-sequence-length --frames --fps --dtype --device "
        "--scheduler --set --config --debug"
    )
    for flag in flags.split():
        assert flag in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["paint"], "No such command"),
        (["--verbose"], "No such option"),
        (["generate"], "--prompt"),
        (["generate", "-p"], "requires an argument"),
        (["generate", "-p", "x", "--stepps", "3"], "--steps"),
        (["generate", "-p", "x", "--steps", "many"], "'--steps': 'many' is not a whole number"),
        (["generate", "-p", "x", "--fps", "fast"], "'--fps': 'fast' is not a number"),
        (["generate", "-p", "x", "demo", "extra"], "extra"),
        (["inspect"], "PATH"),
    ],
)
def test_usage_errors_are_one_line(cli: Cli, words: list[str], message: str) -> None:
    result = cli(*words)
    assert result.code == 2
    assert message in result.complaint


def raising(error: BaseException) -> Any:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (errors.ConfigError("bad option"), 2, "bad option"),
        (errors.RequestError("bad\n  prompt"), 2, "bad prompt"),
        (errors.ModelError("no model"), 3, "no model"),
        (errors.CheckpointError("cut"), 3, "cut"),
        (errors.MemoryLimitError("too big"), 4, "too big"),
        (MemoryError("16 GiB"), 4, "out of memory: 16 GiB"),
        (errors.EngineError("it broke"), 5, "it broke"),
        (KeyError("x"), 5, "internal error: KeyError: 'x'; run again with --debug to see where"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_exit_codes(cli: Cli, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, line: str) -> None:
    monkeypatch.setattr("omniloom.pipelines.inspect.inspect_model", raising(error))
    result = cli("inspect", "demo")
    assert (result.code, result.complaint) == (code, line)


def test_torch_running_out_of_memory(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(
        "omniloom.pipelines.inspect.inspect_model", raising(torch.OutOfMemoryError("CUDA out of memory."))
    )
    assert cli("inspect", "demo").code == 4


def test_debug_shows_the_traceback(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omniloom.pipelines.inspect.inspect_model", raising(KeyError("x")))
    result = cli("inspect", "demo", "--debug")
    assert result.code == 5
    assert "Traceback" in result.err and result.err.rstrip().endswith("error: internal error: KeyError: 'x'")


def test_a_reader_that_goes_away() -> None:
    command = f"{sys.executable} -m omniloom generate --help | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (141, "")


def test_help_is_quick() -> None:
    assert cpu_seconds("--help") < 0.5


def test_no_command_imports_torch_before_it_runs() -> None:
    code = "import sys, omniloom.cli.app; print({'torch', 'diffusers', 'transformers', 'PIL'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
