"""A diffusers pipeline folder, built by its ``model_index.json`` with every module filled by our own loader."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from omniloom.errors import ModelError, shorten, suggest
from omniloom.pipelines.components import ComponentSpec, load_component
from omniloom.pipelines.families import family_of
from omniloom.pipelines.family import Family

Progress = Callable[[str, int, int], None]  # component, bytes done, bytes in all


@dataclasses.dataclass
class LoadedPipeline:
    """A pipeline that is ready to be cloned, and what is known about it.

    ``pipe`` is the prototype and is never called. ``defaults``: sampling parameters that the folder brings along.
    ``load_seconds``: per component. ``siblings``: prototypes of other classes over the same components, as needed.
    """

    pipe: Any
    family: Family
    folder: Path | None
    defaults: dict[str, Any]
    load_seconds: dict[str, float]
    siblings: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def sibling(self, cls: Any) -> Any:
        """Return a prototype of pipeline class ``cls`` over this pipeline's components and settings."""
        if cls is type(self.pipe):
            return self.pipe
        if cls not in self.siblings:
            own = {**dict(self.pipe.config), **self.pipe.components}
            names = [name for name in inspect.signature(cls.__init__).parameters if name != "self"]
            self.siblings[cls] = cls(**{name: own[name] for name in names if name in own})
        return self.siblings[cls]


@dataclasses.dataclass(frozen=True)
class PipelineIndex:
    """``model_index.json`` as read: the pipeline class, its components and its scalar settings."""

    folder: Path
    pipeline_class: str
    components: tuple[ComponentSpec, ...]
    absent: tuple[str, ...]
    settings: Mapping[str, Any]


def read_index(folder: Path) -> PipelineIndex:
    """Read and check ``model_index.json``. Raises ``ModelError`` if the folder is not a diffusers pipeline."""
    path = folder / "model_index.json"
    if not path.is_file():
        raise ModelError(_not_a_pipeline(folder))
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(index, dict) or not isinstance(index.get("_class_name"), str):
        raise ModelError(f"{path} names no pipeline class (_class_name): not a diffusers pipeline")
    components, absent, settings = [], [], {}
    for name, value in index.items():
        if name.startswith("_"):
            continue
        if isinstance(value, list) and len(value) == 2 and all(v is None or isinstance(v, str) for v in value):
            if value[0] is None:
                absent.append(name)
            else:
                own = folder / name
                components.append(ComponentSpec(name, value[0], value[1], own if own.is_dir() else folder))
        else:
            settings[name] = value
    return PipelineIndex(folder, index["_class_name"], tuple(components), tuple(absent), settings)


def build_pipeline(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    variant: str | None = None,
    progress: Progress | None = None,
    sources: Mapping[str, Any] | None = None,
) -> LoadedPipeline:
    """Build the pipeline in ``folder``. ``sources``: component name -> tensor source that replaces its own files.

    All classes are resolved and all folders looked for before a tensor is read. Raises ``ModelError`` or
    ``CheckpointError``.
    """
    index = read_index(folder)
    cls = pipeline_class(index.pipeline_class)
    check_protocol(cls)
    parameters = inspect.signature(cls.__init__).parameters
    for spec in index.components:
        spec.resolve()
        if spec.name not in parameters:
            hint = suggest(spec.name, parameters)
            raise ModelError(f"{folder}: {cls.__name__} has no component {spec.name!r}{hint}")
        if not (folder / spec.name).is_dir() and not _at_root(folder, spec):
            raise ModelError(
                f"{folder / spec.name} is missing: the folder of component {spec.name!r} ({spec.class_name})"
            )
    if variant and not any(_variant_of(spec, variant) for spec in index.components):
        raise ModelError(f"{folder} has no files of variant {variant!r}")
    given = {spec.name for spec in index.components} | set(index.absent)
    needed = [
        name
        for name, parameter in parameters.items()
        if name != "self"
        and parameter.default is inspect.Parameter.empty
        and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    lacking = [
        name
        for name in needed
        if name not in given and name not in index.settings and name not in cls._optional_components
    ]
    if lacking:
        raise ModelError(f"{folder / 'model_index.json'} lacks components of {cls.__name__}: {shorten(lacking)}")
    values: dict[str, Any] = {name: None for name in needed if name not in index.settings}
    values |= {name: None for name in index.absent if name in parameters}
    values |= {name: value for name, value in index.settings.items() if name in parameters}
    seconds = {}
    for spec in index.components:
        source = (sources or {}).get(spec.name)
        report = _component_progress(progress, spec, variant, source)
        loaded = load_component(
            spec, dtype=dtype, device=device, variant=_variant_of(spec, variant), progress=report, source=source
        )
        values[spec.name] = loaded.value
        seconds[spec.name] = loaded.seconds
    pipe = cls(**values)
    pipe.register_to_config(_name_or_path=str(folder))
    return LoadedPipeline(pipe, family_of(cls.__name__), folder, read_defaults(folder), seconds)


def pipeline_class(name: str) -> Any:
    """Return the diffusers pipeline class called ``name``. Raises ``ModelError`` if there is none."""
    import diffusers

    cls = getattr(diffusers, name, None)
    if not (isinstance(cls, type) and issubclass(cls, diffusers.DiffusionPipeline)):
        known = [n for n in dir(diffusers) if n.endswith("Pipeline")]
        raise ModelError(
            f"pipeline class {name!r} is not in diffusers {diffusers.__version__}{suggest(name, known)}; "
            "a newer release may have it"
        )
    return cls


def check_protocol(cls: Any) -> None:
    """Raise ``ModelError`` for a pipeline class whose calls the engine cannot drive or reproduce."""
    call = inspect.signature(cls.__call__).parameters
    for name, why in (("prompt", "it does not work from a prompt"), ("generator", "its noise could not be seeded")):
        if name not in call:
            raise ModelError(f"{cls.__name__} is not supported: its call takes no {name!r}, so {why}")
    if "scheduler" not in inspect.signature(cls.__init__).parameters:
        raise ModelError(f"{cls.__name__} is not supported: it has no 'scheduler', so its steps cannot be followed")


def read_defaults(folder: Path) -> dict[str, Any]:
    """Return the sampling defaults that a folder brings in an ``omniloom.json`` (other tools ignore that file)."""
    path = folder / "omniloom.json"
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        defaults = data.get("defaults", {})
    except (ValueError, AttributeError, OSError) as error:
        raise ModelError(f"{path} is not valid: {error}") from error
    if not isinstance(defaults, dict):
        raise ModelError(f"{path}: 'defaults' must be an object of sampling parameters")
    return defaults


def _variant_of(spec: ComponentSpec, variant: str | None) -> str | None:
    """Return the variant for one component. Components that come in one variant only keep the plain file."""
    if variant is None:
        return None
    return (
        variant
        if any(f".{variant}." in path.name or f".{variant}-" in path.name for path in spec.folder.iterdir())
        else None
    )


def _component_progress(progress: Progress | None, spec: ComponentSpec, variant: str | None, source: Any) -> Any:
    if progress is None or not spec.is_model():
        return None
    from omniloom.checkpoint import find_weights

    total = (
        source.nbytes if source is not None else find_weights(spec.folder, variant=_variant_of(spec, variant)).nbytes
    )
    done = 0

    def report(count: int) -> None:
        nonlocal done
        done += count
        progress(spec.name, done, total)

    return report


def _at_root(folder: Path, spec: ComponentSpec) -> bool:
    return (
        not spec.is_model()
        and any(folder.glob("*.json"))
        and spec.folder == folder
        and (folder / "config.json").is_file()
    )


def _not_a_pipeline(folder: Path) -> str:
    if not folder.exists():
        return f"model folder {folder} does not exist"
    if (folder / "config.json").is_file():
        return (
            f"{folder} is a single component, not a pipeline: give the folder above it, the one with model_index.json"
        )
    children = (
        [child.name for child in folder.iterdir() if (child / "model_index.json").is_file()] if folder.is_dir() else []
    )
    hint = f"; did you mean {folder / children[0]}?" if children else ""
    return f"{folder} has no model_index.json: not a diffusers pipeline folder{hint}"
