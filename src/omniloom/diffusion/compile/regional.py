"""Compile a model's repeated blocks (or all of it), and undo it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch

from omniloom.diffusion.compile.compiled import Compiled
from omniloom.diffusion.compile.matching import Match, class_names, find_blocks, list_names
from omniloom.diffusion.compile.options import block_arguments
from omniloom.diffusion.compile.policy import CompilePolicy, Granularity
from omniloom.diffusion.compile.record import ClassRecord
from omniloom.diffusion.hooks.cell import ComputeCell
from omniloom.diffusion.hooks.explain import installed
from omniloom.diffusion.hooks.phases import HookError
from omniloom.diffusion.hooks.registry import HookRegistry
from omniloom.diffusion.hooks.transparent import Forward
from omniloom.errors import shorten

log = logging.getLogger(__name__)


def regionally_compile(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Compile each repeated block of ``model`` with ``torch.compile(forward, *args, **kwargs)``; return ``model``.

    Blocks are modules of the classes in ``model._repeated_blocks``, wrappers around such, and members of the lists that
    ``_layerwise_offload_blocks_attrs`` (or ``_regional_compile_blocks_attrs``) names. Without ``_repeated_blocks``, or
    without a match, a warning is logged and nothing changes. Blocks that are compiled already are left as they are.

    Hooks stay outside of the graphs: only what they call is replaced. All compiled callables are made before the first
    is put in place, so an exception leaves the model as it was.
    """
    compile_model(model, CompilePolicy(), *args, **kwargs)
    return model


def compile_model(model: Any, policy: CompilePolicy, *args: Any, **kwargs: Any) -> dict[str, ClassRecord]:
    """Compile ``model`` as ``policy`` says; return what ``compile_report`` returns.

    Raises ``HookError``, and changes nothing, for what cannot be combined: with granularity "full" hooks or compiled
    blocks inside of the model; other libraries' hooks on a block; with ``strict`` also hooks inside of a block, and
    nothing to compile.
    """
    if policy.granularity is Granularity.NONE:
        return {}
    full = policy.granularity is Granularity.FULL
    whole = _active(model)
    if not full and whole is not None and whole.granularity == Granularity.FULL:
        raise HookError(f"{type(model).__name__} is compiled as a whole × regional; call uncompile(model) first")
    matches = [Match("", model, type(model).__name__)] if full else _blocks(model, policy)
    refuse = _refuse_full if full else _refuse_regional
    for match in matches:
        refuse(match, policy)
    records: dict[str, ClassRecord] = {}
    made: list[tuple[ComputeCell, Compiled]] = []
    for match in matches:
        if _active(match.module) is not None:
            continue
        cell = ComputeCell.of(match.module)
        record = records.setdefault(match.label, ClassRecord(match.label, policy.budget, str(policy.granularity)))
        arguments = dict(kwargs) if full else block_arguments(model, kwargs)
        made.append((cell, Compiled(cell, torch.compile(cell.original, *args, **arguments), record)))
        record.blocks += 1
    for cell, compiled in made:
        _swap(cell, compiled)
    log.info("compiled %d modules of %s (%s)", len(made), type(model).__name__, ", ".join(records))
    return compile_report(model)


def uncompile(model: Any) -> Any:
    """Put every original forward of ``model`` back, wherever the compiled one stands; return ``model``."""
    for module in model.modules():
        compiled = _active(module)
        if compiled is not None:
            _swap(compiled.cell, None)
    return model


def compile_report(model: Any) -> dict[str, ClassRecord]:
    """Return a record per class of what is compiled in ``model``. ``record.to_dict()`` has plain JSON types."""
    found: dict[str, ClassRecord] = {}
    for compiled in compiled_in(model):
        record = compiled.record
        label, number = record.class_name, 1
        while found.setdefault(label, record) is not record:  # blocks that were added and compiled later
            number += 1
            label = f"{record.class_name} ({number})"
    return found


def compiled_in(model: Any) -> Iterator[Compiled]:
    """Yield what is compiled in ``model``, in the order of the modules."""
    for module in model.modules():
        compiled = _active(module)
        if compiled is not None:
            yield compiled


def _blocks(model: Any, policy: CompilePolicy) -> list[Match]:
    name = type(model).__name__
    classes = class_names(model)
    if not classes:
        problem = f"{name} has no _repeated_blocks, so there is nothing to compile regionally"
        fix = 'set it to the class names of its repeated blocks, or use granularity "full"'
    else:
        matches = find_blocks(model)
        if matches:
            return matches
        problem = f"{name} has no module of the classes {shorten(classes)}"
        lists = list_names(model)
        fix = "correct _repeated_blocks" + (f" or the list names {shorten(lists)}" if lists else "")
    if policy.strict:
        raise HookError(f"{problem}; {fix}")
    log.warning("%s: it stays uncompiled", problem)
    return []


def _refuse_regional(match: Match, policy: CompilePolicy) -> None:
    foreign = _foreign_hooks(match.module)
    if foreign:
        raise HookError(
            f"{match.path or match.label}: {foreign} × compilation: their code would be traced into the graph; "
            "compile first, then enable them"
        )
    if getattr(match.module, "_compiled_call_impl", None) is not None:
        raise HookError(
            f"{match.path or match.label}: module.compile() × regional compilation: it is compiled already, hooks "
            "included; load the model anew, or leave out one of the two"
        )
    inside = [path for path, module in match.module.named_modules() if path and _hooked(module)]
    if inside and policy.strict:
        raise HookError(
            f"{match.path or match.label}: hooks inside of the block ({shorten(inside)}) × regional compilation: each "
            "call breaks the graph; put them on the block itself"
        )


def _refuse_full(match: Match, policy: CompilePolicy) -> None:
    for path, module in match.module.named_modules():
        if path and _active(module) is not None:
            raise HookError(f"{path} is compiled already × full compilation; call uncompile(model) first")
        hooks = _foreign_hooks(module)
        if path and _hooked(module):
            hooks = f"the hooks {shorten(HookRegistry.get_or_create(module).hooks)}"
        if hooks:
            raise HookError(
                f"{path or match.label}: {hooks} × full compilation: they would run inside of the graph; "
                'use granularity "regional", which leaves the hooks of blocks outside'
            )


def _hooked(module: Any) -> bool:
    registry = installed(module)
    return registry is not None and bool(registry.members)


def _foreign_hooks(module: Any) -> str | None:
    """Name diffusers' own hooks on ``module``, which wrap its forward."""
    registry = module.__dict__.get("_diffusers_hook")
    names = getattr(registry, "hooks", None)
    return f"diffusers' hooks ({shorten(names)})" if names else None


def _active(module: Any) -> Compiled | None:
    cell = ComputeCell.compiled_of(module)
    return cell.compiled if cell is not None and isinstance(cell.compiled, Compiled) else None


def _swap(cell: ComputeCell, compiled: Forward | None) -> None:
    """Set or take away what a cell's module computes with, and write it where it stands."""
    before, registry = cell.compiled, installed(cell.module)
    if registry is not None and registry.cell is cell:
        registry.set_compiled(compiled)
        return
    standing = cell.module.__dict__.get(cell.slot)
    cell.compiled = compiled
    if before is None or standing is before:
        cell.settle()
