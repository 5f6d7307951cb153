"""Hooks on live modules: one ordered call chain per module, state per request, setup as a transaction.

registry = HookRegistry.get_or_create(block)
registry.register_hook("mine", MyHook())            # pre_forward, post_forward, new_forward
registry.install("timer", timer, phase=Phase.TRACE) # timer(call_next, module, *args, **kwargs)
print(*explain(model), sep="\\n")
"""

from omniloom.diffusion.hooks.cell import ComputeCell
from omniloom.diffusion.hooks.chain import Around, Middleware
from omniloom.diffusion.hooks.explain import Explanation, explain
from omniloom.diffusion.hooks.hook import ModelHook
from omniloom.diffusion.hooks.lease import Lease
from omniloom.diffusion.hooks.phases import HookError, Phase
from omniloom.diffusion.hooks.registry import HookRegistry
from omniloom.diffusion.hooks.rows import RowMap, Rows, current_rows, joint
from omniloom.diffusion.hooks.state import (
    CALL,
    CallContext,
    StateManager,
    calling,
    current_call,
    held,
    is_joinable,
    release,
)
from omniloom.diffusion.hooks.transaction import transaction
from omniloom.diffusion.hooks.validate import Finding, validate

__all__ = [
    "CALL",
    "Around",
    "CallContext",
    "ComputeCell",
    "Explanation",
    "Finding",
    "HookError",
    "HookRegistry",
    "Lease",
    "Middleware",
    "ModelHook",
    "Phase",
    "RowMap",
    "Rows",
    "StateManager",
    "calling",
    "current_call",
    "current_rows",
    "explain",
    "held",
    "is_joinable",
    "joint",
    "release",
    "transaction",
    "validate",
]
