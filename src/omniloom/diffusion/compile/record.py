"""What happened to one kind of block since it was compiled."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Hashable
from typing import Any

log = logging.getLogger(__name__)

KEPT_REASONS = 5


@dataclasses.dataclass(eq=False)
class ClassRecord:
    """Counts for one block class of one model, from dynamo's own counters and callbacks.

    blocks: how many share this. graphs: captured. graph_breaks: inside of them. recompiles: compilations of a frame
    that was compiled before. seconds: spent compiling. fallbacks: calls that ran eagerly, because compiling failed or
    the budget was spent. guards: why recompilations were needed. failures: of the compiler. closed: why nothing more
    is compiled for inputs of new shapes.
    """

    class_name: str
    budget: int
    granularity: str = "regional"
    blocks: int = 0
    graphs: int = 0
    graph_breaks: int = 0
    recompiles: int = 0
    seconds: float = 0.0
    fallbacks: int = 0
    guards: list[str] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)
    closed: str | None = None
    warming: bool = False
    seen: set[Hashable] = dataclasses.field(default_factory=set)
    frames: set[str] = dataclasses.field(default_factory=set)
    spent: int = 0
    lock: Any = dataclasses.field(default_factory=threading.Lock, repr=False)

    @property
    def status(self) -> str:
        """What calls run: "compiled", "partly eager" (some fell back), "eager", or "waiting" before the first."""
        if self.fallbacks or self.closed:
            return "partly eager" if self.seen else "eager"
        return "compiled" if self.seen else "waiting"

    def may_compile(self) -> bool:
        """Tell whether a call with inputs of new shapes may be compiled; the first "no" closes the record."""
        if self.closed is None and self.frames and self.spent >= self.budget and not self.warming:
            reason = self.guards[-1] if self.guards else "not known"
            self.close(f"it was compiled anew {self.spent} times; last reason: {reason}; try dynamic=True")
        return self.closed is None

    def compiled(self, compile_id: str, graphs: int, breaks: int, seconds: float) -> bool:
        """Count one compilation; True if it was one of a frame that was compiled before."""
        frame = compile_id.partition("/")[0]
        with self.lock:
            self.graphs += graphs
            self.graph_breaks += breaks
            self.seconds += seconds
            again = frame in self.frames
            self.frames.add(frame)
            if again:
                self.recompiles += 1
                self.spent += not self.warming
            return again

    def fell_back(self) -> None:
        """Count a call that ran eagerly."""
        with self.lock:
            self.fallbacks += 1

    def failed(self, error: BaseException) -> None:
        """Note that the compiler failed: the call ran eagerly, and so will others with new shapes."""
        cause = getattr(error, "inner_exception", None) or error
        text = f"{type(cause).__name__}: {str(cause).strip()}".splitlines()[0]
        with self.lock:
            self.fallbacks += 1
            if text not in self.failures and len(self.failures) < KEPT_REASONS:
                self.failures.append(text)
        self.close(f"the compiler failed: {text}")

    def close(self, reason: str) -> None:
        """Compile nothing more: inputs of new shapes run eagerly from now on. Says so once."""
        with self.lock:
            first, self.closed = self.closed is None, self.closed or reason
        if first:
            log.warning("%s runs eagerly for inputs of new shapes from now on: %s", self.class_name, reason)

    def needed(self, guard: str) -> None:
        """Keep why a recompilation was needed."""
        with self.lock:
            if guard not in self.guards:
                self.guards = [*self.guards, guard][-KEPT_REASONS:]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {
            "blocks": self.blocks,
            "granularity": self.granularity,
            "status": self.status,
            "graphs": self.graphs,
            "graph_breaks": self.graph_breaks,
            "recompiles": self.recompiles,
            "seconds": round(self.seconds, 3),
            "fallbacks": self.fallbacks,
            "guards": list(self.guards),
            "failures": list(self.failures),
            "closed": self.closed,
        }
