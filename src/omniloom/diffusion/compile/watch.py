"""Which compilation belongs to which kind of block: dynamo's callbacks, read in the thread that compiles.

Dynamo compiles under one lock, in the thread of the call, so the change of its global counters between the start and
the end of a compilation is that compilation's.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from omniloom.diffusion.compile.record import ClassRecord


class _Here(threading.local):
    """What this thread's innermost call of a compiled callable belongs to, and what it compiled."""

    record: ClassRecord | None = None
    begun: tuple[float, int, int] | None = None
    recompiled: list[str] | None = None


here = _Here()


def start_watching() -> None:
    """Add our callbacks to dynamo's, unless they are there (``torch._dynamo.reset`` drops them); they only read."""
    from torch._dynamo.callback import callback_handler

    if _begin not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_begin)
        callback_handler.register_end_callback(_end)


def _counts() -> tuple[int, int]:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def _begin(arguments: Any) -> None:
    here.begun = (time.perf_counter(), *_counts()) if here.record is not None else None


def _end(arguments: Any) -> None:
    record, begun, here.begun = here.record, here.begun, None
    if record is None or begun is None:
        return
    graphs, breaks = _counts()
    compile_id = str(arguments.compile_id)
    seconds = time.perf_counter() - begun[0]
    if record.compiled(compile_id, graphs - begun[1], breaks - begun[2], seconds):
        if here.recompiled is None:
            here.recompiled = []
        here.recompiled.append(compile_id)


def graphs_of(function: Any) -> tuple[int, int]:
    """Return how many graphs dynamo holds for the function's code, and how many it allows."""
    import torch._dynamo.config
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

    code = getattr(getattr(function, "__func__", function), "__code__", None)
    count = 0 if code is None else len(_debug_get_cache_entry_list(code))
    return count, torch._dynamo.config.recompile_limit


def guard_text(compile_id: str) -> str | None:
    """Return why dynamo compiled a frame anew, as it says itself."""
    from torch._dynamo.utils import get_compilation_metrics

    for metrics in reversed(get_compilation_metrics()):
        if metrics.compile_id == compile_id and metrics.recompile_reason:
            return " ".join(metrics.recompile_reason.split())
    return None
