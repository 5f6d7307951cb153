"""One component of a pipeline folder: its class, and how it is loaded."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from omniloom.checkpoint import TensorSource, find_weights
from omniloom.errors import ModelError, suggest
from omniloom.pipelines.construct import empty_diffusers_model, empty_transformers_model
from omniloom.pipelines.weights import fill, meta_leftovers, plan_diffusers, plan_transformers

Progress = Callable[[int], None]


@dataclasses.dataclass(frozen=True)
class ComponentSpec:
    """A component as ``model_index.json`` names it: ``library`` and ``class_name``, and the folder of its files."""

    name: str
    library: str
    class_name: str
    folder: Path

    def resolve(self) -> type:
        """Return the class. Raises ``ModelError`` for one that the installed libraries do not have."""
        import diffusers

        if (self.folder / f"{self.library}.py").is_file():
            raise ModelError(
                f"component {self.name!r} brings its own code ({self.library}.py): running it is not supported"
            )
        if hasattr(diffusers.pipelines, self.library):
            module: Any = getattr(diffusers.pipelines, self.library)
        elif self.library in ("diffusers", "transformers"):
            module = importlib.import_module(self.library)
        else:
            raise ModelError(
                f"component {self.name!r} is of library {self.library!r}: only diffusers and transformers are supported"
            )
        name = self.class_name
        if self.library == "transformers" and not hasattr(module, name) and name.endswith("Fast"):
            name = name.removesuffix("Fast")  # transformers 5 has one tokenizer class for both
        cls = getattr(module, name, None)
        if not isinstance(cls, type):
            hint = suggest(self.class_name, [n for n in dir(module) if n[:1].isupper()])
            raise ModelError(
                f"component {self.name!r} is a {self.class_name}, which the installed {self.library} does not have"
                f"{hint}; a newer release may"
            )
        return cls

    def is_model(self) -> bool:
        """Whether the component is a module with weights (and not a scheduler, tokenizer or processor)."""
        return issubclass(self.resolve(), torch.nn.Module)


@dataclasses.dataclass(frozen=True)
class LoadedComponent:
    """A component and how long it took to load (seconds)."""

    value: Any
    seconds: float


def load_component(
    spec: ComponentSpec,
    *,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    variant: str | None = None,
    progress: Progress | None = None,
    source: Any | None = None,
) -> LoadedComponent:
    """Load one component. A module is built without weights and filled from ``source`` (default: its own folder).

    Raises ``ModelError`` (class, config) or ``CheckpointError`` (files, keys, shapes).
    """
    start = time.perf_counter()
    cls = spec.resolve()
    if not spec.is_model():
        value = _load_without_weights(cls, spec)
    else:
        value = load_model(
            cls, spec.folder, dtype=dtype, device=device, variant=variant, progress=progress, source=source
        )
    return LoadedComponent(value, time.perf_counter() - start)


def load_model(
    cls: type,
    folder: Path,
    *,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    variant: str | None = None,
    progress: Progress | None = None,
    source: Any | None = None,
) -> torch.nn.Module:
    """Build ``cls`` (a diffusers or transformers model class) from ``folder`` and fill it; see ``load_component``."""
    import diffusers
    from transformers import PreTrainedModel

    given: Any = source
    with contextlib.nullcontext(given) if given else TensorSource(find_weights(folder, variant=variant)) as tensors:
        if issubclass(cls, diffusers.ModelMixin):
            model = empty_diffusers_model(cls, _read_config(folder), dtype)
            plan = plan_diffusers(model, tensors.names(), dtype)
        elif issubclass(cls, PreTrainedModel):
            model = empty_transformers_model(cls, copy.deepcopy(_transformers_config(cls, folder)), dtype)
            plan = plan_transformers(model, tensors.names(), dtype)
            _load_generation_config(model, folder)
        else:
            raise ModelError(f"{cls.__module__}.{cls.__name__} is neither a diffusers nor a transformers model")
        fill(model, plan, tensors, device=device, progress=progress, where=getattr(given, "file", str(folder)))
    if left := meta_leftovers(model):
        raise ModelError(f"{cls.__name__}: tensors without values after loading {folder}: {', '.join(left[:10])}")
    return model


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: not a model folder") from None
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return config


def _transformers_config(cls: Any, folder: Path) -> Any:
    _read_config(folder)
    try:
        return cls.config_class.from_pretrained(folder)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise ModelError(f"{folder / 'config.json'}: {' '.join(str(error).split())}") from error


def _load_generation_config(model: Any, folder: Path) -> None:
    if model.can_generate() and (folder / "generation_config.json").is_file():
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(folder)


def _load_without_weights(cls: Any, spec: ComponentSpec) -> Any:
    try:
        return cls.from_pretrained(str(spec.folder))
    except Exception as error:  # each class raises what it likes for a damaged folder
        raise ModelError(
            f"component {spec.name!r} ({spec.class_name}) in {spec.folder}: {' '.join(str(error).split())}"
        ) from error
