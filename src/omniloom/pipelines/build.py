"""A diffusers pipeline folder, built by its ``model_index.json`` with every module filled by our own loader."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from omniloom.pipelines.components import Quantizer, make_component
from omniloom.pipelines.families import family_of
from omniloom.pipelines.family import Family
from omniloom.pipelines.index import check_index, read_defaults, read_index, required_arguments
from omniloom.quantization.methods import QuantizationConfig

Progress = Callable[[str, int, int], None]  # component, bytes done, bytes in all


@dataclasses.dataclass
class LoadedPipeline:
    """A pipeline that is ready to be cloned, and what is known about it.

    ``pipe`` is the prototype and is never called. ``defaults``: sampling parameters that the folder brings along.
    ``load_seconds``: per component. ``needed_bytes``: of weights that get memory of their own. ``siblings``: prototypes
    of other classes over the same components, as needed. ``undo``: what takes back changes to the modules, for those
    that are somebody else's.
    """

    pipe: Any
    family: Family
    folder: Path | None
    defaults: dict[str, Any]
    load_seconds: dict[str, float]
    needed_bytes: int = 0
    quantization: dict[str, Any] = dataclasses.field(default_factory=dict)  # component -> ComponentQuantization
    siblings: dict[Any, Any] = dataclasses.field(default_factory=dict)
    undo: list[Callable[[], Any]] = dataclasses.field(default_factory=list)

    def take_back(self) -> None:
        """Undo changes to modules, last one first. Whoever brought the modules gets them as they were."""
        while self.undo:
            self.undo.pop()()

    def sibling(self, cls: Any) -> Any:
        """Return a prototype of pipeline class ``cls`` over this pipeline's components and settings."""
        if cls is type(self.pipe):
            return self.pipe
        if cls not in self.siblings:
            own = {**dict(self.pipe.config), **self.pipe.components}
            names = [name for name in inspect.signature(cls.__init__).parameters if name != "self"]
            self.siblings[cls] = cls(**{name: own[name] for name in names if name in own})
        return self.siblings[cls]


def build_pipeline(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    variant: str | None = None,
    progress: Progress | None = None,
    sources: Mapping[str, Any] | None = None,
    before_reading: Callable[[LoadedPipeline], None] | None = None,
    quantization: Mapping[str, QuantizationConfig | None] | None = None,
    given: str = "quantization_config",
) -> LoadedPipeline:
    """Build the pipeline in ``folder``. ``sources``: component name -> tensor source that replaces its own files.

    ``quantization``: the config of each component that is quantized; ``given``: where the user wrote it.

    Plan, then act: the whole pipeline is built without weights, every key and shape is checked, ``before_reading`` may
    look at it and raise; only then are tensors read. Raises ``ModelError`` or ``CheckpointError``.
    """
    index = read_index(folder)
    cls = check_index(index, variant)
    parameters = inspect.signature(cls.__init__).parameters
    values: dict[str, Any] = {name: None for name in (*required_arguments(cls), *index.absent) if name in parameters}
    values |= {name: value for name, value in index.settings.items() if name in parameters}
    components = {}
    for spec in index.components:
        source = (sources or {}).get(spec.name)
        components[spec.name] = make_component(
            spec,
            dtype=dtype,
            variant=index.variant_of(spec, variant),
            source=source,
            quantizer=_quantizer((quantization or {}).get(spec.name), spec.name, given),
        )
        values[spec.name] = components[spec.name].value
    pipe = cls(**values)
    pipe.register_to_config(_name_or_path=str(folder))
    needed = sum(component.needed_bytes(device) for component in components.values())
    loaded = LoadedPipeline(pipe, family_of(cls.__name__), folder, read_defaults(folder), {}, needed)
    loaded.quantization = {name: part.quantization for name, part in components.items() if part.quantization}
    if loaded.quantization:
        from omniloom.pipelines.quantizing import warn_of_unmatched

        warn_of_unmatched(loaded.quantization, given)
    if before_reading is not None:
        before_reading(loaded)
    for name, component in components.items():
        component.fill(device, _counter(progress, name, component.nbytes))
        loaded.load_seconds[name] = component.seconds
    return loaded


def _quantizer(config: QuantizationConfig | None, name: str, given: str) -> Quantizer | None:
    if config is None:
        return None
    from omniloom.pipelines.quantizing import plan_quantization

    def plan(model: torch.nn.Module, tensors: Any, source: Any, where: str) -> Any:
        return plan_quantization(model, tensors, source, config, component=name, where=where, given=given)

    return plan


def _counter(progress: Progress | None, name: str, total: int) -> Callable[[int], None] | None:
    if progress is None or not total:
        return None
    done = 0

    def report(count: int) -> None:
        nonlocal done
        done += count
        progress(name, done, total)

    return report
