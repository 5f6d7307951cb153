"""What stands in ``module.forward`` while the module has hooks."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from omniloom.diffusion.hooks.cell import ORIGINAL, ComputeCell
from omniloom.diffusion.hooks.transparent import Forward, Transparent, outside_of_graphs

if TYPE_CHECKING:
    from omniloom.diffusion.hooks.registry import HookRegistry

REASON = "omniloom: a hook on a module inside of a compiled region runs outside of its graph"


class Dispatcher(Transparent):
    """Calls the composed chain. Compiler-disabled: where a compiled region reaches it, there is a graph break."""

    _torchdynamo_disable = True
    _torchdynamo_disable_msg = REASON

    def __init__(self, registry: HookRegistry, cell: ComputeCell) -> None:
        self.registry = registry
        self.cell = cell
        self.module = registry.module
        self._attributes = self.module.__dict__
        self._live: tuple[Any, Any, Forward] = (self, None, cell.current)  # never current: composed at the first call
        self._look_like(cell.original)

    def set_live(self, innermost: Forward, entry: Forward) -> None:
        """Take a newly composed chain; one assignment, so other threads see the old or the new one."""
        self._live = (innermost, self.cell.function, entry)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        innermost, function, entry = self._live
        if self._attributes.get(ORIGINAL) is not innermost or (
            function is not None and type(self.module).forward is not function
        ):
            # Of a registry that was left and entered again, this may be an old one that another library kept.
            entry = self.registry.refresh() if self.registry.dispatcher is self else self.cell.current
        return entry(*args, **kwargs)

    def _stands_for(self) -> Forward:
        return self.cell.current

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = copy.deepcopy(self.registry, memo)
        return twin.dispatcher or copy.deepcopy(self.cell.original, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.registry.__reduce_ex__(protocol)


outside_of_graphs(Dispatcher.__call__, REASON)
