"""A request's own pipeline: a shallow clone that shares weights and nothing that a call writes to."""

from __future__ import annotations

import contextlib
import copy
import threading
from typing import Any

from omniloom.pipelines.build import LoadedPipeline
from omniloom.pipelines.call_state import CallState, Exclusive, call_state
from omniloom.pipelines.denoiser import CallTracker, Denoiser


class CloneFactory:
    """Makes clones of the prototypes of one loaded model, which themselves are never called.

    Schedulers and guiders are copied per request. Tokenizers and processors are large and keep only call state, so
    each worker thread has one copy. Modules that are not known to be safe are wrapped in ``Exclusive``; denoisers in
    ``Denoiser``, which names their calls.
    """

    def __init__(self, loaded: LoadedPipeline) -> None:
        self.branches = loaded.family.branches
        self.global_rng = loaded.family.global_rng
        self._denoisers = set(loaded.family.denoisers)
        self._components = {name: value for name, value in loaded.pipe.components.items() if value is not None}
        self.states = {name: call_state(value) for name, value in self._components.items()}
        self._locks: dict[str, Any] = {
            name: threading.RLock() if state is CallState.EXCLUSIVE else contextlib.nullcontext()
            for name, state in self.states.items()
        }
        self._per_thread = threading.local()
        self._copying = threading.Lock()

    def clone(self, prototype: Any, tracker: CallTracker, batch: int) -> Any:
        """Return a pipeline for one request on the calling thread; ``batch``: outputs that it makes at once."""
        pipe = copy.copy(prototype)
        own = vars(pipe)
        for name, state in self.states.items():
            if name not in own:
                continue
            if name in self._denoisers:
                own[name] = Denoiser(self._components[name], name, tracker, self._locks[name], batch)
            elif state is CallState.EXCLUSIVE:
                own[name] = Exclusive(self._components[name], self._locks[name])
            elif state is CallState.COPY:
                own[name] = self._copied(name)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def _copied(self, name: str) -> Any:
        component = self._components[name]
        if not self._is_text_tool(component):
            return copy.deepcopy(component)
        cache: dict[str, Any] = self._per_thread.__dict__
        if name not in cache:
            with self._copying:
                cache[name] = copy.deepcopy(component)
        return cache[name]

    @staticmethod
    def _is_text_tool(component: Any) -> bool:
        from transformers import PreTrainedTokenizerBase, ProcessorMixin

        return isinstance(component, (PreTrainedTokenizerBase, ProcessorMixin))
