"""From what the user typed to a loaded pipeline: find, plan, check that it fits, load, set up."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from omniloom.checkpoint.hub import resolve_model
from omniloom.config import RuntimeConfig, to_plain
from omniloom.diffusion.hooks.transaction import transaction
from omniloom.errors import ConfigError, MemoryLimitError, ModelError
from omniloom.pipelines.build import LoadedPipeline, build_pipeline
from omniloom.pipelines.compiling import compile_denoisers
from omniloom.pipelines.demo import demo_folder
from omniloom.pipelines.families import family_of
from omniloom.pipelines.index import check_protocol, read_index
from omniloom.pipelines.quantizing import component_configs
from omniloom.pipelines.schedulers import choose_scheduler
from omniloom.pipelines.single_file import transformer_source
from omniloom.platform import default_device, recommended_dtype
from omniloom.platform.memory import available_bytes

LoadProgress = Callable[[str, int, int], Any]
SINGLE_FILE_COMPONENT = "transformer"  # what a single-file model stands for in its base folder


@dataclasses.dataclass(frozen=True)
class LoadPlan:
    """Every decision before a tensor moves. ``needed_bytes``: weights that need memory of their own (not mapped)."""

    folder: str | None
    file: str | None
    device: str
    dtype: str
    needed_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return to_plain(self)


def load_pipeline(
    model: str | Path,
    config: RuntimeConfig,
    progress: LoadProgress | None = None,
    before_reading: Callable[[LoadedPipeline], None] | None = None,
) -> tuple[LoadedPipeline, LoadPlan]:
    """Load ``model`` as ``config`` says. See ``Omni`` for what may be given and what is raised.

    ``before_reading`` sees the pipeline before any weights are read and may raise.
    """

    folder, file = _locate(model, config)
    index = read_index(folder)
    device, dtype = _device_and_dtype(config)
    given = "quantization_config, --quantization"

    def set_up(loaded: LoadedPipeline) -> None:
        _check_memory(loaded, device, dtype)
        _set_up(loaded, config)
        if before_reading is not None:
            before_reading(loaded)

    sources = {SINGLE_FILE_COMPONENT: transformer_source(file, index)} if file else None
    replaced = SINGLE_FILE_COMPONENT if file else None
    loaded = build_pipeline(
        folder,
        dtype=getattr(torch, dtype),
        device=device,
        variant=config.variant,
        progress=progress,
        sources=sources,
        before_reading=set_up,
        quantization=component_configs(index, config.quantization_config, given, replaced),
        given=given,
    )
    return loaded, LoadPlan(str(folder), str(file) if file else None, device, dtype, loaded.needed_bytes)


def adopt_pipeline(pipe: Any, config: RuntimeConfig) -> tuple[LoadedPipeline, LoadPlan]:
    """Take an existing diffusers pipeline object as it is: its device and dtype stay."""
    import diffusers

    if not isinstance(pipe, diffusers.DiffusionPipeline):
        raise ModelError(f"from_pipeline takes a diffusers pipeline object, not a {type(pipe).__name__}")
    if config.quantization_config is not None:
        raise ConfigError(
            "option 'quantization_config' cannot be used with from_pipeline: quantize the pipeline's modules before, "
            "with omniloom.quantization.quantize_(pipe.transformer, config)"
        )
    for key in ("dtype", "device", "base", "variant", "revision"):
        if config.source(key) != "default":
            raise ConfigError(f"option {key!r} cannot be used with from_pipeline: the pipeline object keeps its own")
    check_protocol(type(pipe))
    pipe = copy.copy(pipe)  # options must not change the caller's object
    loaded = LoadedPipeline(pipe, family_of(type(pipe).__name__), None, {}, {})
    _set_up(loaded, config)
    return loaded, LoadPlan(None, None, str(pipe.device), str(pipe.dtype).removeprefix("torch."), 0)


def _locate(model: str | Path, config: RuntimeConfig) -> tuple[Path, Path | None]:
    """Return the pipeline folder, and the single file that stands for its transformer."""
    found = find_model(model, config)
    if found.is_dir():
        if config.base is not None:
            raise ConfigError(f"option base={config.base!r} goes with a single-file model; {model} is a folder")
        return found, None
    if found.suffix != ".safetensors":
        raise ModelError(f"{found} is neither a pipeline folder nor a .safetensors file")
    if config.base is None:
        raise ModelError(
            f"{found} is a single file: say which pipeline it belongs to, for example --base FOLDER (base=…)"
        )
    return find_model(config.base, config), found


def find_model(model: str | Path, config: RuntimeConfig) -> Path:
    """Return the folder or file of a path, a hub id or ``"demo"``. Raises ``ModelError``."""
    if str(model) == "demo":
        return demo_folder()
    return resolve_model(model, revision=config.revision, variant=config.variant, offline=config.offline or None)


def _device_and_dtype(config: RuntimeConfig) -> tuple[str, str]:
    device = default_device() if config.device == "auto" else config.device
    there: dict[str, Callable[[], bool]] = {
        "cuda": torch.cuda.is_available,
        "xpu": torch.xpu.is_available,
        "mps": torch.backends.mps.is_available,
    }
    if not there.get(device.split(":")[0], lambda: True)():
        raise ConfigError(f"device {device!r} is not available here; see: omniloom check")
    return device, recommended_dtype(device) if config.dtype == "auto" else config.dtype


def _check_memory(loaded: LoadedPipeline, device: str, dtype: str) -> None:
    """Refuse what cannot fit, before a tensor is read. What an accelerator has is not known here."""
    available = available_bytes()
    if device == "cpu" and available is not None and loaded.needed_bytes > available:
        raise MemoryLimitError(
            f"{loaded.folder} needs {loaded.needed_bytes / 2**30:.1f} GiB for its weights in {dtype}, "
            f"{available / 2**30:.1f} GiB are free"
        )


def _set_up(loaded: LoadedPipeline, config: RuntimeConfig) -> None:
    """Apply options that change the prototype: scheduler, VAE modes, compilation. What is asked for and not there is an
    error, and then every module is as it was: no weights are copied for that, since none of this writes into them.
    """
    pipe = loaded.pipe
    before, undo = dict(vars(pipe)), list(loaded.undo)
    modules = [value for value in pipe.components.values() if isinstance(value, torch.nn.Module)]
    try:
        with transaction(*modules, in_place=False):
            _choose_scheduler(loaded, config)
            _set_vae_modes(loaded, config)
            compile_denoisers(loaded, config.compile)
    except BaseException:
        vars(pipe).clear()
        vars(pipe).update(before)
        loaded.undo[:] = undo
        raise


def _choose_scheduler(loaded: LoadedPipeline, config: RuntimeConfig) -> None:
    scheduler = getattr(loaded.pipe, "scheduler", None)
    if config.scheduler and scheduler is None:
        raise ConfigError(f"{type(loaded.pipe).__name__} has no scheduler to choose")
    if config.scheduler:
        loaded.pipe.scheduler = choose_scheduler(scheduler, config.scheduler, loaded.family)


def _set_vae_modes(loaded: LoadedPipeline, config: RuntimeConfig) -> None:
    vae = getattr(loaded.pipe, "vae", None)
    for mode in ("tiling", "slicing"):
        if not getattr(config.vae, mode):
            continue
        enable = getattr(vae, f"enable_{mode}", None)
        if enable is None:
            name = type(loaded.pipe if vae is None else vae).__name__
            raise ConfigError(f"option vae.{mode}: {name} has no {mode}")
        if not getattr(vae, f"use_{mode}", False):  # else it is the owner's, and stays
            enable()
            loaded.undo.append(getattr(vae, f"disable_{mode}"))
