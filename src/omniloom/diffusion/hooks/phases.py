"""The phases of a call chain, outermost first, and the error that hooks and compilation raise."""

from __future__ import annotations

import enum

from omniloom.errors import UserError, suggest


class HookError(UserError, ValueError):
    """A hook, a middleware or a compilation that cannot be applied; nothing was changed."""


class Phase(enum.IntEnum):
    """Where in a module's chain a middleware stands; a smaller value is further out. The gaps leave room to grow.

    TRACE watches everything. CANCEL stops a request. CACHE answers without computing, so it stands outside of
    everything that costs. BATCH joins requests and may wait, so it stands outside LEASE, which admits one forward at a
    time. SPLIT cuts the work over devices, PLACEMENT brings the weights, CAST changes their type for the call. COMPUTE
    is next to the module itself.
    """

    TRACE = 100
    CANCEL = 200
    CACHE = 300
    BATCH = 400
    LEASE = 500
    SPLIT = 600
    PLACEMENT = 700
    CAST = 800
    COMPUTE = 900

    @classmethod
    def of(cls, value: Phase | int | str) -> Phase:
        """Return the phase named by ``value``: a Phase, its number, or its name in any case. Raises ``HookError``."""
        try:
            return cls[value.upper()] if isinstance(value, str) else cls(value)
        except (KeyError, ValueError, TypeError):
            names = [phase.name for phase in cls]
            hint = suggest(value, names) if isinstance(value, str) else ""
            raise HookError(f"unknown phase {value!r}{hint} (allowed: {', '.join(names)})") from None


REASONS = {
    Phase.TRACE: "sees every call, also those that others answer",
    Phase.CANCEL: "stops a request before it costs anything",
    Phase.CACHE: "a skipped call waits for nothing and moves no bytes",
    Phase.BATCH: "joins requests before the component is taken",
    Phase.LEASE: "one forward at a time through what is inside",
    Phase.SPLIT: "divides the work after it was decided that there is some",
    Phase.PLACEMENT: "brings the weights just before they are used",
    Phase.CAST: "changes types of weights that are in place",
    Phase.COMPUTE: "next to the module's own forward",
}
