"""The hooks of one module: an ordered chain around its compute cell.

What stands in ``module.__dict__`` depends on (hooked, compiled) alone:

    neither             nothing of ours
    compiled            forward = the compiled callable
    hooked              forward = the dispatcher, _omni_original_forward = the original, _hook_registry
    hooked, compiled    forward = the dispatcher, _omni_original_forward = the compiled callable, _hook_registry
"""

from __future__ import annotations

import copy
import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from omniloom.diffusion.hooks.cell import FORWARD, ORIGINAL, REGISTRY, ComputeCell
from omniloom.diffusion.hooks.chain import Around, Member, Pair, arrange, compose
from omniloom.diffusion.hooks.dispatcher import Dispatcher
from omniloom.diffusion.hooks.hook import FunctionRef, ModelHook, around, overrides
from omniloom.diffusion.hooks.phases import HookError, Phase
from omniloom.diffusion.hooks.transparent import Forward

log = logging.getLogger(__name__)

# Registries by the id of their module, which each holds; an entry lives as long as its registry. So a registry without
# hooks, which leaves nothing on the module, is still found again by whoever asks while it exists.
_LOCK = threading.Lock()
_REGISTRIES: weakref.WeakValueDictionary[int, HookRegistry] = weakref.WeakValueDictionary()


class HookRegistry:
    """The hooks and middlewares of ``module``. Get it with ``HookRegistry.get_or_create(module)``.

    Names are unique per module. Changing the chain is safe while other threads call the module: a call runs the chain
    that was there when it began.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.cell = ComputeCell.of(module)
        self.members: tuple[Member, ...] = ()
        self._after: Mapping[str, Forward] = {}
        self._innermost: Forward | None = None
        self._lock = threading.RLock()
        self.dispatcher: Dispatcher | None = None

    @classmethod
    def get_or_create(cls, module: Any) -> HookRegistry:
        """Return the module's registry. A new one changes nothing on the module until something is registered."""
        with _LOCK:
            found = cls.find(module)
            if found is None:
                _REGISTRIES[id(module)] = found = cls(module)
            return found

    check_if_exists_or_initialize = get_or_create

    @classmethod
    def find(cls, module: Any) -> HookRegistry | None:
        """Return the module's registry if there is one."""
        found = module.__dict__.get(REGISTRY)
        return found if isinstance(found, cls) and found.module is module else _REGISTRIES.get(id(module))

    @property
    def installed(self) -> bool:
        """Whether the module is hooked: the dispatcher stands in (or below another library's) ``module.forward``."""
        return self.module.__dict__.get(REGISTRY) is self

    @property
    def on_top(self) -> bool:
        """Whether ``module.forward`` is the dispatcher itself."""
        return self.dispatcher is not None and self.module.__dict__.get(FORWARD) is self.dispatcher

    @property
    def hooks(self) -> dict[str, Any]:
        """Hooks and middlewares by name, outermost first."""
        return {member.name: member.source for member in self.members}

    def register_hook(
        self, name: str, hook: ModelHook, *, phase: Phase | int | str | None = None, order: int | None = None
    ) -> None:
        """Put ``hook`` into the chain. ``phase`` and ``order`` default to the hook's own.

        Raises ``HookError`` for a name that is taken, an unknown phase, something that is no ``ModelHook`` and a hook
        with a ``new_forward`` that is registered elsewhere (it has one ``fn_ref``), and whatever ``initialize_hook``
        raises. Then nothing has changed.
        """
        if not isinstance(hook, ModelHook):
            raise HookError(f"register_hook(name, hook) takes a ModelHook, not {hook!r}")
        before = hook.fn_ref
        if overrides(hook, "new_forward") and _is_registered(hook):
            raise HookError(f"this hook is registered as {before.name!r} already; make one per module and name")  # type: ignore[union-attr]

        def start() -> None:
            hook.fn_ref = FunctionRef(self, name)
            try:
                given = hook.initialize_hook(self.module)
                if given is not None and given is not self.module:
                    hook.detach_hook(self.module)
                    raise HookError(f"initialize_hook of {name!r} returned another module; a hook cannot replace it")
            except BaseException:
                hook.fn_ref = before
                raise

        self._add(name, hook, *around(hook), phase, order, start)

    def install(
        self, name: str, middleware: Around, *, phase: Phase | int | str | None = None, order: int | None = None
    ) -> None:
        """Put a native middleware into the chain. Raises ``HookError`` as ``register_hook`` does."""
        if isinstance(middleware, ModelHook) or not callable(middleware):
            raise HookError(f"install(name, middleware) takes a callable, not {middleware!r}")
        self._add(name, middleware, middleware, None, phase, order)

    def remove_hook(self, name: str) -> bool:
        """Take a hook or a middleware out of the chain. Returns ``False`` if there is none of that name.

        ``detach_hook`` is called first; if it raises, the hook stays.
        """
        with self._lock:
            member = self._member(name)
            if member is None:
                return False
            if isinstance(member.source, ModelHook):
                member.source.detach_hook(self.module)
            self._set(tuple(m for m in self.members if m is not member))
            return True

    def get_hook(self, name: str) -> Any | None:
        """Return the hook or middleware of that name, or ``None``."""
        member = self._member(name)
        return None if member is None else member.source

    def reset_hook(self, name: str) -> bool:
        """Let a hook forget its state. Returns ``False`` if there is none of that name."""
        hook = self.get_hook(name)
        if isinstance(hook, ModelHook):
            hook.reset_state(self.module)
        return hook is not None

    def call_after(self, name: str) -> Forward:
        """Return what the member ``name`` calls next; for one that was removed, the live innermost callable."""
        if self.installed and self.module.__dict__.get(ORIGINAL) is not self._innermost:
            self.refresh()
        found = self._after.get(name)
        return ComputeCell.of(self.module).current if found is None else found

    def set_compiled(self, compiled: Forward | None) -> None:
        """Swap the compute cell of a hooked module; nothing else changes."""
        with self._lock:
            self.cell.compiled = compiled
            self.module.__dict__[ORIGINAL] = self.cell.current
            self.refresh()

    def refresh(self) -> Forward:
        """Compose the chain anew from what is live; return its entry."""
        with self._lock:
            attributes = self.module.__dict__
            given = attributes.get(ORIGINAL, self.cell.current)
            if self.installed and given is not self.cell.current:
                self.cell.assign(given)  # someone set the attribute itself: that is the forward from now on
            elif self.cell.follow_class():
                log.warning("%s has got another forward; its hooks use it from now on", type(self.module).__name__)
            if self.installed:
                attributes[ORIGINAL] = self.cell.current
            self._innermost = self.cell.current
            entry, self._after = compose(self.members, self._innermost, self.module)
            if self.dispatcher is not None:
                self.dispatcher.set_live(self._innermost, entry)
            return entry

    def restore(self, members: tuple[Member, ...]) -> None:
        """Set the whole chain at once (a transaction's way back); no callbacks are called."""
        with self._lock:
            self._set(members)

    def _member(self, name: str) -> Member | None:
        return next((member for member in self.members if member.name == name), None)

    def _add(
        self,
        name: str,
        source: Any,
        call: Any,
        pair: Pair | None,
        phase: Phase | int | str | None,
        order: int | None,
        start: Callable[[], None] | None = None,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise HookError(f"a hook's name is a text, not {name!r}")
        chosen = Phase.of(getattr(source, "phase", Phase.COMPUTE) if phase is None else phase)
        place = getattr(source, "order", 0) if order is None else order
        if not isinstance(place, int):
            raise HookError(f"the order of hook {name!r} is a whole number, not {place!r}")
        with self._lock:
            if self._member(name) is not None:
                raise HookError(
                    f"hook {name!r} is there already; call remove_hook({name!r}) first, or take another name"
                )
            before = self.members
            if not self.installed:
                self._enter()
            try:
                if start is not None:
                    start()
                self._set(arrange([*self.members, Member(name, chosen, place, source, call, pair)]))
            except BaseException:
                self._set(before)
                raise

    def _set(self, members: tuple[Member, ...]) -> None:
        self.members = members
        if members and not self.installed:
            self._enter()
        self.refresh()
        if not members and self.installed:
            self._leave()

    def _enter(self) -> None:
        attributes = self.module.__dict__
        if ORIGINAL in attributes:
            raise HookError(f"{type(self.module).__name__} has an {ORIGINAL} that is not ours; remove that hook first")
        self.cell = ComputeCell.of(self.module)
        self.dispatcher = Dispatcher(self, self.cell)
        attributes[ORIGINAL] = self.cell.current
        attributes[REGISTRY] = self
        attributes[FORWARD] = self.dispatcher
        self.refresh()

    def _leave(self) -> None:
        attributes = self.module.__dict__
        if FORWARD in attributes and not self.on_top:
            log.warning(
                "another library's forward (%r) stands on the hooks of %s; they stay below it, passing through",
                attributes[FORWARD],
                type(self.module).__name__,
            )
            return
        for key in (ORIGINAL, REGISTRY, FORWARD):
            attributes.pop(key, None)
        self.dispatcher = None
        self.cell.settle()

    def __deepcopy__(self, memo: dict[int, Any]) -> HookRegistry:
        """The copied module's registry: its own hooks (copied), its own weights, not compiled."""
        module = copy.deepcopy(self.module, memo)
        if id(self) in memo:  # it was made on the way, as an attribute of the module
            return memo[id(self)]
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.module = module
        twin.cell = ComputeCell(module, copy.deepcopy(self.cell.original, memo), own=self.cell.own, slot=self.cell.slot)
        twin._lock = threading.RLock()
        twin._innermost, twin._after, twin.members = None, {}, ()
        twin.dispatcher = Dispatcher(twin, twin.cell) if self.installed else None
        copies: list[Member] = []
        for member in self.members:
            source = copy.deepcopy(member.source, memo)
            if isinstance(source, ModelHook):
                source.fn_ref = FunctionRef(twin, member.name)
                copies.append(Member(member.name, member.phase, member.order, source, *around(source)))
            else:
                copies.append(Member(member.name, member.phase, member.order, source, source))
        twin.members = tuple(copies)
        _REGISTRIES[id(module)] = twin
        return twin

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("a module with hooks cannot be pickled; remove the hooks first, or save its state_dict")

    def __repr__(self) -> str:
        return f"<HookRegistry of {type(self.module).__name__}: {', '.join(self.hooks) or 'no hooks'}>"


def _is_registered(hook: ModelHook) -> bool:
    ref = hook.fn_ref
    return isinstance(ref, FunctionRef) and ref.registry.get_hook(ref.name) is hook
