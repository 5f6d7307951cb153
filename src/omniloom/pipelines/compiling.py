"""Compiling the denoisers of a pipeline, as the option ``compile`` says."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

from omniloom.config import coerce, register_section, reject_unknown
from omniloom.diffusion.compile.warmup import Bucket
from omniloom.errors import ConfigError, OmniloomError, suggest
from omniloom.pipelines.build import LoadedPipeline

GRANULARITIES = ("none", "regional", "full")
BUCKET_KEYS = tuple(field.name for field in dataclasses.fields(Bucket))
_SIZE = re.compile(r"([0-9]{1,6})\s*[xX×]\s*([0-9]{1,6})(?:\s*[xX×]\s*([0-9]{1,6}))?")


@register_section(
    "compile", help="Compilation: none, regional (each kind of block once) or full.", shorthand="granularity"
)
@dataclasses.dataclass(frozen=True)
class CompileOptions:
    """granularity: what is compiled. dynamic, backend, mode: as in ``torch.compile``. budget: how often a kind of block
    may be compiled anew before calls of new shapes run eagerly. warmup: sizes to run once after loading, so that the
    first request compiles nothing: "WIDTHxHEIGHT", "WIDTHxHEIGHTxFRAMES", or mappings with ``BUCKET_KEYS``.
    """

    granularity: str = "none"
    dynamic: bool | None = True
    backend: str = "inductor"
    mode: str | None = None
    budget: int = 4
    warmup: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        if self.granularity not in GRANULARITIES:
            hint = suggest(self.granularity, GRANULARITIES)
            allowed = ", ".join(GRANULARITIES)
            raise ConfigError(f"unknown compile granularity {self.granularity!r}{hint} (allowed: {allowed})")
        if self.budget < 0:
            raise ConfigError(f"compile.budget={self.budget}: must be from 0")
        object.__setattr__(self, "warmup", tuple([parse_bucket(item) for item in self.warmup]))


def parse_bucket(given: Any) -> Bucket:
    """Return the warm-up size that a text or a mapping names. Raises ``ConfigError`` with what is allowed."""
    if isinstance(given, Bucket):
        return given
    if isinstance(given, str):
        match = _SIZE.fullmatch(given.strip())
        if not match:
            raise ConfigError(f'compile.warmup: {given!r} is not "WIDTHxHEIGHT" or "WIDTHxHEIGHTxFRAMES"')
        given = {"width": int(match[1]), "height": int(match[2])} | ({"frames": int(match[3])} if match[3] else {})
    if not isinstance(given, Mapping):
        raise ConfigError(
            f'compile.warmup: {given!r} is neither "WIDTHxHEIGHT" nor a mapping with some of: {", ".join(BUCKET_KEYS)}'
        )
    reject_unknown(given, set(BUCKET_KEYS), "compile.warmup")
    for key, value in given.items():
        if coerce(value, int if key == "batch" else int | None, f"compile.warmup.{key}") is not None and value < 1:
            raise ConfigError(f"compile.warmup.{key}={value}: must be from 1")
    return Bucket(**given)


def compile_denoisers(loaded: LoadedPipeline, options: CompileOptions) -> None:
    """Compile every denoiser of the pipeline; ``loaded.undo`` takes it back.

    Raises ``ConfigError`` if there is no denoiser, for a backend or mode that torch refuses, and for warm-up sizes with
    nothing to warm up; ``HookError`` for a denoiser with nothing to compile, and for pairs that do not go together.
    """
    if options.granularity == "none":
        if options.warmup:
            raise ConfigError('compile.warmup has nothing to warm up: give compile.granularity "regional" or "full"')
        return
    from omniloom.diffusion.compile import CompilePolicy, compile_model, uncompile
    from omniloom.diffusion.hooks import validate

    denoisers = denoisers_of(loaded)
    if not denoisers:
        raise ConfigError(f"compile={options.granularity}: {type(loaded.pipe).__name__} has no denoiser to compile")
    policy = CompilePolicy(options.granularity, options.budget, strict=True)
    arguments = {"dynamic": options.dynamic, "backend": options.backend, "mode": options.mode}
    for module in denoisers.values():
        try:
            compile_model(module, policy, **{key: value for key, value in arguments.items() if value is not None})
        except OmniloomError:
            raise
        except Exception as error:  # torch.compile has its own for a wrong backend or mode
            raise ConfigError(f"option compile={options}: {' '.join(str(error).split())}") from error
        validate(module, strict=True)
        loaded.undo.append(functools.partial(uncompile, module))


def compilation_report(loaded: LoadedPipeline) -> dict[str, Any]:
    """Return, per denoiser and class of block, what happened so far: graphs, breaks, recompiles, seconds, fallbacks."""
    from omniloom.diffusion.compile import compile_report

    records = {name: compile_report(module) for name, module in denoisers_of(loaded).items()}
    return {name: {label: r.to_dict() for label, r in found.items()} for name, found in records.items()}


def denoisers_of(loaded: LoadedPipeline) -> dict[str, Any]:
    """Return the components that the denoising loop calls, by name."""
    components = loaded.pipe.components
    return {name: components[name] for name in loaded.family.denoisers if components.get(name) is not None}
