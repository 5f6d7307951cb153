"""Watching one request from its own scheduler copy: phases, steps, cancellation. Works for every pipeline.

Every pipeline calls ``scheduler.set_timesteps`` before its loop and ``scheduler.step`` in it, also those without a
step callback. The request's copy gets a generated subclass; the class that other requests use is never touched. The
denoising phase begins with the first denoiser call after the schedule is set.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from omniloom.engine.output import Progress
from omniloom.errors import Cancelled, EngineError
from omniloom.pipelines.denoiser import CallTracker, Denoiser
from omniloom.pipelines.family import Branches
from omniloom.platform.memory import rss_bytes


class Trace:
    """Phases, steps and peak memory of one request. ``check`` raises ``Cancelled`` once ``cancelled`` is set.

    Peak memory is sampled at phase borders and after each step (resident set of the process; on an accelerator the
    allocator's own peak): with several requests at once it is shared by them.
    """

    def __init__(
        self,
        request_id: str,
        cancelled: threading.Event,
        notify: Callable[[Progress], None],
        device: str,
        branches: Branches,
    ) -> None:
        self.request_id = request_id
        self.calls = CallTracker(request_id, branches, before=self.call_begins)
        self.cancelled = cancelled
        self.notify = notify
        self.device = device
        self.phase = "encode"
        self.steps = 0
        self.total = 0
        self.seconds: dict[str, float] = {}
        self.peak_bytes: dict[str, int] = {}
        self.encoding = contextlib.ExitStack()  # held until the denoising phase begins
        self._since = time.perf_counter()
        self._pipe: Any = None

    def attach(self, pipe: Any) -> None:
        """Watch the scheduler of ``pipe`` (a request's clone) and announce the first phase."""
        self._pipe = pipe
        scheduler = getattr(pipe, "scheduler", None)
        if scheduler is not None:
            scheduler.__class__ = _traced(type(scheduler))
            scheduler._omniloom_trace = self
        self._reset_peak()
        self.notify(Progress(self.request_id, self.phase))

    def check(self) -> None:
        """Raise ``Cancelled`` if the request was cancelled."""
        if self.cancelled.is_set():
            raise Cancelled(f"request {self.request_id} was cancelled in phase {self.phase} after {self.steps} steps")

    def enter(self, phase: str) -> None:
        """Close the current phase and begin another one."""
        if phase == self.phase:
            return
        self._close()
        self.encoding.close()
        self.phase = phase
        self.notify(Progress(self.request_id, phase, self.steps, self.total))

    def timesteps_set(self, count: int) -> None:
        """The pipeline has set its schedule of ``count`` model calls: the loop is about to begin."""
        self.check()
        self.total = count
        self.calls.index = 0
        if not any(type(value) is Denoiser for value in vars(self._pipe).values()):
            self.enter("denoise")

    def call_begins(self) -> None:
        """The pipeline is about to call a denoiser."""
        self.check()
        if self.total:
            self.enter("denoise")

    def step_begins(self) -> None:
        """The model has answered and the scheduler is about to step."""
        self.check()
        self.total = getattr(self._pipe, "_num_timesteps", None) or self.total

    def step_done(self, result: Any) -> None:
        """The scheduler has stepped. Raises ``EngineError`` if its last sample is not finite: it decodes to black."""
        self.steps += 1
        self.calls.begin_step()
        self._sample()
        self.notify(Progress(self.request_id, "denoise", self.steps, self.total))
        self.check()
        if self.steps >= self.total > 0:
            sample = result[0] if isinstance(result, tuple) else getattr(result, "prev_sample", None)
            if isinstance(sample, torch.Tensor) and not torch.isfinite(sample).all():
                raise EngineError(
                    f"request {self.request_id}: the latents are not finite after step {self.steps} ({sample.dtype}); "
                    "try dtype bfloat16 or float32, or another guidance"
                )
            self.enter("decode")

    def finish(self) -> None:
        """Close the last phase."""
        self.encoding.close()
        self._close()

    def metrics(self) -> dict[str, Any]:
        """Return seconds and peak memory by phase, and the number of steps."""
        return {"steps": self.steps, "seconds": dict(self.seconds), "peak_memory_bytes": dict(self.peak_bytes)}

    def __deepcopy__(self, memo: Any) -> None:
        return None  # a pipeline that copies its scheduler (a second one for audio) must not count twice

    def _close(self) -> None:
        now = time.perf_counter()
        self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + now - self._since
        self._since = now
        self._sample()
        self._reset_peak()

    def _sample(self) -> None:
        used = torch.cuda.max_memory_allocated(self.device) if self.device.startswith("cuda") else rss_bytes()
        self.peak_bytes[self.phase] = max(self.peak_bytes.get(self.phase, 0), used)

    def _reset_peak(self) -> None:
        if self.device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats(self.device)


_TRACED: dict[Any, Any] = {}


def _traced(cls: Any) -> Any:
    """Return the subclass of a scheduler class that reports to ``_omniloom_trace``; its name stays."""
    if hasattr(cls, "_omniloom_trace"):
        return cls
    if cls not in _TRACED:
        _TRACED[cls] = _make_traced(cls)
    return _TRACED[cls]


def _make_traced(cls: Any) -> Any:

    @functools.wraps(cls.set_timesteps)
    def set_timesteps(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = cls.set_timesteps(self, *args, **kwargs)
        if self._omniloom_trace is not None:
            self._omniloom_trace.timesteps_set(len(self.timesteps))
        return result

    @functools.wraps(cls.step)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        trace = self._omniloom_trace
        if trace is None:
            return cls.step(self, *args, **kwargs)
        trace.step_begins()
        result = cls.step(self, *args, **kwargs)
        trace.step_done(result)
        return result

    body = {"set_timesteps": set_timesteps, "step": step, "_omniloom_trace": None, "__module__": cls.__module__}
    return type(cls.__name__, (cls,), body)
