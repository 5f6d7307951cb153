"""Sampling parameters of one request: immutable, validated before anything runs, named as in diffusers."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping
from typing import Any

from omniloom.config import UNSET, Unset, to_plain
from omniloom.errors import RequestError, suggest

MAX_SIDE = 16384
MAX_PIXELS = 7680 * 4320
MAX_STEPS = 10_000
MAX_OUTPUTS = 64
MAX_FRAMES = 10_000
MAX_SEED = 2**64 - 1
OUTPUT_TYPES = ("pil", "np", "pt", "latent")


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """What a request asks for. A field that is ``UNSET`` (or ``None``) takes the model's default; 0 is 0.

    ``negative_prompt=None`` alone has a meaning of its own: no negative prompt, even where the model has a default.

    height, width: pixels. num_inference_steps: denoising steps. sigmas: an own noise schedule, descending.
    guidance_scale, guidance_scale_2, true_cfg_scale: as the pipeline defines them. seed: output i uses seed + i;
    drawn if not given. num_outputs_per_prompt: images or videos. num_frames, fps: video. strength: 0..1, how far an
    input image is changed. output_type: "pil", "np", "pt" or "latent". extra_args: further arguments of the
    pipeline's call, passed on as they are.
    """

    num_inference_steps: int | Unset = UNSET
    sigmas: tuple[float, ...] | Unset = UNSET
    height: int | Unset = UNSET
    width: int | Unset = UNSET
    guidance_scale: float | Unset = UNSET
    guidance_scale_2: float | Unset = UNSET
    true_cfg_scale: float | Unset = UNSET
    negative_prompt: str | None | Unset = UNSET
    seed: int | Unset = UNSET
    num_outputs_per_prompt: int | Unset = UNSET
    num_frames: int | Unset = UNSET
    fps: float | Unset = UNSET
    strength: float | Unset = UNSET
    max_sequence_length: int | Unset = UNSET
    output_type: str | Unset = UNSET
    extra_args: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None and field.name != "negative_prompt":
                object.__setattr__(self, field.name, {} if field.name == "extra_args" else UNSET)
        if isinstance(self.sigmas, list):
            object.__setattr__(self, "sigmas", tuple(self.sigmas))
        self.validate()
        object.__setattr__(self, "extra_args", types.MappingProxyType(dict(self.extra_args)))

    def validate(self) -> None:
        """Raise ``RequestError`` for the first value that is of a wrong type or out of range."""
        self._integer("num_inference_steps", 1, MAX_STEPS)
        self._integer("height", 1, MAX_SIDE)
        self._integer("width", 1, MAX_SIDE)
        self._integer("seed", 0, MAX_SEED)
        self._integer("num_outputs_per_prompt", 1, MAX_OUTPUTS)
        self._integer("num_frames", 1, MAX_FRAMES)
        self._integer("max_sequence_length", 1, 1_000_000)
        self._number("guidance_scale", 0.0, 1000.0)
        self._number("guidance_scale_2", 0.0, 1000.0)
        self._number("true_cfg_scale", 0.0, 1000.0)
        self._number("fps", 0.0, 1000.0, above=True)
        self._number("strength", 0.0, 1.0)
        if self.height is not UNSET and self.width is not UNSET and self.height * self.width > MAX_PIXELS:
            raise RequestError(f"size {self.width}x{self.height} has too many pixels: at most {MAX_PIXELS} are allowed")
        if self.negative_prompt is not UNSET and not isinstance(self.negative_prompt, (str, type(None))):
            raise RequestError(f"negative_prompt={self.negative_prompt!r}: must be a string or None")
        if self.output_type is not UNSET and self.output_type not in OUTPUT_TYPES:
            raise RequestError(f"output_type={self.output_type!r}: must be one of {', '.join(OUTPUT_TYPES)}")
        if not isinstance(self.extra_args, Mapping):
            raise RequestError(f"extra_args={self.extra_args!r}: must be a mapping of call arguments")
        if self.sigmas is not UNSET:
            self._check_sigmas()

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Make parameters from plain names; raises ``RequestError`` with a suggestion for an unknown name."""
        known = {field.name for field in dataclasses.fields(cls)}
        for key in values:
            if key not in known:
                raise RequestError(
                    f"unknown parameter {key!r}{suggest(key, known)} (allowed: {', '.join(sorted(known))})"
                )
        return cls(**values)

    def over(self, weaker: SamplingParams) -> SamplingParams:
        """Return these parameters with what is not given here taken from ``weaker``."""
        given = {**weaker.given(), **self.given()}
        given["extra_args"] = {**weaker.extra_args, **self.extra_args}
        return SamplingParams(**given)

    def given(self) -> dict[str, Any]:
        """Return the fields that are set, without ``extra_args``."""
        pairs = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self) if f.name != "extra_args")
        return {name: value for name, value in pairs if value is not UNSET}

    def to_dict(self) -> dict[str, Any]:
        """Return the set fields as plain JSON types."""
        plain = to_plain(self.given())
        return {**plain, "extra_args": to_plain(dict(self.extra_args))} if self.extra_args else plain

    def _integer(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if value is UNSET:
            return
        if isinstance(value, bool) or not isinstance(value, int):
            raise RequestError(f"{name}={value!r}: must be an integer from {low} to {high}")
        if not low <= value <= high:
            raise RequestError(f"{name}={value}: must be from {low} to {high}")

    def _number(self, name: str, low: float, high: float, above: bool = False) -> None:
        value = getattr(self, name)
        if value is UNSET:
            return
        wanted = f"must be a number {'above' if above else 'from'} {low:g}{' and at most' if above else ' to'} {high:g}"
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise RequestError(f"{name}={value!r}: {wanted}")
        if not low <= value <= high or (above and value == low):
            raise RequestError(f"{name}={value}: {wanted}")

    def _check_sigmas(self) -> None:
        sigmas: Any = self.sigmas
        numbers = (
            isinstance(sigmas, tuple)
            and sigmas
            and all(
                isinstance(s, (int, float)) and not isinstance(s, bool) and math.isfinite(s) and s >= 0 for s in sigmas
            )
        )
        if not numbers:
            raise RequestError(f"sigmas={sigmas!r}: must be a non-empty list of numbers from 0 up")
        if any(a <= b for a, b in zip(sigmas, sigmas[1:], strict=False)):
            raise RequestError(f"sigmas={list(sigmas)}: must descend")
        if self.num_inference_steps is not UNSET and self.num_inference_steps != len(sigmas):
            raise RequestError(
                f"num_inference_steps={self.num_inference_steps} contradicts {len(sigmas)} sigmas: leave one out"
            )
