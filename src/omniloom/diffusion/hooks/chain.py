"""Around-middlewares and how they become one callable."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from omniloom.diffusion.hooks.phases import Phase
from omniloom.diffusion.hooks.transparent import Forward

Pair = tuple[Callable[..., Any] | None, Callable[..., Any] | None]


class Around(Protocol):
    """What the chain calls: ``around(call_next, module, *args, **kwargs) -> output``; it calls ``call_next`` or not."""

    def __call__(self, call_next: Forward, module: Any, /, *args: Any, **kwargs: Any) -> Any: ...


class Middleware:
    """Base class of native middlewares (any callable with the signature of ``Around`` will do).

    joinable: whether the middleware may stand inside a joint forward of several requests. ``None``: yes, unless it
    holds a ``StateManager``. One that keeps state and reads ``current_rows()`` says True.
    """

    phase: Phase = Phase.COMPUTE
    order: int = 0
    joinable: bool | None = None

    def __call__(self, call_next: Forward, module: Any, /, *args: Any, **kwargs: Any) -> Any:
        return call_next(*args, **kwargs)


@dataclasses.dataclass(frozen=True)
class Member:
    """One entry of a chain. ``source``: the hook or middleware. ``around``: ``None`` if it has nothing to do.

    ``pair``: its functions before and after the call, if ``around`` does no more than call those.
    """

    name: str
    phase: Phase
    order: int
    source: Any
    around: Callable[..., Any] | None
    pair: Pair | None = None

    @property
    def key(self) -> tuple[int, int, str]:
        """The place in the chain: phase, order, name; outermost first."""
        return int(self.phase), self.order, self.name


def arrange(members: Iterable[Member]) -> tuple[Member, ...]:
    """Return the members outermost first."""
    return tuple(sorted(members, key=lambda member: member.key))


def compose(members: tuple[Member, ...], innermost: Forward, module: Any) -> tuple[Forward, Mapping[str, Forward]]:
    """Return the entry of the chain and, by name, what each member calls next.

    Done when the chain changes, not per call. A level is a C-level partial, so it costs one Python frame, its own;
    neighbours that only do something before and after the call share one.
    """
    call = innermost
    after: dict[str, Forward] = {}
    for member in reversed(members):
        after[member.name] = call
        if member.around is not None:
            call = functools.partial(member.around, call, module)
    entry = innermost
    active = [member for member in members if member.around is not None]
    for paired, group in itertools.groupby(reversed(active), lambda member: member.pair is not None):
        if paired:
            entry = functools.partial(_in_turn([member.pair for member in group if member.pair]), entry, module)
        else:
            for around in [member.around for member in group if member.around]:
                entry = functools.partial(around, entry, module)
    return entry, after


def _in_turn(pairs: list[Pair]) -> Callable[..., Any]:
    """Return one middleware for several pairs, given innermost first."""
    before = tuple(pre for pre, _ in reversed(pairs) if pre is not None)
    behind = tuple(post for _, post in pairs if post is not None)

    def in_turn(call_next: Forward, module: Any, /, *args: Any, **kwargs: Any) -> Any:
        for pre in before:
            args, kwargs = pre(module, *args, **kwargs)
        output = call_next(*args, **kwargs)
        for post in behind:
            output = post(module, output)
        return output

    return in_turn
