"""Whose call this is, and state that belongs to it.

Whoever calls a denoiser publishes the call's identity in ``CALL``, a context variable, so threads do not see each
other's. State is kept per (request, branch, stack); a call whose request or branch is not known has no state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

from omniloom.diffusion.hooks.rows import Rows, current_rows


class Call(Protocol):
    """Identity of a denoiser call. ``branch``: "cond", "uncond", … or ``None`` where it is not established."""

    @property
    def request(self) -> str: ...
    @property
    def component(self) -> str: ...
    @property
    def branch(self) -> str | None: ...


@dataclasses.dataclass(frozen=True)
class CallContext:
    """The least that identifies a call."""

    request: str
    branch: str | None
    component: str = ""


CALL: ContextVar[Any] = ContextVar("omniloom_call", default=None)


def current_call() -> Any:
    """Return the identity (a ``Call``) of the denoiser call that this thread is in; ``None`` outside of one."""
    return CALL.get()


@contextlib.contextmanager
def calling(call: Call | None) -> Iterator[None]:
    """Publish the identity of the calls made inside."""
    token = CALL.set(call)
    try:
        yield
    finally:
        CALL.reset(token)


class Key(NamedTuple):
    """What state belongs to. ``stack``: the component and, within it, what the caller of ``get_state`` names."""

    request: str
    branch: str
    stack: str


class StateManager:
    """Creates, keeps and forgets ``state_cls(*init_args, **init_kwargs)`` per (request, branch, stack)."""

    def __init__(
        self,
        state_cls: Callable[..., Any],
        init_args: tuple[Any, ...] = (),
        init_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.state_cls = state_cls
        self.init_args = tuple(init_args)
        self.init_kwargs = dict(init_kwargs or {})
        self._states: dict[Key, Any] = {}
        self._named = threading.local()
        self._lock = threading.Lock()
        _MANAGERS.add(self)

    def set_context(self, name: str | None) -> None:
        """Name the branch of this thread's following calls; it wins over the call's own. Empty: no name."""
        self._named.branch = name or None

    @property
    def _current_context(self) -> str | None:
        return getattr(self._named, "branch", None) or getattr(current_call(), "branch", None)

    def key(self, stack: str = "", row: Rows | None = None) -> Key | None:
        """Return what the current call's state is kept under; ``None`` if that is not known.

        In a joint call of several (request, branch) pairs it is known only for a given ``row`` of the row map.
        Without a published call, a name from ``set_context`` counts for this thread alone.
        """
        call = current_call()
        component = getattr(call, "component", "")
        stack = f"{component}/{stack}" if stack else component
        if row is not None:
            return None if row.branch is None else Key(row.request, row.branch, stack)
        if len(current_rows()) > 1:
            return None
        branch = self._current_context
        if branch is None:
            return None
        return Key(call.request if call is not None else f"thread {threading.get_ident()}", branch, stack)

    def get_state(self, stack: str = "", row: Rows | None = None) -> Any | None:
        """Return the state of the current call, made at its first use; ``None`` if the call is not identified.

        ``None`` means: compute, keep nothing.
        """
        key = self.key(stack, row)
        if key is None:
            return None
        with self._lock:
            if key not in self._states:
                self._states[key] = self.state_cls(*self.init_args, **self.init_kwargs)
            return self._states[key]

    def release(self, request: str) -> None:
        """Forget the states of one request."""
        with self._lock:
            for key in [key for key in self._states if key.request == request]:
                del self._states[key]

    def reset(self) -> None:
        """Forget all states, and this thread's context name."""
        with self._lock:
            self._states.clear()
        self._named.branch = None

    def kept(self) -> list[Key]:
        """Return what there are states for."""
        with self._lock:
            return list(self._states)

    def __deepcopy__(self, memo: dict[int, Any]) -> StateManager:
        """A copy starts without states."""
        return type(self)(self.state_cls, self.init_args, self.init_kwargs)


_MANAGERS: weakref.WeakSet[StateManager] = weakref.WeakSet()


def release(request: str) -> None:
    """Forget what every hook keeps for a request. Called when the request ends, however it ends."""
    for manager in list(_MANAGERS):
        manager.release(request)


def held() -> list[Key]:
    """Return what there is state for, over all managers (after its last request, nothing)."""
    return [key for manager in list(_MANAGERS) for key in manager.kept()]


def is_joinable(source: Any) -> bool:
    """Tell whether a hook or middleware may stand inside a joint forward: what it declares, else: it keeps no state."""
    declared = getattr(source, "joinable", None)
    if declared is not None:
        return bool(declared)
    return not any(isinstance(value, StateManager) for value in getattr(source, "__dict__", {}).values())
