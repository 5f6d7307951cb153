"""Modules without weights: parameters on the meta device, buffers and tensor attributes real.

Both accelerate's empty initialisation (it patches ``nn.Module.register_parameter``) and torch's default dtype are
process-wide. So construction is the *writer* of a readers-writer gate whose readers are the running requests: while a
module is built, no forward of ours runs, and nothing that a forward allocates lands on meta or in a foreign dtype.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import init_empty_weights


class ConstructionGate:
    """Many readers (running requests) or one writer (a construction); a waiting writer holds back new readers.

    A thread that reads already may read again (requests nest); a writer may not read.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._readers = 0
        self._writing = False
        self._writers_waiting = 0
        self._depth = threading.local()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Hold the gate as a reader."""
        depth = getattr(self._depth, "value", 0)
        if depth == 0:
            with self._condition:
                self._condition.wait_for(lambda: not self._writing and not self._writers_waiting)
                self._readers += 1
        self._depth.value = depth + 1
        try:
            yield
        finally:
            self._depth.value = depth
            if depth == 0:
                with self._condition:
                    self._readers -= 1
                    self._condition.notify_all()

    @contextlib.contextmanager
    def constructing(self) -> Iterator[None]:
        """Hold the gate as the only writer."""
        if getattr(self._depth, "value", 0):
            raise RuntimeError("a running request cannot construct a module: it would wait for itself")
        with self._condition:
            self._writers_waiting += 1
            try:
                self._condition.wait_for(lambda: not self._writing and not self._readers)
                self._writing = True
            finally:
                self._writers_waiting -= 1
        try:
            yield
        finally:
            with self._condition:
                self._writing = False
                self._condition.notify_all()


GATE = ConstructionGate()


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def empty_diffusers_model(cls: Any, config: dict[str, Any], dtype: torch.dtype) -> torch.nn.Module:
    """Build a diffusers ``ModelMixin`` from its config dict, parameters on meta, as ``from_pretrained`` would."""
    with GATE.constructing(), _default_dtype(dtype), init_empty_weights(include_buffers=False):
        return cls.from_config(config).eval()


def empty_transformers_model(cls: Any, config: Any, dtype: torch.dtype) -> torch.nn.Module:
    """Build a transformers ``PreTrainedModel`` from its config object, parameters on meta, buffers computed."""
    with GATE.constructing(), init_empty_weights(include_buffers=False):
        return cls._from_config(config, dtype=dtype).eval()
