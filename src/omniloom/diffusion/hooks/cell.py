"""The innermost thing of a module's chain: its original or its compiled callable, and where that is written."""

from __future__ import annotations

import types
import weakref
from typing import Any

from omniloom.diffusion.hooks.transparent import Forward

FORWARD = "forward"
ORIGINAL = "_omni_original_forward"
REGISTRY = "_hook_registry"


class ComputeCell:
    """``original`` or ``compiled`` of one module; whoever reads ``current`` reads what is live.

    original: the module's forward as it was found, a bound method or an attribute that another library set.
    own: ``forward`` stood in the module's ``__dict__`` before us. compiled: ``None`` unless compiled.
    slot: where the callable stands while no hook is installed, normally ``forward``.
    """

    __slots__ = ("__weakref__", "_compiled", "module", "original", "own", "slot")

    def __init__(self, module: Any, original: Forward, *, own: bool, slot: str = FORWARD) -> None:
        self.module = module
        self.original = original
        self.own = own
        self.slot = slot
        self._compiled: Forward | None = None

    @classmethod
    def of(cls, module: Any) -> ComputeCell:
        """Return the module's cell: of its registry, of its compiled forward, or a new one that nothing refers to."""
        attributes = module.__dict__
        for key in (REGISTRY, FORWARD, ORIGINAL):
            holder = attributes.get(key)
            cell = getattr(holder, "cell", None)
            # functools.update_wrapper gives another library's wrapper all attributes of what it wraps, also this one.
            if isinstance(cell, cls) and cell.module is module and (key == REGISTRY or cell.compiled is holder):
                return cell
        slot = ORIGINAL if ORIGINAL in attributes else FORWARD  # another library keeps the callable there
        own = slot in attributes
        return cls(module, attributes[slot] if own else module.forward, own=own, slot=slot)

    @classmethod
    def compiled_of(cls, module: Any) -> ComputeCell | None:
        """Return the cell of a module that is compiled, also where another library's wrapper holds the callable."""
        cell = _COMPILED.get(id(module))
        attributes = module.__dict__
        return cell if cell is not None and (cell.slot in attributes or REGISTRY in attributes) else None

    @property
    def compiled(self) -> Forward | None:
        """The compiled callable, or ``None``."""
        return self._compiled

    @compiled.setter
    def compiled(self, value: Forward | None) -> None:
        self._compiled = value
        if value is not None:
            _COMPILED[id(self.module)] = self
        elif _COMPILED.get(id(self.module)) is self:
            del _COMPILED[id(self.module)]

    @property
    def current(self) -> Forward:
        """The live callable."""
        return self.original if self.compiled is None else self.compiled

    def settle(self) -> None:
        """Write ``current`` to where it stands without hooks; of an untouched module that leaves nothing behind."""
        attributes = self.module.__dict__
        if self.compiled is None and not self.own:
            attributes.pop(self.slot, None)
        else:
            attributes[self.slot] = self.current

    @property
    def function(self) -> Any | None:
        """The class's function that ``original`` is bound from; ``None`` if it is anything else."""
        return None if self.own or not isinstance(self.original, types.MethodType) else self.original.__func__

    def assign(self, forward: Forward) -> None:
        """Take a forward that someone set on the module; what was compiled is dropped."""
        function = getattr(type(self.module), "forward", None)
        self.original = forward
        self.own = function is None or forward != types.MethodType(function, self.module)
        self.compiled = None

    def follow_class(self) -> bool:
        """Take over a ``forward`` that the module's class has got meanwhile; True if it changed.

        A compiled callable of the old one is dropped: it would compute something else.
        """
        function = getattr(type(self.module), "forward", None)
        if self.function is None or function is None or self.function is function:
            return False
        self.original = types.MethodType(function, self.module)
        self.compiled = None
        return True


# Cells that have a compiled callable, by the id of their module, which each holds.
_COMPILED: weakref.WeakValueDictionary[int, ComputeCell] = weakref.WeakValueDictionary()
