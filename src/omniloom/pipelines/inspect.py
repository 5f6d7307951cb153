"""What a model consists of, from its JSON files and safetensors headers alone: no torch, no tensor is read."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from omniloom.checkpoint import TensorInfo, Weights, find_weights, single_file
from omniloom.checkpoint.names import kind_of_folder, scan
from omniloom.checkpoint.safetensors import DTYPES
from omniloom.config import to_plain
from omniloom.errors import ModelError
from omniloom.quantization.headers import StoredQuantization, stored_quantization

_CODES = {"float8_e4m3fn", "int8", "uint8"}  # dtypes of which a component without a config may have quantized layers


@dataclasses.dataclass(frozen=True)
class ComponentSummary:
    """One component. ``parameters``: stored elements; ``dtypes``: bytes by dtype; all zero where there are no weights.

    ``quantization``: the ``quantization_config`` of the component's own config.json; ``stored_quantization``: what its
    tensors' names and types say of quantized layers.
    """

    name: str
    library: str | None
    class_name: str | None
    folder: str
    files: int = 0
    tensors: int = 0
    parameters: int = 0
    bytes: int = 0
    dtypes: dict[str, int] = dataclasses.field(default_factory=dict)
    quantization: dict[str, Any] | None = None
    stored_quantization: StoredQuantization | None = None


@dataclasses.dataclass(frozen=True)
class ModelSummary:
    """A whole model: a pipeline folder, a component folder or one file (``kind``)."""

    path: str
    kind: str
    pipeline: str | None
    components: tuple[ComponentSummary, ...]

    @property
    def parameters(self) -> int:
        """Stored elements of all components."""
        return sum(component.parameters for component in self.components)

    @property
    def bytes(self) -> int:
        """Bytes of the tensors of all components."""
        return sum(component.bytes for component in self.components)

    def to_dict(self) -> dict[str, Any]:
        """Return everything, with totals, as plain JSON types; a component's class is under ``class``."""
        plain = to_plain(self)
        plain["components"] = {c.pop("name"): {"class": c.pop("class_name"), **c} for c in plain["components"]}
        return {**plain, "parameters": self.parameters, "bytes": self.bytes}


def inspect_model(path: str | Path, variant: str | None = None) -> ModelSummary:
    """Summarize ``path``: a diffusers pipeline folder, a component folder, a .safetensors file, or ``"demo"``.

    A hub id works if it is in the local cache; nothing is downloaded. Raises ``ModelError`` or ``CheckpointError``.
    """
    found = _locate(path)
    if found.is_file():
        if found.suffix != ".safetensors":
            raise ModelError(f"{found}: not a .safetensors file; give one, or a pipeline or component folder")
        return ModelSummary(str(found), "file", None, (_weighed(found.stem, None, None, found, single_file(found)),))
    if (found / "model_index.json").is_file():
        return _pipeline(found, variant)
    if kind_of_folder(found) or scan(found):
        return ModelSummary(str(found), "component", None, (_component(found.name, None, None, found, variant),))
    raise ModelError(f"{found}: neither a pipeline (model_index.json) nor a component (config.json and weights)")


def _locate(path: str | Path) -> Path:
    if str(path) == "demo":
        from omniloom.pipelines.demo import demo_folder

        return demo_folder()
    local = Path(path).expanduser()
    if local.exists():
        return local
    from omniloom.checkpoint.hub import resolve_model

    return resolve_model(path, offline=True)


def _pipeline(folder: Path, variant: str | None) -> ModelSummary:
    index = _read_json(folder / "model_index.json")
    name = index.get("_class_name")
    if not isinstance(name, str):
        raise ModelError(f"{folder / 'model_index.json'}: names no pipeline class (_class_name)")
    components = []
    for key, entry in index.items():
        if key.startswith("_") or not isinstance(entry, list) or len(entry) != 2 or entry[0] is None:
            continue
        library, class_name = (str(part) for part in entry)
        components.append(_component(key, library, class_name, folder / key, variant))
    return ModelSummary(str(folder), "pipeline", name, tuple(components))


def _component(
    name: str, library: str | None, class_name: str | None, folder: Path, variant: str | None
) -> ComponentSummary:
    if not folder.is_dir():
        raise ModelError(f"{folder}: missing; model_index.json names component {name!r} ({class_name})")
    config = _read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    if library is None:
        library = kind_of_folder(folder)
        class_name = class_name or config.get("_class_name") or next(iter(config.get("architectures") or []), None)
    found = scan(folder)
    # A scheduler, tokenizer or processor has no weights; a folder with a model's config.json must have some.
    if not found and kind_of_folder(folder) is None:
        return ComponentSummary(name, library, class_name, str(folder))
    if variant and all(files.variant != variant for files in found):
        variant = None  # components that come in one variant only keep the plain file
    weights = find_weights(folder, variant=variant)
    return _weighed(name, library, class_name, folder, weights, config.get("quantization_config"))


def _weighed(
    name: str,
    library: str | None,
    class_name: str | None,
    where: Path,
    weights: Weights,
    quantization: dict[str, Any] | None = None,
) -> ComponentSummary:
    tensors = weights.tensors.values()
    dtypes = _by_dtype(tensors)
    coded = quantization or _CODES & dtypes.keys()
    return ComponentSummary(
        name=name,
        library=library,
        class_name=class_name,
        folder=str(where),
        files=len(weights.files),
        tensors=len(tensors),
        parameters=sum(math.prod(info.shape) for info in tensors),
        bytes=sum(info.nbytes for info in tensors),
        dtypes=dtypes,
        quantization=quantization,
        stored_quantization=stored_quantization(weights.tensors) if coded else None,
    )


def _by_dtype(tensors: Iterable[TensorInfo]) -> dict[str, int]:
    """Return bytes by dtype, most bytes first."""
    counted: dict[str, int] = {}
    for info in tensors:
        counted[info.dtype] = counted.get(info.dtype, 0) + info.nbytes
    ranked = sorted(counted.items(), key=lambda item: -item[1])
    return {DTYPES[code][1] or code.lower(): count for code, count in ranked}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path}: must hold a JSON object")
    return data
