"""A request's own pipeline: a shallow clone that shares weights and nothing that a call writes to."""

from __future__ import annotations

import copy
import threading
from typing import Any

from omniloom.pipelines.call_state import CallState, Exclusive, call_state


class CloneFactory:
    """Makes clones of one prototype pipeline, which itself is never called.

    Schedulers and guiders are copied per request. Tokenizers and processors are large and keep only call state, so
    each worker thread has one copy. Modules that are not known to be safe are wrapped in ``Exclusive``.
    """

    def __init__(self, prototype: Any) -> None:
        self.prototype = prototype
        self._components = {name: value for name, value in prototype.components.items() if value is not None}
        self.states = {name: call_state(value) for name, value in self._components.items()}
        self._exclusive = {
            name: Exclusive(self._components[name])
            for name, state in self.states.items()
            if state is CallState.EXCLUSIVE
        }
        self._per_thread = threading.local()
        self._copying = threading.Lock()

    def clone(self) -> Any:
        """Return a pipeline for one request on the calling thread."""
        pipe = copy.copy(self.prototype)
        own = vars(pipe)
        for name, state in self.states.items():
            if state is CallState.EXCLUSIVE:
                own[name] = self._exclusive[name]
            elif state is CallState.COPY:
                own[name] = self._copied(name)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def _copied(self, name: str) -> Any:
        component = self._components[name]
        if "scheduler" in name or not self._is_text_tool(component):
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
