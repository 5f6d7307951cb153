"""The row map of joint forwards: which rows of a batch belong to which request and branch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple


class Rows(NamedTuple):
    """Rows ``start`` to ``stop`` (exclusive) of the batch dimension belong to one branch of one request."""

    request: str
    branch: str | None
    start: int
    stop: int


RowMap = tuple[Rows, ...]

_ROWS: ContextVar[RowMap] = ContextVar("omniloom_rows", default=())


def current_rows() -> RowMap:
    """Return the row map of the joint forward that this thread is in; empty outside of one."""
    return _ROWS.get()


@contextlib.contextmanager
def joint(rows: RowMap) -> Iterator[None]:
    """Publish the row map of a joint forward to everything inside. Raises ``ValueError`` unless rows follow on."""
    end = 0
    for row in rows:
        if row.start != end or row.stop <= row.start:
            raise ValueError(f"the rows of a joint call follow each other without a gap from 0, got {rows}")
        end = row.stop
    token = _ROWS.set(tuple(rows))
    try:
        yield
    finally:
        _ROWS.reset(token)
