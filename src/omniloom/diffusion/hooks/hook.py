"""The familiar hook: methods before, after and instead of a module's forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from omniloom.diffusion.hooks.chain import Pair
from omniloom.diffusion.hooks.phases import Phase
from omniloom.diffusion.hooks.transparent import Forward

if TYPE_CHECKING:
    from omniloom.diffusion.hooks.registry import HookRegistry


class FunctionRef:
    """``hook.fn_ref``: what a registered hook calls next.

    ``original_forward`` is read from the chain each time, so there is no copy to go stale; one that is assigned stays.
    """

    def __init__(self, registry: HookRegistry, name: str) -> None:
        self.registry = registry
        self.name = name
        self.assigned: Forward | None = None

    @property
    def original_forward(self) -> Forward:
        """The next callable; of the innermost hook the very object in ``module._omni_original_forward``."""
        return self.registry.call_after(self.name) if self.assigned is None else self.assigned

    @original_forward.setter
    def original_forward(self, value: Forward | None) -> None:
        self.assigned = value

    def __deepcopy__(self, memo: dict[int, Any]) -> FunctionRef | None:
        """Of a hook that is copied with its module, the copy's; a hook that is copied alone is not registered."""
        registry = memo.get(id(self.registry))
        return None if registry is None else FunctionRef(registry, self.name)


class ModelHook:
    """Methods around a module's forward; each one that is not overridden costs nothing.

    ``pre_forward`` returns new ``(args, kwargs)``, ``post_forward`` the new output. ``new_forward`` stands in for the
    forward and calls ``self.fn_ref.original_forward`` for it, or does not. ``unwind`` is told of an exception that
    came after ``pre_forward`` had returned and before ``post_forward`` was called. Which methods are overridden is
    read at registration.
    """

    phase: Phase = Phase.COMPUTE
    order: int = 0
    joinable: bool | None = None
    fn_ref: FunctionRef | None = None

    def initialize_hook(self, module: Any) -> Any:
        """Called once at registration; an exception rejects it. Returns the module (or ``None``)."""
        return module

    def detach_hook(self, module: Any) -> Any:
        """Called before the hook is removed; an exception refuses the removal."""
        return module

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments to go on with."""
        return args, kwargs

    def post_forward(self, module: Any, output: Any) -> Any:
        """Return the output to go on with."""
        return output

    def new_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Replace the forward."""
        assert self.fn_ref is not None, "the hook is not registered"
        return self.fn_ref.original_forward(*args, **kwargs)

    def unwind(self, module: Any, error: BaseException) -> None:
        """The call failed with ``error``, which goes on afterwards."""

    def reset_state(self, module: Any) -> Any:
        """Forget what was kept from earlier calls."""
        return module


def overrides(hook: ModelHook, method: str) -> bool:
    """Tell whether ``hook``, or its class, has a ``method`` of its own."""
    return method in vars(hook) or getattr(type(hook), method) is not getattr(ModelHook, method)


def around(hook: ModelHook) -> tuple[Callable[..., Any] | None, Pair | None]:
    """Return the middleware that runs ``hook``'s own methods (``None``: it has none), and its pair if that is all."""
    pre = hook.pre_forward if overrides(hook, "pre_forward") else None
    post = hook.post_forward if overrides(hook, "post_forward") else None
    new = hook.new_forward if overrides(hook, "new_forward") else None
    unwind = hook.unwind if overrides(hook, "unwind") else None
    if unwind is not None:
        return _guarded(pre, post, new, unwind), None
    if new is None and pre is None and post is None:
        return None, None
    return _plain(pre, post, new), (pre, post) if new is None else None


def _plain(pre: Any, post: Any, new: Any) -> Callable[..., Any]:
    def plain(call_next: Forward, module: Any, /, *args: Any, **kwargs: Any) -> Any:
        if pre is not None:
            args, kwargs = pre(module, *args, **kwargs)
        output = call_next(*args, **kwargs) if new is None else new(module, *args, **kwargs)
        return output if post is None else post(module, output)

    return plain


def _guarded(pre: Any, post: Any, new: Any, unwind: Any) -> Callable[..., Any]:
    def guarded(call_next: Forward, module: Any, /, *args: Any, **kwargs: Any) -> Any:
        if pre is not None:
            args, kwargs = pre(module, *args, **kwargs)
        try:
            output = call_next(*args, **kwargs) if new is None else new(module, *args, **kwargs)
        except BaseException as error:
            unwind(module, error)
            raise
        return output if post is None else post(module, output)

    return guarded
