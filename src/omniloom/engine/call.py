"""From a prompt and sampling parameters to the arguments of one pipeline call, checked against its signature."""

from __future__ import annotations

import dataclasses
import inspect
import secrets
from collections.abc import Mapping
from typing import Any

import torch

from omniloom.config import UNSET, to_plain
from omniloom.engine.params import SamplingParams
from omniloom.engine.prompt import Prompt
from omniloom.errors import ModelError, RequestError, suggest
from omniloom.pipelines.build import LoadedPipeline
from omniloom.pipelines.family import Family
from omniloom.pipelines.sizes import check_frames, check_size, default_size
from omniloom.pipelines.tasks import pipeline_for

_SEED_SPACE = 2**64
_COUNT_NAMES = ("num_images_per_prompt", "num_videos_per_prompt")
_PASSED = (
    "num_inference_steps",
    "height",
    "width",
    "guidance_scale",
    "guidance_scale_2",
    "true_cfg_scale",
    "num_frames",
    "strength",
    "max_sequence_length",
)


@dataclasses.dataclass(frozen=True)
class Call:
    """One pipeline call: the prototype that serves it, its keyword arguments (without generators), its seeds, and
    everything as it was resolved. ``guidance``: the scale for a pipeline that keeps it in a guider object.
    """

    prototype: Any
    guidance: float | None
    arguments: Mapping[str, Any]
    seeds: tuple[int, ...]
    output_type: str
    resolved: Mapping[str, Any]
    warnings: tuple[str, ...]

    def generators(self) -> list[torch.Generator]:
        """Return one fresh CPU generator per output: the same seed gives the same noise on every device."""
        return [torch.Generator("cpu").manual_seed(seed) for seed in self.seeds]


def prepare_call(loaded: LoadedPipeline, prompt: Prompt, params: SamplingParams) -> Call:
    """Resolve one request: parameters over the folder's defaults over the family's over the call's own.

    Raises ``RequestError`` for anything that this pipeline does not take or cannot make.
    """
    pipe = pipeline_for(loaded, images=len(prompt.images), mask=prompt.mask is not None)
    name, accepted = type(pipe).__name__, call_parameters(type(pipe))
    guided_by_object = "guidance_scale" not in accepted and hasattr(getattr(pipe, "guider", None), "guidance_scale")
    _refuse_foreign(params, {*accepted, *(["guidance_scale"] if guided_by_object else [])}, name)
    chosen = _chosen(loaded, prompt, params, accepted)
    count = _count(chosen, accepted, loaded.family, name)
    arguments = {
        **_text_arguments(prompt, chosen, accepted, name),
        **_sampling_arguments(chosen, accepted),
        **{counter: count for counter in _COUNT_NAMES if counter in accepted},
    }
    arguments |= _sizes(pipe, loaded.family, arguments, accepted)
    check_frames(pipe, loaded.family, arguments.get("num_frames"))
    arguments |= _extra_arguments(chosen, accepted, name)
    first = secrets.randbelow(2**32) if chosen.seed is UNSET else chosen.seed
    seeds = tuple((first + i) % _SEED_SPACE for i in range(count))
    output_type = "pil" if chosen.output_type is UNSET else chosen.output_type
    guidance = None if not guided_by_object or chosen.guidance_scale is UNSET else float(chosen.guidance_scale)
    resolved = {
        **_resolved(arguments, accepted, chosen, loaded.family),
        **(
            {"guidance_scale": pipe.guider.guidance_scale if guidance is None else guidance} if guided_by_object else {}
        ),
        **{"seed": seeds[0], "num_outputs_per_prompt": count, "output_type": output_type},
    }
    warnings = tuple(_unheeded(pipe, loaded.family, params))
    return Call(pipe, guidance, arguments, seeds, output_type, resolved, warnings)


def folder_defaults(loaded: LoadedPipeline) -> SamplingParams:
    """Return the sampling defaults that a model folder brings. Raises ``ModelError`` if they are wrong."""
    try:
        return SamplingParams.from_mapping(loaded.defaults)
    except RequestError as error:
        raise ModelError(f"{loaded.folder}/omniloom.json: {error}") from error


def call_parameters(cls: Any) -> dict[str, Any]:
    """Return the parameters of a pipeline class's call with their defaults (``inspect.Parameter.empty`` for none)."""
    parameters = inspect.signature(cls.__call__).parameters
    return {name: p.default for name, p in parameters.items() if name != "self" and p.kind is p.POSITIONAL_OR_KEYWORD}


def _refuse_foreign(params: SamplingParams, accepted: set[str], name: str) -> None:
    own = {"seed", "num_outputs_per_prompt", "output_type"} | ({"fps"} if "num_frames" in accepted else set())
    for key in params.given():
        if key not in own | accepted:
            takes = [k for k in (*_PASSED, "sigmas", "negative_prompt") if k in accepted]
            raise RequestError(f"{name} takes no {key}; it takes: {', '.join(takes)}")


def _chosen(
    loaded: LoadedPipeline, prompt: Prompt, params: SamplingParams, accepted: Mapping[str, Any]
) -> SamplingParams:
    """Lay the request's parameters over the folder's defaults over the family's; the prompt's own words win."""
    known = {key: value for key, value in loaded.defaults.items() if key in accepted or key == "negative_prompt"}
    chosen = params.over(SamplingParams.from_mapping(known)).over(SamplingParams(**loaded.family.defaults))
    if prompt.negative is not UNSET:
        chosen = dataclasses.replace(chosen, negative_prompt=prompt.negative)
    if params.sigmas is not UNSET and params.num_inference_steps is UNSET:
        chosen = dataclasses.replace(chosen, num_inference_steps=len(params.sigmas))
    return chosen


def _count(params: SamplingParams, accepted: Mapping[str, Any], family: Family, name: str) -> int:
    count = 1 if params.num_outputs_per_prompt is UNSET else params.num_outputs_per_prompt
    if count != 1 and (family.one_output or not any(counter in accepted for counter in _COUNT_NAMES)):
        raise RequestError(
            f"num_outputs_per_prompt={count}: {name} makes one output per request; give the prompt again"
        )
    return count


def _sampling_arguments(params: SamplingParams, accepted: Mapping[str, Any]) -> dict[str, Any]:
    arguments = {key: value for key in _PASSED if key in accepted and (value := getattr(params, key)) is not UNSET}
    if params.sigmas is not UNSET:
        arguments["sigmas"] = list(params.sigmas)
    if params.fps is not UNSET and "frame_rate" in accepted:  # the model itself wants to know
        arguments["frame_rate"] = params.fps
    return arguments


def _extra_arguments(params: SamplingParams, accepted: Mapping[str, Any], name: str) -> dict[str, Any]:
    for key in params.extra_args:
        if key not in accepted:
            allowed = ", ".join(sorted(accepted))
            raise RequestError(f"extra_args: {name} takes no {key!r}{suggest(key, accepted)} (allowed: {allowed})")
    return dict(params.extra_args)


def _text_arguments(prompt: Prompt, params: SamplingParams, accepted: Mapping[str, Any], name: str) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if prompt.text is not None:
        arguments["prompt"] = prompt.text
    negative = params.negative_prompt
    if negative is not UNSET and negative is not None:
        if "negative_prompt" not in accepted:
            raise RequestError(f"{name} takes no negative prompt")
        arguments["negative_prompt"] = negative
    for key, value in prompt.extra.items():
        if key not in accepted:
            raise RequestError(f"{name} takes no {key}")
        arguments[key] = value
    if prompt.images:
        arguments["image"] = prompt.images[0] if len(prompt.images) == 1 else list(prompt.images)
    if prompt.mask is not None:
        arguments["mask_image"] = prompt.mask
    return arguments


def _sizes(pipe: Any, family: Family, arguments: Mapping[str, Any], accepted: Mapping[str, Any]) -> dict[str, int]:
    """Check the size and fill in what is known of a default one, so that it is checked and reported too."""
    if "height" not in accepted:
        return {}
    sizes = {key: arguments[key] for key in ("height", "width") if key in arguments}
    check_size(pipe, family, sizes.get("height"), sizes.get("width"))
    side = default_size(pipe, family)
    if side is not None and "image" not in arguments:
        sizes = {"height": side, "width": side, **sizes}
    return sizes


def _resolved(
    arguments: Mapping[str, Any], accepted: Mapping[str, Any], params: SamplingParams, family: Family
) -> dict[str, Any]:
    """Return what the call will use, its own defaults included, as plain JSON types."""
    names = [key for key in (*_PASSED, "sigmas", "negative_prompt") if key in accepted]
    resolved = {key: arguments.get(key, accepted[key]) for key in names}
    if "num_frames" in accepted:
        rate = arguments.get("frame_rate", accepted.get("frame_rate", family.fps))
        resolved["fps"] = rate if params.fps is UNSET else params.fps
    if params.extra_args:
        resolved["extra_args"] = dict(params.extra_args)
    return to_plain({key: v for key, v in resolved.items() if v is not inspect.Parameter.empty and v is not None})


def _unheeded(pipe: Any, family: Family, params: SamplingParams) -> list[str]:
    """Return a line for each given parameter that this model takes and cannot heed."""
    lines = []
    for key, (component, entry) in family.needs.items():
        if key in params.given() and not getattr(pipe, component).config.get(entry):
            lines.append(
                f"{key} has no effect: this {component} was trained without it ({entry} is false); see true_cfg_scale"
            )
    return lines
