"""Progress on stderr: a bar with the step rate on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from omniloom.cli.show import show_bytes, show_rate

if TYPE_CHECKING:
    from omniloom.engine.output import Progress

LINE_EVERY_SECONDS = 10.0
_LABELS = {
    "load": "loading",
    "queued": "waiting",
    "encode": "reading the prompt",
    "denoise": "painting",
    "decode": "decoding",
}
_WIDTH = 22  # "loading text_encoder_2" fits; shorter ones must not make the bar jump


class StepClock:
    """The rate of steps, without the first one, which may include compilation or a cold cache."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None

    def tick(self, step: int) -> float:
        """Take note that ``step`` steps are done and return steps per second so far (0 if not known yet)."""
        now = time.perf_counter()
        if step < 1:
            return 0.0
        if self._first is None:
            self._first = (step, now)
            return 0.0
        return (step - self._first[0]) / max(now - self._first[1], 1e-9)


class Reporter:
    """What ``generate`` says while it works. Base class: says nothing (``--quiet``)."""

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        pass

    def on_load(self, component: str, done: int, total: int) -> None:
        """Called while weights are read."""

    def on_progress(self, progress: Progress) -> None:
        """Called by the engine, on its own thread."""


class LineReporter(Reporter):
    """Plain lines, for logs and pipes."""

    def __init__(self) -> None:
        self._component: str | None = None
        self._clock = StepClock()
        self._last = 0.0

    def on_load(self, component: str, done: int, total: int) -> None:
        if component != self._component:
            self._component = component
            _line(f"loading {component} ({show_bytes(total)})")

    def on_progress(self, progress: Progress) -> None:
        if progress.phase != "denoise":
            return
        rate = self._clock.tick(progress.step)
        now = time.perf_counter()
        if not progress.step:
            self._last = now
        elif progress.step == progress.total or now - self._last >= LINE_EVERY_SECONDS:
            self._last = now
            _line(", ".join(filter(None, (f"step {progress.step}/{progress.total}", show_rate(rate)))))


class BarReporter(Reporter):
    """One live line on a terminal, gone when the work is done."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        self._bars = Bars(
            TextColumn("{task.description}", style="bold"),
            BarColumn(bar_width=32),
            TextColumn("{task.fields[count]}"),
            TextColumn("{task.fields[rate]}", style="cyan"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bars.add_task(f"{'starting':<{_WIDTH}}", total=None, count="", rate="")
        self._clock = StepClock()

    def __enter__(self) -> BarReporter:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._bars.stop()

    def on_load(self, component: str, done: int, total: int) -> None:
        self._show(f"loading {component}", done, total, f"{show_bytes(done)} of {show_bytes(total)}")

    def on_progress(self, progress: Progress) -> None:
        label = _LABELS.get(progress.phase, progress.phase)
        if progress.phase == "denoise":
            rate = self._clock.tick(progress.step)
            count = f"step {progress.step}/{progress.total}"
            self._show(label, progress.step, progress.total or None, count, show_rate(rate))
        elif progress.phase != "done":
            self._show(label, 0, None)

    def _show(self, label: str, done: int, total: int | None, count: str = "", rate: str = "") -> None:
        fields: dict[str, Any] = {"count": count, "rate": rate}
        self._bars.update(self._task, description=f"{label:<{_WIDTH}}", completed=done, total=total, **fields)


def make_reporter(quiet: bool) -> Reporter:
    """Choose how to report."""
    if quiet:
        return Reporter()
    return BarReporter() if sys.stderr.isatty() else LineReporter()


def _line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
