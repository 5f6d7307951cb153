"""Compiling the denoisers of a pipeline, as the option ``compile`` says."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from omniloom.config import register_section
from omniloom.errors import ConfigError, OmniloomError, suggest
from omniloom.pipelines.build import LoadedPipeline

GRANULARITIES = ("none", "regional", "full")


@register_section(
    "compile", help="Compilation: none, regional (each kind of block once) or full.", shorthand="granularity"
)
@dataclasses.dataclass(frozen=True)
class CompileOptions:
    """granularity: what is compiled. dynamic, backend, mode: as in ``torch.compile``. budget: how often a kind of block
    may be compiled anew before calls of new shapes run eagerly.
    """

    granularity: str = "none"
    dynamic: bool | None = True
    backend: str = "inductor"
    mode: str | None = None
    budget: int = 4

    def __post_init__(self) -> None:
        if self.granularity not in GRANULARITIES:
            hint = suggest(self.granularity, GRANULARITIES)
            allowed = ", ".join(GRANULARITIES)
            raise ConfigError(f"unknown compile granularity {self.granularity!r}{hint} (allowed: {allowed})")
        if self.budget < 0:
            raise ConfigError(f"compile.budget={self.budget}: must be from 0")


def compile_denoisers(loaded: LoadedPipeline, options: CompileOptions) -> None:
    """Compile every denoiser of the pipeline; ``loaded.undo`` takes it back. Nothing to compile is an error."""
    if options.granularity == "none":
        return
    from omniloom.diffusion.compile import CompilePolicy, compile_model, uncompile

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
