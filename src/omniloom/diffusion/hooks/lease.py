"""One forward at a time through a component whose weights are bound per module."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from omniloom.diffusion.hooks.chain import Middleware
from omniloom.diffusion.hooks.phases import Phase
from omniloom.diffusion.hooks.transparent import Forward


class Lease(Middleware):
    """Admits one thread at a time, first come first served; released whatever happens.

    A thread that holds the lease may call the component again inside (it would wait for itself otherwise). ``check``
    runs in the waiting thread every ``interval`` seconds and cancels its wait by raising.
    """

    phase = Phase.LEASE

    def __init__(self, check: Callable[[], Any] | None = None, interval: float = 0.05) -> None:
        self.check = check
        self.interval = interval
        self._changed = threading.Condition(threading.Lock())
        self._queue: collections.deque[object] = collections.deque()
        self._owner: int | None = None
        self._depth = 0

    def __call__(self, call_next: Forward, module: Any, /, *args: Any, **kwargs: Any) -> Any:
        with self.hold():
            return call_next(*args, **kwargs)

    @contextlib.contextmanager
    def hold(self, timeout: float | None = None) -> Iterator[None]:
        """Hold the lease, for instance to evict the component. Raises ``TimeoutError`` after ``timeout`` seconds."""
        self._acquire(timeout)
        try:
            yield
        finally:
            self._release()

    @property
    def held(self) -> bool:
        """Whether any thread holds the lease."""
        return self._owner is not None

    @property
    def waiting(self) -> int:
        """How many threads wait."""
        return len(self._queue)

    def _acquire(self, timeout: float | None) -> None:
        me = threading.get_ident()
        with self._changed:
            if self._owner == me:
                self._depth += 1
                return
            if self._owner is None and not self._queue:
                self._owner, self._depth = me, 1
                return
            ticket = object()
            self._queue.append(ticket)
            try:
                self._wait(ticket, timeout)
                self._owner, self._depth = me, 1
            finally:
                self._queue.remove(ticket)
                self._changed.notify_all()

    def _wait(self, ticket: object, timeout: float | None) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        while self._owner is not None or self._queue[0] is not ticket:
            if self.check is not None:
                self.check()
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(f"the lease was not free within {timeout} s")
            steps = [step for step in (left, self.interval if self.check else None) if step is not None]
            self._changed.wait(min(steps) if steps else None)

    def _release(self) -> None:
        with self._changed:
            self._depth -= 1
            if self._depth == 0:
                self._owner = None
                self._changed.notify_all()

    def __deepcopy__(self, memo: dict[int, Any]) -> Lease:
        """A copied module is another component: its lease is free."""
        return type(self)(self.check, self.interval)
