"""Running the command line in this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from omniloom.cli import main


@dataclasses.dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """The one line on stderr of a refused command; nothing else may have been said."""
        assert self.out == ""
        [line] = self.err.splitlines()
        assert line.startswith("error: ")
        assert "Traceback" not in line
        return line.removeprefix("error: ")


Cli = Callable[..., Result]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    def run(*args: object) -> Result:
        capsys.readouterr()
        code = main([str(arg) for arg in args])
        out, err = capsys.readouterr()
        return Result(code, out, err)

    return run
