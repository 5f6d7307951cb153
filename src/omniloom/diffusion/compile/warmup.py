"""Compile for the sizes that will be asked for, before they are."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Any

from omniloom.diffusion.compile.regional import compile_report


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Sizes of one expected call. ``None``: the model's own."""

    height: int | None = None
    width: int | None = None
    frames: int | None = None
    batch: int = 1
    text_length: int | None = None


@dataclasses.dataclass(frozen=True)
class WarmUp:
    """What one bucket cost."""

    bucket: Bucket
    seconds: float
    graphs: int
    recompiles: int


def warm_up(models: Iterable[Any], buckets: Iterable[Bucket], run: Callable[[Bucket], Any]) -> list[WarmUp]:
    """Call ``run(bucket)`` for each bucket; what is compiled anew meanwhile is not taken from the budgets.

    ``run`` must call the models as requests do: in the same grad mode and dtype, or the graphs will not serve them.
    """
    records = [record for model in models for record in compile_report(model).values()]
    results = []
    for record in records:
        record.warming = True
    try:
        for bucket in buckets:
            graphs, again = _sums(records)
            start = time.perf_counter()
            run(bucket)
            seconds = time.perf_counter() - start
            after = _sums(records)
            results.append(WarmUp(bucket, seconds, after[0] - graphs, after[1] - again))
    finally:
        for record in records:
            record.warming = False
    return results


def _sums(records: list[Any]) -> tuple[int, int]:
    return sum(r.graphs for r in records), sum(r.recompiles for r in records)
