"""The worker pool: many requests over one loaded pipeline."""

from __future__ import annotations

import dataclasses
import itertools
import queue
import threading
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from omniloom.config import register_section
from omniloom.engine.call import prepare_call
from omniloom.engine.output import Output, Progress
from omniloom.engine.params import SamplingParams
from omniloom.engine.prompt import parse_prompt
from omniloom.engine.request import Handle, Request, quiet
from omniloom.engine.run import run_request
from omniloom.errors import ConfigError, EngineError, OmniloomError, QueueFullError
from omniloom.pipelines.build import LoadedPipeline
from omniloom.pipelines.clone import CloneFactory


@register_section("engine", help="Worker threads and how many requests may wait.")
@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """workers: requests that run at the same time. max_queue: requests that may wait for a worker."""

    workers: int = 1
    max_queue: int = 256

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= 64:
            raise ConfigError(f"engine.workers={self.workers}: must be from 1 to 64")
        if not 1 <= self.max_queue <= 100_000:
            raise ConfigError(f"engine.max_queue={self.max_queue}: must be from 1 to 100000")


class Engine:
    """Runs requests over one pipeline on ``options.workers`` threads. Close it, or use it as a context manager.

    ``call_states``: how requests share each component ("copy", "exclusive" or "concurrent").
    """

    def __init__(self, loaded: LoadedPipeline, options: EngineOptions, device: str) -> None:
        self._loaded: LoadedPipeline | None = loaded
        self._clones: CloneFactory | None = CloneFactory(loaded)
        self.call_states = {name: state.value for name, state in self._clones.states.items()}
        self._queue: queue.Queue[Request | None] = queue.Queue()
        self._capacity = threading.BoundedSemaphore(options.workers + options.max_queue)
        self._open: set[Request] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._prefix = uuid.uuid4().hex[:8]
        self._numbers = itertools.count()
        self._threads = [
            threading.Thread(target=self._work, args=(self._clones, device), name=f"omniloom-worker-{i}", daemon=True)
            for i in range(options.workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        on_progress: Callable[[Progress], Any] | None = None,
        block: bool = False,
    ) -> Handle:
        """Check a request and queue it.

        Raises ``RequestError`` for one that cannot run, ``QueueFullError`` if too many wait (``block=True`` waits for
        a place instead), ``EngineError`` if the engine is closed.
        """
        loaded = self._loaded
        if loaded is None:
            raise EngineError("the model is unloaded: make a new Omni")
        parsed = parse_prompt(prompt)
        call = prepare_call(loaded, parsed, params or SamplingParams())
        request = Request(f"{self._prefix}-{next(self._numbers)}", parsed.text, call, quiet(on_progress))
        if not self._capacity.acquire(blocking=block):
            raise QueueFullError("the queue is full: wait for a request to end, or raise engine.max_queue")
        with self._lock:
            if self._closed:
                self._capacity.release()
                raise EngineError("the model is unloaded: make a new Omni")
            self._open.add(request)
            self._queue.put(request)
        request.notify(Progress(request.id, "queued"))
        return Handle(request)

    def close(self) -> None:
        """Cancel what is queued or running, wait for the workers to end, and let go of the pipeline."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for request in self._open:
                request.cancelled.set()
            for _ in self._threads:
                self._queue.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._clones = self._loaded = None

    def abandon(self) -> None:
        """Let the workers end when the queue is empty, without waiting: for an owner that is being collected."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._queue.put(None)

    def failed(self, prompt: Any, error: OmniloomError) -> Handle:
        """Return the handle of a request that was refused: it has ended already, with ``error``."""
        text = prompt if isinstance(prompt, str) else prompt.get("prompt") if isinstance(prompt, Mapping) else None
        handle = Handle(Request(f"{self._prefix}-{next(self._numbers)}", text, None, quiet(None)))
        handle.future.set_result(Output(handle.id, prompt=text, error=error))
        return handle

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self, clones: CloneFactory, device: str) -> None:
        while (request := self._queue.get()) is not None:
            try:
                output = run_request(request, clones, device)
            except BaseException as error:  # a worker must never die with a caller waiting
                output = Output(request.id, prompt=request.prompt, error=EngineError(f"internal error: {error!r}"))
            request.call = None  # a handle that is kept must not keep the weights
            with self._lock:
                self._open.discard(request)
            self._capacity.release()
            request.future.set_result(output)
            del request, output
