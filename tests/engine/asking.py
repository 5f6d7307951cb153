"""Turns the keyword arguments of a plain diffusers call into our prompt and parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from omniloom import SamplingParams
from omniloom.engine.output import Output

_PROMPT_KEYS = ("prompt", "negative_prompt", "image", "mask_image")
_FIELDS = {field.name for field in dataclasses.fields(SamplingParams)}
_RENAMED = {"num_images_per_prompt": "num_outputs_per_prompt", "num_videos_per_prompt": "num_outputs_per_prompt"}


def asked(call: Mapping[str, Any], **more: Any) -> tuple[dict[str, Any], SamplingParams]:
    """Return (prompt, params) for the diffusers call ``call``; ``more``: further parameters (seed, output_type)."""
    call = {_RENAMED.get(key, key): value for key, value in call.items()}
    prompt = {key: call[key] for key in _PROMPT_KEYS if key in call}
    fields = {key: value for key, value in call.items() if key in _FIELDS and key not in _PROMPT_KEYS}
    extra = {key: value for key, value in call.items() if key not in _FIELDS and key not in prompt}
    return prompt, SamplingParams(**fields, **more, extra_args=extra)


def content(output: Output) -> np.ndarray:
    """Return whatever an output holds as one array."""
    for value in (output.latents, output.images, output.frames):
        if value is not None:
            return as_array(value)
    raise AssertionError(f"{output} is empty")


def as_array(value: Any) -> np.ndarray:
    """Return a tensor, an array or nested lists of pictures as one array."""
    if isinstance(value, list):
        return np.stack([as_array(item) for item in value])
    return np.asarray(value)
