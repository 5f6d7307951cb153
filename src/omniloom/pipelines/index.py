"""``model_index.json``: what a pipeline folder says it consists of, checked before anything is built."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omniloom.errors import ModelError, shorten, suggest
from omniloom.pipelines.components import ComponentSpec


@dataclasses.dataclass(frozen=True)
class PipelineIndex:
    """``model_index.json`` as read: the pipeline class, its components and its scalar settings."""

    folder: Path
    pipeline_class: str
    components: tuple[ComponentSpec, ...]
    absent: tuple[str, ...]
    settings: Mapping[str, Any]

    def variant_of(self, spec: ComponentSpec, variant: str | None) -> str | None:
        """Return the variant for one component. Components that come in one variant only keep the plain file."""
        if variant is None:
            return None
        names = [path.name for path in spec.folder.iterdir()]
        return variant if any(f".{variant}." in name or f".{variant}-" in name for name in names) else None


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


def check_index(index: PipelineIndex, variant: str | None) -> Any:
    """Resolve every class, look for every folder, and return the pipeline class. Raises ``ModelError``."""
    folder = index.folder
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
    if variant and not any(index.variant_of(spec, variant) for spec in index.components):
        raise ModelError(f"{folder} has no files of variant {variant!r}")
    there = {spec.name for spec in index.components} | set(index.absent) | set(index.settings)
    lacking = [name for name in required_arguments(cls) if name not in there and name not in cls._optional_components]
    if lacking:
        raise ModelError(f"{folder / 'model_index.json'} lacks components of {cls.__name__}: {shorten(lacking)}")
    return cls


def required_arguments(cls: Any) -> list[str]:
    """Return the constructor arguments of a pipeline class that have no default."""
    parameters = inspect.signature(cls.__init__).parameters
    empty = inspect.Parameter.empty
    return [
        n for n, p in parameters.items() if n != "self" and p.default is empty and p.kind is p.POSITIONAL_OR_KEYWORD
    ]


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
