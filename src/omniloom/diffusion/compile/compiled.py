"""The compiled callable of one block, which falls back to the original one rather than fail."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Hashable
from typing import Any

import torch

from omniloom.diffusion.compile.keys import shape_key
from omniloom.diffusion.compile.layout import alike, packed, sizes_apart, write_back
from omniloom.diffusion.compile.record import ClassRecord
from omniloom.diffusion.compile.watch import graphs_of, guard_text, here, start_watching
from omniloom.diffusion.hooks.cell import ComputeCell
from omniloom.diffusion.hooks.transparent import Forward, Transparent, outside_of_graphs
from omniloom.errors import Cancelled

log = logging.getLogger(__name__)


class Compiled(Transparent):
    """Runs ``compiled``, or the original: after ``uncompile``, when the compiler fails, or when the budget is spent.

    It stands in the module's ``forward`` or, under hooks, in ``_omni_original_forward``. A deep copy of it is the
    copied module's original forward.
    """

    def __init__(self, cell: ComputeCell, compiled: Forward, record: ClassRecord) -> None:
        self.cell = cell
        self.module = cell.module
        self.compiled = compiled
        self.record = record
        self._function = cell.function
        self._look_like(cell.original)

    @property
    def granularity(self) -> str:
        """How much was compiled: "regional" or "full"."""
        return self.record.granularity

    @property
    def active(self) -> bool:
        """Whether this is what the module computes with."""
        return self.cell.compiled is self

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if self._function is not None and type(self.module).forward is not self._function:
            self._outlived()
        if self.cell.compiled is not self:  # another library's wrapper kept it
            return self.cell.original(*args, **kwargs)
        args = alike(args)
        kwargs = {name: alike(value) for name, value in kwargs.items()}
        key = shape_key(args, kwargs)
        if key in self.record.seen:
            return self._compiled(contextlib.nullcontext(), args, kwargs)
        pack = packed(args, kwargs)
        if pack is not None and shape_key(*pack[:2]) in self.record.seen:  # to copy costs less than one more graph
            output = self._compiled(contextlib.nullcontext(), *pack[:2])
            write_back(pack[2])
            return output
        if not self.record.may_compile() or self._limit_reached():
            self.record.fell_back()
            return self.cell.original(*args, **kwargs)
        start_watching()
        return self._compiled(sizes_apart(), args, kwargs, key)

    def _compiled(
        self, setting: Any, args: tuple[Any, ...], kwargs: dict[str, Any], key: Hashable | None = None
    ) -> Any:
        """Call what is compiled. ``key``: the inputs' shapes, where a graph for them may not be there yet."""
        outer, here.record = here.record, self.record
        try:
            with setting:
                output = self.compiled(*args, **kwargs)
        except Exception as error:
            if not isinstance(error, compile_errors()):
                raise
            cause = underlying(error)
            if cause is not None:
                raise cause from None
            return self._eagerly(error, args, kwargs)
        finally:
            here.record = outer
            if here.recompiled and outer is None:
                self._recompiled()
        if key is not None:
            self.record.seen.add(key)
        return output

    def _eagerly(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A block is a function of its inputs, so it can run again. If that fails too, it was no compile failure.
        output = self.cell.original(*args, **kwargs)
        self.record.failed(error)
        return output

    def _limit_reached(self) -> bool:
        # Past its limit dynamo runs a code object eagerly and says so only in its log; then we say it, and count.
        count, limit = graphs_of(self.cell.original)
        if count < limit:
            return False
        self.record.close(f"{count} graphs of its code are there, of all models of this process; dynamo allows {limit}")
        return True

    def _recompiled(self) -> None:
        ids, here.recompiled = here.recompiled or [], None
        for compile_id in ids:
            self.record.needed(guard_text(compile_id) or "not known")

    def _outlived(self) -> None:
        self._function = None
        if self.active and self.cell.follow_class():
            log.warning("%s has got another forward; it is no longer compiled", type(self.module).__name__)
            if self.module.__dict__.get(self.cell.slot) is self:
                self.cell.settle()

    def _stands_for(self) -> Forward:
        return self.cell.original

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.cell.original, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _unpickled, (self.cell.original,)


def _unpickled(original: Forward) -> Forward:
    return original


outside_of_graphs(Compiled.__call__, "omniloom: a compiled block inside of another compiled region stays its own")


def compile_errors() -> tuple[type[Exception], ...]:
    """Return what dynamo and its backends raise while they compile."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return TorchDynamoException, FailOnRecompileLimitHit


def underlying(error: BaseException) -> BaseException | None:
    """Return the out-of-memory or the cancellation that a compiler's error wraps, if it does."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, (MemoryError, torch.OutOfMemoryError, Cancelled)):
            return cause
        cause = getattr(cause, "inner_exception", None) or cause.__cause__
    return None
