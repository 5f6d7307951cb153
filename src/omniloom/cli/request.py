"""From typed flags and a configuration file to a request: only what was really given is passed on."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import omniloom.options  # noqa: F401  (registers the options that can be checked before torch is imported)
from omniloom.cli.typed import parse_settings, parse_size
from omniloom.config import RuntimeConfig, load_file, options
from omniloom.engine.params import SamplingParams
from omniloom.engine.prompt import parse_prompt
from omniloom.errors import ConfigError, RequestError

# SamplingParams field -> the flag that sets it
FLAGS = {
    "num_inference_steps": "--steps",
    "seed": "--seed",
    "num_outputs_per_prompt": "--n",
    "guidance_scale": "--guidance-scale",
    "true_cfg_scale": "--true-cfg-scale",
    "strength": "--strength",
    "max_sequence_length": "--max-sequence-length",
    "num_frames": "--frames",
    "fps": "--fps",
}


@dataclasses.dataclass(frozen=True)
class Flags:
    """What was typed; ``None`` and empty tuples mean "not typed"."""

    prompt: str
    negative_prompt: str | None = None
    images: tuple[Path, ...] = ()
    mask: Path | None = None
    size: str | None = None
    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    settings: tuple[str, ...] = ()
    config: Path | None = None


@dataclasses.dataclass(frozen=True)
class Job:
    """A checked request: the prompt for the engine, its parameters, and the option layers for the model."""

    prompt: dict[str, Any]
    params: SamplingParams
    file_options: Mapping[str, Any]
    typed_options: Mapping[str, Any]

    def config(self) -> RuntimeConfig:
        """Resolve the options. Call it when ``omniloom.omni`` is imported, which registers the last of them."""
        return RuntimeConfig.resolve(file=self.file_options, cli=self.typed_options)


def make_job(flags: Flags) -> Job:
    """Check everything that can be checked without a model. Raises ``RequestError`` or ``ConfigError``."""
    file = load_file(flags.config) if flags.config else {}
    file_params = file.pop("params", None) or {}
    if not isinstance(file_params, Mapping):
        raise ConfigError(f"{flags.config}: 'params' must be a mapping of sampling parameters, for example seed: 7")
    params = _typed_params(flags).over(SamplingParams.from_mapping(file_params))
    if "output_type" in params.given() and params.output_type != "pil":
        raise ConfigError(
            f"{flags.config}: output_type={params.output_type!r} cannot be used here: pictures are written"
        )
    job = Job(_prompt(flags), params, file, _typed_options(flags))
    for layer in (job.file_options, job.typed_options):
        RuntimeConfig.resolve(given={key: value for key, value in layer.items() if key in options()})
    return job


def _prompt(flags: Flags) -> dict[str, Any]:
    prompt: dict[str, Any] = {"prompt": flags.prompt}
    if flags.negative_prompt is not None:
        prompt["negative_prompt"] = flags.negative_prompt
    if flags.images:
        prompt["image"] = [str(path) for path in flags.images]
    if flags.mask is not None:
        prompt["mask_image"] = str(flags.mask)
    parse_prompt(prompt)
    return prompt


def _typed_params(flags: Flags) -> SamplingParams:
    given = {name: value for name, value in flags.sampling.items() if value is not None}
    if flags.size is not None:
        given["width"], given["height"] = parse_size(flags.size)
    try:
        return SamplingParams.from_mapping(given)
    except RequestError as error:
        raise RequestError(in_flags(str(error))) from error


def _typed_options(flags: Flags) -> dict[str, Any]:
    typed = {name: value for name, value in flags.options.items() if value is not None}
    settings = parse_settings(flags.settings)
    for name in typed.keys() & settings.keys():
        raise ConfigError(f"--{name} and --set {name}=… are both given: leave one of them out")
    return {**typed, **settings}


def in_flags(message: str) -> str:
    """Say ``--steps 0: …`` where a message begins with ``num_inference_steps=0: …``."""
    match = re.match(r"(\w+)=([^:]*): ", message)
    if match and match[1] in FLAGS:
        return f"{FLAGS[match[1]]} {match[2]}: {message[match.end() :]}"
    return message
