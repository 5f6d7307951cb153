"""The identity of a denoiser call: which request, step and branch it belongs to.

A request's clone holds a stand-in for each denoiser. It names the branch from the ``cache_context`` that the pipeline
opens, or else from the family's checked order of calls, and publishes a ``CallIdentity`` for the duration of the call
(``omniloom.diffusion.hooks.state.current_call`` reads it).
The shared module is never written to (diffusers' own ``cache_context`` leaves a registry on it).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from omniloom.diffusion.hooks.state import calling
from omniloom.pipelines.call_state import Exclusive
from omniloom.pipelines.family import Branches, BranchRule


@dataclasses.dataclass(frozen=True)
class CallIdentity:
    """One call of a denoiser. ``step`` counts from 0, ``index`` within the step. ``branch``: "cond", "uncond", … or
    ``None`` where it is not established (such calls are never cached). ``rows``: branches of the rows of a joint call.
    """

    request: str
    component: str
    step: int
    index: int
    branch: str | None
    rows: tuple[str, ...] = ()


class CallTracker:
    """Counts the denoiser calls of one request and names them. ``before`` runs ahead of each call (and may raise).

    ``begin_step`` is called when a step is over. A step whose calls do not follow the family's data makes every later
    branch unknown: a wrong name would be worse than none.
    """

    def __init__(self, request: str, branches: Branches, before: Callable[[], None] = lambda: None) -> None:
        self.request = request
        self.branches = branches
        self.before = before
        self.step = 0
        self.index = 0
        self.context: str | None = None
        self.trusted = True

    def begin_step(self) -> None:
        """A step is over: check how many calls it made and count from 0 again."""
        if self.branches.rule is BranchRule.ORDER and self.index > len(self.branches.names):
            self.trusted = False
        self.step += 1
        self.index = 0

    def identify(self, component: str, rows: int | None = None) -> CallIdentity:
        """Name the next call. ``rows``: its batch size relative to one branch, where known (1 without guidance)."""
        names = self.branches.names
        branch: str | None = None
        row_names: tuple[str, ...] = ()
        if self.context is not None:
            branch = self.context
        elif not self.trusted:
            pass
        elif self.branches.rule is BranchRule.ORDER:
            branch = names[self.index] if self.index < len(names) else None
        elif self.branches.rule is BranchRule.BATCHED:
            if self.index == 0:
                row_names = names if rows == len(names) else self.branches.unguided if rows == 1 else ()
                branch = "+".join(row_names) or None
            elif self.index - 1 < len(self.branches.extra):
                branch = self.branches.extra[self.index - 1]
        return CallIdentity(self.request, component, self.step, self.index, branch, row_names)


class Denoiser(Exclusive):
    """A stand-in for a denoiser in one request's clone; it looks like the module itself."""

    def __init__(self, target: Any, name: str, tracker: CallTracker, lock: Any, batch: int) -> None:
        super().__init__(target, lock)
        object.__setattr__(self, "_name", name)
        object.__setattr__(self, "_tracker", tracker)
        object.__setattr__(self, "_batch", batch)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tracker = self._tracker
        tracker.before()
        identity = tracker.identify(self._name, self._rows(args, kwargs))
        try:
            with calling(identity):
                return super().__call__(*args, **kwargs)
        finally:
            tracker.index += 1

    @contextlib.contextmanager
    def cache_context(self, name: str, **_: Any) -> Iterator[None]:
        """Name the branch of the calls inside, as diffusers' models do, for this request alone."""
        tracker = self._tracker
        outer, tracker.context = tracker.context, name
        try:
            yield
        finally:
            tracker.context = outer

    def _rows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """Return how many branches a call's batch holds, from its first argument (a tensor or a list of them)."""
        first = kwargs.get("hidden_states", args[0] if args else None)
        try:
            size = len(first)  # type: ignore[arg-type]
        except TypeError:
            return None
        return size // self._batch if size % self._batch == 0 else None
