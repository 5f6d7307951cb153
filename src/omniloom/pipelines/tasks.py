"""Which pipeline class serves a request: chosen by what is given, through diffusers' own task mapping."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from omniloom.errors import RequestError
from omniloom.pipelines.build import LoadedPipeline
from omniloom.pipelines.family import GENERIC
from omniloom.pipelines.index import pipeline_class

# What is given -> the tasks that can take it, and diffusers' mapping of pipeline classes for each.
_WITHOUT_IMAGE = {"text-to-image": "TEXT2IMAGE", "text-to-video": "TEXT2VIDEO"}
_WITH_IMAGE = {"image-to-image": "IMAGE2IMAGE", "image-to-video": "IMAGE2VIDEO"}
_WITH_MASK = {"inpaint": "INPAINT"}


def takes(cls: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a pipeline class's call."""
    return inspect.signature(cls.__call__).parameters


def is_video(cls: Any) -> bool:
    """Whether a pipeline class makes videos."""
    return "num_frames" in takes(cls)


def pipeline_for(loaded: LoadedPipeline, *, images: int, mask: bool) -> Any:
    """Return the prototype pipeline for a request with so many images and a mask or none.

    It shares every component with the pipeline that was loaded. Raises ``RequestError`` with what the model can do.
    """
    base = type(loaded.pipe)
    several = loaded.family.many_images
    if images > 1 and loaded.family is not GENERIC and base.__name__ not in several:
        more = f"; several go with {', '.join(several)}" if several else ""
        raise RequestError(f"{base.__name__} works from one image, {images} are given{more}")
    if _fits(base, images, mask):
        return loaded.pipe
    tasks = _WITH_MASK if mask else _WITH_IMAGE if images else _WITHOUT_IMAGE
    for task in tasks:
        sibling = _sibling(loaded, base, task)
        if sibling is not None and _fits(sibling, images, mask):
            return loaded.sibling(sibling)
    given = (
        "a prompt, an image and a mask" if mask else f"a prompt and {images} image(s)" if images else "a prompt alone"
    )
    raise RequestError(f"{base.__name__} cannot work from {given}; it can do: {', '.join(supported_tasks(loaded))}")


def supported_tasks(loaded: LoadedPipeline) -> list[str]:
    """Return the tasks that the loaded model can serve."""
    found = []
    for tasks, images, mask in ((_WITHOUT_IMAGE, 0, False), (_WITH_IMAGE, 1, False), (_WITH_MASK, 1, True)):
        for task in tasks:
            video = task.endswith("video")
            for cls in (type(loaded.pipe), _sibling(loaded, type(loaded.pipe), task)):
                if cls is not None and is_video(cls) is video and _fits(cls, images, mask):
                    found.append(task)
                    break
    return found


def _fits(cls: Any, images: int, mask: bool) -> bool:
    """Whether ``cls`` takes exactly what is given."""
    parameters = takes(cls)
    if mask:
        return "mask_image" in parameters and "image" in parameters
    if images:
        return "image" in parameters and not _needs_mask(cls)
    return "image" not in parameters or not _needs_image(cls)


def _needs_image(cls: Any) -> bool:
    """Whether a call without an image fails: a required argument, or a class that diffusers lists for images only."""
    if takes(cls)["image"].default is inspect.Parameter.empty or _needs_mask(cls):
        return True
    return _listed(cls, _WITH_IMAGE) and not _listed(cls, _WITHOUT_IMAGE)


def _needs_mask(cls: Any) -> bool:
    """Whether a class that takes a mask is made for masks only."""
    return "mask_image" in takes(cls) and not _listed(cls, _WITH_IMAGE) and not _listed(cls, _WITHOUT_IMAGE)


def _listed(cls: Any, tasks: Mapping[str, str]) -> bool:
    return any(cls in _mapping(name).values() for name in tasks.values())


def _mapping(name: str) -> Mapping[str, Any]:
    from diffusers.pipelines import auto_pipeline

    return getattr(auto_pipeline, f"AUTO_{name}_PIPELINES_MAPPING", {})


def _sibling(loaded: LoadedPipeline, base: Any, task: str) -> Any:
    """Return the class that does ``task`` with the components of ``base``: by family data or diffusers' mapping."""
    if task in loaded.family.siblings:
        name, setting = loaded.family.siblings[task]
        if setting is None or loaded.pipe.config.get(setting):
            return pipeline_class(name)
        return None
    from diffusers.pipelines import auto_pipeline

    mapping = _mapping({**_WITHOUT_IMAGE, **_WITH_IMAGE, **_WITH_MASK}[task])
    return auto_pipeline._get_task_class(mapping, base.__name__, throw_error_if_not_exist=False)
