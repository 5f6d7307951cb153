"""One component of a pipeline folder: its class, how it is built, how it gets its weights."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from omniloom.checkpoint import TensorSource, find_weights
from omniloom.errors import ModelError, suggest
from omniloom.pipelines.construct import empty_diffusers_model, empty_transformers_model
from omniloom.pipelines.tensor_plan import TensorPlan, check, needed_bytes, plan_diffusers, plan_transformers
from omniloom.pipelines.weights import fill, meta_leftovers

if TYPE_CHECKING:
    from omniloom.pipelines.quantizing import ComponentQuantization

Progress = Callable[[int], None]
QUANTIZATION_KEY = "quantization_config"  # of config.json; the libraries' own quantizers must not act on it
# (model without weights, plan, source, where) -> what will be quantized; called before keys and shapes are checked
Quantizer = Callable[[torch.nn.Module, TensorPlan, Any, str], "ComponentQuantization"]


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


class Component:
    """A component that is built. A module has no weights before ``fill``, but a plan that is checked against its files.

    ``seconds``: spent on it so far. ``nbytes``: of tensors that ``fill`` will read.
    """

    def __init__(self, value: Any, filling: Filling | None, seconds: float) -> None:
        self.value = value
        self.seconds = seconds
        self.nbytes = filling.source.nbytes if filling else 0
        self._filling = filling
        self._quantization = filling.quantization if filling else None

    @property
    def quantization(self) -> ComponentQuantization | None:
        """What is quantized in it."""
        return self._quantization

    def needed_bytes(self, device: str | torch.device) -> int:
        """Return the bytes of weights that get memory of their own on ``device`` (the others are mapped)."""
        if self._filling is None:
            return 0
        made = self._quantization.needed_bytes if self._quantization else 0
        return made + needed_bytes(self._filling.plan, self._filling.source, device)

    def fill(self, device: str | torch.device = "cpu", progress: Progress | None = None) -> None:
        """Read the weights. Raises ``CheckpointError``; a second call does nothing."""
        start = time.perf_counter()
        if self._filling is not None:
            self._filling.run(self.value, device, progress)
            self._filling = None
        self.seconds += time.perf_counter() - start


@dataclasses.dataclass
class Filling:
    """What is left to do for a module without weights."""

    plan: TensorPlan
    source: Any
    owned: bool
    where: str
    quantization: ComponentQuantization | None = None

    def run(self, model: torch.nn.Module, device: str | torch.device, progress: Progress | None) -> None:
        """Fill ``model`` and let go of the files."""
        try:
            fill(model, self.plan, self.source, device=device, progress=progress, where=self.where)
        finally:
            if self.owned:
                self.source.close()
        if left := meta_leftovers(model):
            raise ModelError(f"{type(model).__name__}: tensors without values after loading {self.where}: {left[:10]}")


def make_component(
    spec: ComponentSpec,
    *,
    dtype: torch.dtype,
    variant: str | None = None,
    source: Any | None = None,
    quantizer: Quantizer | None = None,
) -> Component:
    """Build one component; a module without its weights, which come from ``source`` (default: its own folder).

    ``quantizer``: what plans the quantization of a module. Raises ``ModelError`` (class, config), ``CheckpointError``
    (files, keys, shapes) or ``ConfigError`` (a quantization that does not fit them).
    """
    start = time.perf_counter()
    cls = spec.resolve()
    if not spec.is_model():
        return Component(_load_without_weights(cls, spec), None, time.perf_counter() - start)
    model, filling = _make_model(cls, spec.folder, dtype, variant, source, quantizer)
    return Component(model, filling, time.perf_counter() - start)


def load_model(cls: type, folder: Path, *, dtype: torch.dtype, device: str | torch.device = "cpu") -> torch.nn.Module:
    """Build and fill ``cls`` (a diffusers or transformers model class) from ``folder``."""
    model, filling = _make_model(cls, folder, dtype)
    filling.run(model, device, None)
    return model


def _make_model(
    cls: type,
    folder: Path,
    dtype: torch.dtype,
    variant: str | None = None,
    given: Any | None = None,
    quantizer: Quantizer | None = None,
) -> tuple[torch.nn.Module, Filling]:
    source: Any = given or TensorSource(find_weights(folder, variant=variant))
    where = getattr(given, "file", str(folder))
    model, plan = empty_model(cls, folder, dtype, source)
    quantization = quantizer(model, plan, source, where) if quantizer else None
    check(model, plan, source, where)
    if quantization is not None:
        quantization.apply(model, plan, dtype)
    return model, Filling(plan, source, given is None, where, quantization)


def empty_model(cls: type, folder: Path, dtype: torch.dtype, source: Any) -> tuple[torch.nn.Module, TensorPlan]:
    """Build ``cls`` without weights from ``folder``'s config, and plan which tensors of ``source`` it is made of."""
    import diffusers
    from transformers import PreTrainedModel

    model: torch.nn.Module
    if issubclass(cls, diffusers.ModelMixin):
        config = {key: value for key, value in read_json(folder / "config.json").items() if key != QUANTIZATION_KEY}
        model = empty_diffusers_model(cls, config, dtype)
        return model, plan_diffusers(model, source.names(), dtype)
    if issubclass(cls, PreTrainedModel):
        model = empty_transformers_model(cls, copy.deepcopy(_transformers_config(cls, folder)), dtype)
        plan = plan_transformers(model, source.names(), dtype)
        _load_generation_config(model, folder)
        return model, plan
    raise ModelError(f"{cls.__module__}.{cls.__name__} is neither a diffusers nor a transformers model")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a config file. Raises ``ModelError`` if there is none."""
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
    read_json(folder / "config.json")
    try:
        config = cls.config_class.from_pretrained(folder)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        return config
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
