"""torch's global random generator, for pipelines that draw from it: one request at a time, and the state put back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

_LOCK = threading.Lock()
_POLL_SECONDS = 0.05


@contextlib.contextmanager
def own_global_rng(check: Callable[[], None]) -> Iterator[None]:
    """Hold the global generators of the process; ``check`` runs while waiting and may raise (cancellation).

    The caller's own random state is as it was afterwards. Leave it on the thread that entered.
    """
    while not _LOCK.acquire(timeout=_POLL_SECONDS):
        check()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        _LOCK.release()
