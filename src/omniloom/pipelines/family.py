"""What omniloom knows about a model family, as data. A family adds facts, never code of its own."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any


class BranchRule(enum.Enum):
    """How the branch (cond, uncond, …) of a denoiser call is known where no ``cache_context`` names it.

    ORDER: one call per branch and step, in the order of ``branch_names``; without guidance only the first.
    BATCHED: the rows of a step's first call are the branches, in that order; without guidance only the last named one.
    UNKNOWN: not established; features that need branches (step caches) stay off.
    """

    ORDER = "order"
    BATCHED = "batched"
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True)
class Branches:
    """Identity of denoiser calls. ``names``: branches in order. ``extra``: further calls of a step, in order.

    A pipeline that opens ``denoiser.cache_context(name)`` around its calls always wins over this.
    """

    rule: BranchRule = BranchRule.UNKNOWN
    names: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    unguided: tuple[str, ...] = ()  # BATCHED: the rows of a call without guidance


@dataclasses.dataclass(frozen=True)
class FrameRule:
    """Legal frame counts are ``k * stride + 1``; ``stride`` is a number or an attribute of the pipeline."""

    stride: int | str


@dataclasses.dataclass(frozen=True, eq=False)
class Family:
    """Facts about one family of pipelines. Sizes are given as factors: numbers, or attributes of the pipeline."""

    name: str
    pipelines: tuple[str, ...]  # diffusers classes, the one that a folder usually names first
    denoisers: tuple[str, ...] = ("transformer",)  # components that the denoising loop calls
    blocks: Mapping[str, str] = dataclasses.field(default_factory=dict)  # list attribute -> class of its blocks
    size_stride: tuple[int | str, ...] = ()  # the product divides height and width
    default_size: tuple[int | str, ...] = ()  # the product is the side of a default image; empty: the call's default
    frames: FrameRule | None = None  # legal frame counts
    fps: float | None = None  # frames per second that a video is meant to be shown at
    # task -> (pipeline class, setting of the pipeline that must be true), where diffusers' own mapping has nothing
    siblings: Mapping[str, tuple[str, str | None]] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # where the call's own are not meant
    # parameter -> (component, config key) without which the model ignores it
    needs: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    schedule_args: tuple[str, ...] = ()  # what the pipeline always passes to scheduler.set_timesteps
    many_images: tuple[str, ...] = ()  # pipelines that work from several images; the others take one
    one_output: bool = False  # the pipeline fails for several outputs of one prompt
    global_rng: bool = False  # encoding draws from torch's global generator: one request at a time
    branches: Branches = Branches()  # identity of denoiser calls


GENERIC = Family(name="generic", pipelines=(), denoisers=("transformer", "transformer_2", "unet"))


def product(pipe: Any, factors: tuple[int | str, ...]) -> int | None:
    """Multiply numbers and pipeline attributes; ``None`` without factors or where an attribute is missing."""
    result = 1
    for factor in factors:
        value = getattr(pipe, factor, None) if isinstance(factor, str) else factor
        if not isinstance(value, int):
            return None
        result *= value
    return result if factors else None
