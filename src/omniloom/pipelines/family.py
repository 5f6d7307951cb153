"""What omniloom knows about a model family, as data. A family adds facts, never code of its own."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any


class BranchRule(enum.Enum):
    """How the branch (cond, uncond, …) of a denoiser call is known.

    CACHE_CONTEXT: the pipeline opens ``denoiser.cache_context(name)`` around each call.
    BATCHED: one call per step whose rows are the branches, in the family's order.
    ORDER: one call per branch and step, in the family's order.
    UNKNOWN: not established; features that need branches (step caches) stay off.
    """

    CACHE_CONTEXT = "cache_context"
    BATCHED = "batched"
    ORDER = "order"
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True, eq=False)
class Family:
    """Facts about one family of pipelines.

    pipelines: diffusers pipeline classes, the one that a folder usually names first.
    denoisers: components that the denoising loop calls. blocks: class name of a repeated block -> attribute of the
    denoiser that lists them. size_stride: factors (numbers or pipeline attributes) whose product divides height and
    width. default_size: the same, whose product is the side of a default image; empty: the call's own default.
    defaults: sampling parameters that differ from the defaults in the pipeline's call. needs: parameter ->
    (component, config key) without which the model ignores it. schedule_args: what the pipeline always passes to
    ``scheduler.set_timesteps`` and a chosen scheduler must take. branches, branch_names: identity of denoiser calls.
    """

    name: str
    pipelines: tuple[str, ...]
    denoisers: tuple[str, ...] = ("transformer",)
    blocks: Mapping[str, str] = dataclasses.field(default_factory=dict)
    size_stride: tuple[int | str, ...] = ()
    default_size: tuple[int | str, ...] = ()
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    needs: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    schedule_args: tuple[str, ...] = ()
    branches: BranchRule = BranchRule.UNKNOWN
    branch_names: tuple[str, ...] = ()


GENERIC = Family(name="generic", pipelines=())
_BY_PIPELINE: dict[str, Family] = {}


def register(family: Family) -> Family:
    """Add a family to the registry."""
    for pipeline in family.pipelines:
        if pipeline in _BY_PIPELINE:
            raise ValueError(f"{pipeline} belongs to {_BY_PIPELINE[pipeline].name} already")
        _BY_PIPELINE[pipeline] = family
    return family


def family_of(pipeline_class: str) -> Family:
    """Return the family of a pipeline class; ``GENERIC`` for one that nothing is known about."""
    from omniloom.pipelines import families  # noqa: F401  (fills the registry)

    return _BY_PIPELINE.get(pipeline_class, GENERIC)


def known_families() -> list[Family]:
    """Return all registered families by name."""
    from omniloom.pipelines import families  # noqa: F401

    return sorted(set(_BY_PIPELINE.values()), key=lambda family: family.name)


def product(pipe: Any, factors: tuple[int | str, ...]) -> int | None:
    """Multiply numbers and pipeline attributes; ``None`` without factors or where an attribute is missing."""
    result = 1
    for factor in factors:
        value = getattr(pipe, factor, None) if isinstance(factor, str) else factor
        if not isinstance(value, int):
            return None
        result *= value
    return result if factors else None
