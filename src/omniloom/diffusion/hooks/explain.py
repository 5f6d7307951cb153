"""What is in effect on a model's modules, in order and with reasons."""

from __future__ import annotations

import dataclasses
from typing import Any

from omniloom.diffusion.hooks.cell import FORWARD, REGISTRY, ComputeCell
from omniloom.diffusion.hooks.hook import ModelHook
from omniloom.diffusion.hooks.phases import REASONS
from omniloom.diffusion.hooks.registry import HookRegistry


@dataclasses.dataclass(frozen=True)
class Link:
    """One hook or middleware, as it is in effect. ``active``: False if it overrides nothing and so costs nothing."""

    name: str
    phase: str
    order: int
    kind: str
    active: bool
    reason: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """One module that has hooks or is compiled. ``links``: outermost first. ``compute``: "original" or "compiled"."""

    path: str
    class_name: str
    links: tuple[Link, ...]
    compute: str
    on_top: str | None = None

    def __str__(self) -> str:
        lines = [f"{self.path or '(root)'} ({self.class_name})"]
        if self.on_top:
            lines.append(f"  {self.on_top}: set on top by another library")
        lines += [f"  {link.phase:<9} {link.name} [{link.kind}]: {link.reason}" for link in self.links]
        return "\n".join([*lines, f"  {'COMPUTE':<9} {self.compute} forward"])


def explain(model: Any) -> list[Explanation]:
    """Return an ``Explanation`` for each module of ``model`` that is hooked or compiled, in the order of the modules.

    ``print(*explain(model), sep="\\n")`` reads as a table.
    """
    found = []
    for path, module in model.named_modules():
        registry = installed(module)
        compiled = ComputeCell.compiled_of(module) is not None
        if registry is None and not compiled:
            continue
        found.append(
            Explanation(
                path=path,
                class_name=type(module).__name__,
                links=() if registry is None else tuple(_links(registry)),
                compute="compiled" if compiled else "original",
                on_top=foreign_on_top(module),
            )
        )
    return found


def installed(module: Any) -> HookRegistry | None:
    """Return the module's registry if it is hooked."""
    registry = module.__dict__.get(REGISTRY)
    return registry if isinstance(registry, HookRegistry) and registry.installed else None


def foreign_on_top(module: Any) -> str | None:
    """Describe what another library set over our dispatcher; ``None`` if nothing was."""
    registry = installed(module)
    if registry is None or registry.on_top:
        return None
    above = module.__dict__.get(FORWARD)
    return "its class's own forward" if above is None else f"{type(above).__module__}.{type(above).__name__}"


def _links(registry: HookRegistry) -> list[Link]:
    links = []
    for member in registry.members:
        active = member.around is not None
        links.append(
            Link(
                name=member.name,
                phase=member.phase.name,
                order=member.order,
                kind="hook" if isinstance(member.source, ModelHook) else "middleware",
                active=active,
                reason=REASONS[member.phase] if active else "overrides nothing, so it is not called",
            )
        )
    return links
