"""Pairs that do not work together, each with what to do instead."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from omniloom.diffusion.hooks.cell import ComputeCell
from omniloom.diffusion.hooks.explain import foreign_on_top, installed
from omniloom.diffusion.hooks.phases import HookError, Phase
from omniloom.diffusion.hooks.state import is_joinable
from omniloom.errors import shorten


@dataclasses.dataclass(frozen=True)
class Finding:
    """A pair that does not work (``error``) or works at a cost, at ``path``, with a ``fix``."""

    path: str
    pair: str
    problem: str
    fix: str
    error: bool = False

    def __str__(self) -> str:
        return f"{self.path or '(root)'}: {self.pair}: {self.problem}; {self.fix}"


def validate(model: Any, *, strict: bool = False) -> list[Finding]:
    """Return what does not go together on ``model`` (empty: all is well). Changes nothing.

    Raises ``HookError`` if there is an error among the findings; with ``strict`` if there is any finding.
    """
    findings = list(itertools.chain(*(check(model) for check in _CHECKS)))
    bad = [finding for finding in findings if finding.error or strict]
    if bad:
        raise HookError("; ".join([shorten([str(finding) for finding in bad], 5)]))
    return findings


def _walk(model: Any) -> Iterator[tuple[str, Any, list[Any]]]:
    """Yield path, module and the modules it is inside of, outermost first."""
    modules = dict(model.named_modules())
    for path, module in modules.items():
        parts = path.split(".") if path else []
        above = [modules.get(".".join(parts[:n])) for n in range(len(parts))]
        yield path, module, [m for m in above if m is not None]


def _phases(module: Any) -> set[Phase]:
    registry = installed(module)
    return set() if registry is None else {member.phase for member in registry.members}


def _inside_compiled(model: Any) -> Iterator[Finding]:
    for path, module, above in _walk(model):
        registry = installed(module)
        around = [cell for cell in map(ComputeCell.compiled_of, above) if cell is not None]
        if registry is None or not registry.members or not around:
            continue
        names = shorten(member.name for member in registry.members)
        full = getattr(around[0].compiled, "granularity", "regional") == "full"
        yield Finding(
            path,
            f"hook {names} × {'full' if full else 'regional'} compilation of {type(around[-1].module).__name__}",
            "each call breaks the graph of the compiled module around it",
            'compile with granularity "regional"' if full else "put the hook on the compiled block itself",
            error=full,
        )


def _traced_dispatcher(model: Any) -> Iterator[Finding]:
    for path, module in model.named_modules():
        if installed(module) is not None and getattr(module, "_compiled_call_impl", None) is not None:
            yield Finding(
                path,
                "hooks × module.compile()",
                "the whole call is compiled, hooks included",
                "use omniloom.diffusion.compile.regionally_compile, which leaves hooks outside",
                error=True,
            )


def _covered(model: Any) -> Iterator[Finding]:
    for path, module in model.named_modules():
        above = foreign_on_top(module)
        if above is not None:
            yield Finding(
                path,
                f"hooks × {above}",
                "another library set its own forward over the hooks; they run only if it calls what it found",
                "remove that first, then the hooks, or set it before the hooks",
            )


def _waiting_inside_lease(model: Any) -> Iterator[Finding]:
    for path, module, above in _walk(model):
        leased = [m for m in above if Phase.LEASE in _phases(m)]
        for phase in (Phase.BATCH, Phase.LEASE):
            if leased and phase in _phases(module):
                yield Finding(
                    path,
                    f"{phase.name} × LEASE of {type(leased[-1]).__name__}",
                    "it would wait for others while it holds a lease, and they for it",
                    "put it on the component's root, next to the lease",
                    error=True,
                )


def _alone_in_company(model: Any) -> Iterator[Finding]:
    for path, module, above in _walk(model):
        registry = installed(module)
        if registry is None:
            continue
        outer = any(Phase.BATCH in _phases(m) for m in above)
        here = Phase.BATCH in _phases(module)
        for member in registry.members:
            if (outer or (here and member.phase > Phase.BATCH)) and not is_joinable(member.source):
                yield Finding(
                    path,
                    f"{member.name} × BATCH",
                    "it keeps state and does not read the row map, so requests are not joined",
                    "remove one of them, or let it read current_rows() and declare joinable = True",
                )


_CHECKS = (_inside_compiled, _traced_dispatcher, _covered, _waiting_inside_lease, _alone_in_company)
