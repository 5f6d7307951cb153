"""One request in flight: what was asked, its future, its cancellation."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from omniloom.engine.call import Call
from omniloom.engine.output import Output, Progress


@dataclasses.dataclass(eq=False)
class Request:
    """A validated request. ``future`` gives its ``Output``; an error is in ``Output.error``, never raised by it."""

    id: str
    prompt: str | None
    call: Call | None  # None: refused, or over
    notify: Callable[[Progress], None]
    future: Future[Output] = dataclasses.field(default_factory=Future)
    cancelled: threading.Event = dataclasses.field(default_factory=threading.Event)
    arrival: float = dataclasses.field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.future.set_running_or_notify_cancel()  # only ``cancelled`` cancels: the worker always sets the result


class Handle:
    """The caller's end of a request."""

    def __init__(self, request: Request) -> None:
        self._request = request

    @property
    def id(self) -> str:
        """The request's id."""
        return self._request.id

    @property
    def future(self) -> Future[Output]:
        """The future behind this handle, for ``concurrent.futures.wait`` and ``asyncio.wrap_future``."""
        return self._request.future

    def cancel(self) -> None:
        """Ask the request to stop; it does within one step, and its output's ``error`` is then ``Cancelled``."""
        self._request.cancelled.set()

    def done(self) -> bool:
        """Whether the request has ended."""
        return self.future.done()

    def result(self, timeout: float | None = None) -> Output:
        """Wait for the output. Raises ``TimeoutError`` after ``timeout`` seconds, and nothing else."""
        return self.future.result(timeout)


def quiet(callback: Callable[[Progress], Any] | None) -> Callable[[Progress], None]:
    """Wrap a progress callback so that its failures cannot fail the request; the first one is logged."""
    import logging

    if callback is None:
        return lambda _progress: None
    failed = False

    def notify(progress: Progress) -> None:
        nonlocal failed
        try:
            callback(progress)
        except Exception:
            if not failed:
                failed = True
                logging.getLogger(__name__).warning("a progress callback failed; the request goes on", exc_info=True)

    return notify
