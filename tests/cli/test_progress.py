from __future__ import annotations

import io
import sys
from itertools import pairwise

import pytest

from omniloom.cli import progress
from omniloom.cli.progress import BarReporter, LineReporter, Reporter, StepClock, make_reporter
from omniloom.engine.output import Progress


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands at ``now[0]``."""
    time = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: time[0])
    return time


def test_the_rate_leaves_out_the_first_step(now: list[float]) -> None:
    clock = StepClock()
    assert clock.tick(0) == 0.0
    now[0] += 10
    assert clock.tick(1) == 0.0
    for step in (2, 3, 4):
        now[0] += 0.5
        assert clock.tick(step) == pytest.approx(2.0)


def test_lines_now_and_then(now: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    reporter = LineReporter()
    for done in (1, 5, 10):
        reporter.on_load("transformer", done * 2**20, 10 * 2**20)
    reporter.on_progress(Progress("r", "encode"))
    for step in range(41):
        reporter.on_progress(Progress("r", "denoise", step, 40))
        now[0] += 1.0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "loading transformer (10.0 MiB)"
    assert lines[1:] == [f"step {i}/40, 1.0 steps/s" for i in (10, 20, 30, 40)]


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    screen.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    reporter = make_reporter(quiet=False)
    assert isinstance(reporter, BarReporter)
    with reporter:
        reporter.on_load("vae", 2**20, 2**21)
        for step in range(3):
            reporter.on_progress(Progress("r", "denoise", step, 2))
            reporter._bars.refresh()
    text = screen.getvalue()
    assert "step 2/2" in text and "steps/s" in text and "painting" in text


def test_the_choice(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert type(make_reporter(quiet=True)) is Reporter
    assert type(make_reporter(quiet=False)) is LineReporter
    with make_reporter(quiet=True) as silent:
        silent.on_load("x", 1, 2)
        silent.on_progress(Progress("r", "denoise", 1, 2))
    assert capsys.readouterr() == ("", "")


def test_every_phase_has_words() -> None:
    assert all(a != b for a, b in pairwise(sorted(progress._LABELS.values())))
