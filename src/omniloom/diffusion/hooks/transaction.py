"""Setup that happens whole or not at all."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch

from omniloom.diffusion.hooks.cell import ComputeCell
from omniloom.diffusion.hooks.chain import Member
from omniloom.diffusion.hooks.hook import FunctionRef, ModelHook
from omniloom.diffusion.hooks.registry import HookRegistry

log = logging.getLogger(__name__)


@contextlib.contextmanager
def transaction(*models: Any, in_place: bool = True) -> Iterator[None]:
    """Whatever is done to ``models`` inside is undone if the block raises; the exception goes on.

    Restored are, for every module below the given ones: its class and attributes, submodules, parameters and buffers
    (the same objects with the same bytes), hooks, middlewares and compiled callables, torch's own hooks. Hooks that
    were registered inside get their ``detach_hook``; one that was removed inside is back without being initialized
    again, since what its initialization did to the module is back as well.

    in_place=False promises that nothing inside writes into an existing tensor's memory; then no weights are copied.
    Without it the block costs a copy of all weights for as long as it lasts.
    """
    saved = [_Saved(module, in_place) for module in dict.fromkeys(m for model in models for m in model.modules())]
    try:
        yield
    except BaseException:
        for one in reversed(saved):
            one.detach_new()
        for one in saved:
            one.restore()
        raise


class _Tensor:
    """A parameter or buffer: the object, the memory it showed, and a copy of the bytes there."""

    def __init__(self, tensor: torch.Tensor, in_place: bool) -> None:
        self.tensor = tensor
        self.shown = tensor.detach()
        self.version = self.shown._version
        self.requires_grad = tensor.requires_grad
        self.bytes = self.shown.clone() if in_place and not tensor.is_meta else None

    def restore(self) -> None:
        with torch.no_grad():
            self.tensor.data = self.shown
            if self.bytes is not None and not _same_bytes(self.shown, self.bytes):
                self.shown.copy_(self.bytes)
        if self.tensor.requires_grad != self.requires_grad:
            self.tensor.requires_grad_(self.requires_grad)
        if self.bytes is None and self.shown._version != self.version:
            log.error("a tensor was written to inside transaction(in_place=False); its old bytes are lost")


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare bytes: NaN equals NaN, and -0 differs from 0. Tensors that do not show their bytes count as changed."""
    try:
        return torch.equal(*(t.contiguous().flatten().view(torch.uint8) for t in (a, b)))
    except (RuntimeError, NotImplementedError):
        return False


def _same_items(a: Mapping[Any, Any], b: Mapping[Any, Any]) -> bool:
    return list(a) == list(b) and all(a[key] is b[key] for key in b)


class _Saved:
    """Everything about one module that a setup may change."""

    def __init__(self, module: Any, in_place: bool) -> None:
        self.module = module
        self.cls = type(module)
        self.attributes = dict(module.__dict__)
        self.contents = {k: dict(v) for k, v in self.attributes.items() if isinstance(v, MutableMapping)}
        tensors = [*module._parameters.values(), *module._buffers.values()]
        self.tensors = [_Tensor(tensor, in_place) for tensor in tensors if tensor is not None]
        self.registry = HookRegistry.find(module)
        self.dispatcher = self.registry.dispatcher if self.registry else None
        self.members: tuple[Member, ...] = self.registry.members if self.registry else ()
        self.refs = [(m.source, m.source.fn_ref) for m in self.members if isinstance(m.source, ModelHook)]
        self.assigned = [(ref, ref.assigned) for _, ref in self.refs if isinstance(ref, FunctionRef)]
        self.compiled = ComputeCell.compiled_of(module)
        self.cell = ComputeCell.of(module)
        self.callables = [(c, c.original, c.own, c.compiled) for c in (self.cell, self.compiled) if c is not None]

    def detach_new(self) -> None:
        registry = HookRegistry.find(self.module)
        for member in registry.members if registry else ():
            if isinstance(member.source, ModelHook) and not any(member.source is m.source for m in self.members):
                try:
                    member.source.detach_hook(self.module)
                except Exception:
                    log.warning(
                        "detach_hook of %r failed while its registration was undone", member.name, exc_info=True
                    )

    def restore(self) -> None:
        registry = HookRegistry.find(self.module)
        compiled = ComputeCell.compiled_of(self.module)
        if compiled is not None and compiled is not self.compiled:
            compiled.compiled = None  # made inside: whoever holds its callable gets the original
        self.module.__class__ = self.cls
        attributes = self.module.__dict__
        for key in [key for key in attributes if key not in self.attributes]:
            del attributes[key]
        attributes.update(self.attributes)
        for key, content in self.contents.items():
            if not _same_items(attributes[key], content):  # what did not change may refuse to be written
                attributes[key].clear()
                attributes[key].update(content)
        for tensor in self.tensors:
            tensor.restore()
        for cell, original, own, compiled_callable in self.callables:
            cell.original, cell.own, cell.compiled = original, own, compiled_callable
        for hook, ref in self.refs:
            hook.fn_ref = ref
        for ref, assigned in self.assigned:
            ref.assigned = assigned
        if registry is not None:
            registry.cell, registry.dispatcher = self.cell, self.dispatcher
            registry.restore(self.members)
