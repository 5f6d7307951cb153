"""Writing a quantized copy of a pipeline folder: streaming, and whole or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from omniloom.checkpoint import TensorSource, find_weights
from omniloom.checkpoint.names import DIFFUSERS_BASE, TRANSFORMERS_BASE, scan
from omniloom.checkpoint.write import MAX_SHARD_BYTES, ShardWriter
from omniloom.errors import ConfigError, EngineError
from omniloom.pipelines.components import ComponentSpec, empty_model, read_json
from omniloom.pipelines.index import check_index, read_index
from omniloom.pipelines.quantizing import component_configs, plan_quantization, warn_of_unmatched
from omniloom.pipelines.tensor_plan import TensorPlan, check
from omniloom.pipelines.weights import convert, pass_through
from omniloom.quantization.component import AnyConfig
from omniloom.quantization.expert_stack import ExpertStack
from omniloom.quantization.experts import stack_shape
from omniloom.quantization.layouts import native
from omniloom.quantization.layouts.names import stored_name
from omniloom.quantization.methods import QuantizationConfig
from omniloom.quantization.rules import Selection
from omniloom.quantization.scheme import LayerScheme

Progress = Callable[[str, int, int], Any]


@dataclasses.dataclass(frozen=True)
class Saved:
    """What was written for one component: its layers, and the bytes of its tensors in the files before and after."""

    method: str
    selection: Selection
    bytes_before: int
    bytes_after: int


def save_quantized(
    folder: Path,
    config: AnyConfig | None,
    out: Path,
    *,
    given: str = "config",
    progress: Progress | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> dict[str, Saved]:
    """Write the pipeline in ``folder`` to the new folder ``out``, quantized as ``config`` says; return what was done.

    Everything is checked before anything is written. Dense tensors stay as they are stored, and components that are
    quantized already are copied. ``progress``: called with component, bytes read, bytes in all. Raises ``ConfigError``
    if nothing is to be quantized or ``out`` is there already, and what loading the model would raise.
    """
    index = read_index(folder)
    check_index(index, None)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already: give the name of a new folder")
    configs = component_configs(index, config, given)
    chosen = {name: found for name, found in configs.items() if found is not None and not found.serialized}
    if not chosen:
        done = sorted(name for name, found in configs.items() if found is not None)
        why = f" (quantized already: {', '.join(done)})" if done else ""
        raise ConfigError(f"nothing to quantize in {folder}{why}: give a method, for example --quantization fp8")
    parts = {spec.name: _Part(spec, chosen[spec.name], given) for spec in index.components if spec.name in chosen}
    warn_of_unmatched({name: part.planned for name, part in parts.items()}, given)
    with _whole(out) as made:
        for entry in sorted(index.folder.iterdir()):
            if entry.name.startswith("."):
                continue
            if entry.name in parts:
                parts[entry.name].write(made / entry.name, progress, max_shard_bytes)
            elif entry.is_dir():
                shutil.copytree(entry, made / entry.name)
            else:
                shutil.copy(entry, made / entry.name)
    return {name: part.saved() for name, part in parts.items()}


class _Part:
    """One component that gets quantized: planned, then written."""

    def __init__(self, spec: ComponentSpec, config: QuantizationConfig, given: str) -> None:
        self.spec, self.config = spec, config
        self.source = TensorSource(find_weights(spec.folder))
        where = str(spec.folder)
        self.model, self.plan = empty_model(spec.resolve(), spec.folder, torch.float32, self.source)
        self.planned = plan_quantization(
            self.model, self.plan, self.source, config, component=spec.name, where=where, given=given
        )
        self.selection = self.planned.selection
        check(self.model, self.plan, self.source, where)
        self.specs = self._specs()

    def saved(self) -> Saved:
        after = sum(math.prod(shape) * dtype.itemsize for dtype, shape in self.specs.values())
        return Saved(self.config.method, self.selection, self.source.nbytes, after)

    def write(self, folder: Path, progress: Progress | None, max_shard_bytes: int) -> None:
        folder.mkdir()
        weights = {file for kind in scan(self.spec.folder) for file in (kind.index, kind.single, *kind.shards)}
        for entry in self.spec.folder.iterdir():
            if entry.is_file() and entry.name not in weights and entry.name != "config.json":
                shutil.copy(entry, folder / entry.name)
        config = read_json(self.spec.folder / "config.json")
        config["quantization_config"] = native.disk_config(self.config, self.selection.skipped)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        diffusers = "_class_name" in config
        base = DIFFUSERS_BASE if diffusers else TRANSFORMERS_BASE
        total, done = self.source.nbytes, 0
        with self.source, ShardWriter(folder, base, self.specs, max_shard_bytes) as writer:
            for target, tensor, read in self._tensors():
                scheme = self._scheme(target)
                parts = {"": tensor} if scheme is None else _stored(scheme, self.model, target, tensor)
                for suffix, part in parts.items():
                    writer.write(stored_name(target, suffix), part)
                del tensor, parts
                done += read
                if progress:
                    progress(self.spec.name, done, total)

    def _scheme(self, target: str) -> LayerScheme | None:
        quantized = self.selection.quantized
        return quantized.get(target) or quantized.get(target.removesuffix(".weight"))

    def _specs(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        specs: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for target, dtype, shape in _dense_specs(self.model, self.plan, self.source):
            scheme = self._scheme(target)
            if scheme is None:
                specs[target] = (dtype, shape)
                continue
            if len(shape) == 3:
                stored = native.stored_specs(scheme.codec, stack_shape(*_place(self.model, target)), shape[0])
            else:
                stored = native.stored_specs(scheme.codec, (shape[0], shape[1]))
            specs |= {stored_name(target, suffix): spec for suffix, spec in stored.items()}
        return specs

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor, int]]:
        """Yield (parameter, dense tensor as stored, bytes read), with at most two tensors in memory."""
        targets: dict[str, list[str]] = {}
        for target, name in self.plan.direct.items():
            targets.setdefault(name, []).append(target)
        for name, tensor in pass_through(self.source, targets):
            for number, target in enumerate(targets[name]):
                yield target, tensor, 0 if number else tensor.nbytes
            del tensor
        for conversion in self.plan.conversions:
            read = sum(self.source.info(name).nbytes for name in conversion.names())
            made = convert(self.model, conversion, self.source, {}, "cpu")
            for number, (target, tensor) in enumerate(made.items()):
                yield target, tensor.contiguous(), 0 if number else read


def _dense_specs(
    model: torch.nn.Module, plan: TensorPlan, source: Any
) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Yield what is in the files, under the model's names. Results of conversions are in the type of their sources."""
    state = model.state_dict()
    for target, name in plan.direct.items():
        yield target, source.info(name).torch_dtype, tuple(state[target].shape)
    for conversion in plan.conversions:
        dtype = source.info(conversion.names()[0]).torch_dtype
        if len(conversion.converter.target_patterns) == 1:
            yield conversion.first_target, dtype, tuple(state[conversion.first_target].shape)
        else:  # only the conversion itself knows the names of its results
            for target, tensor in convert(model, conversion.fresh(), source, {}, "cpu").items():
                yield target, dtype, tuple(tensor.shape)


def _place(model: torch.nn.Module, target: str) -> tuple[torch.nn.Module, str]:
    """Return the module that has a parameter, and the parameter's name there."""
    path, _, name = target.rpartition(".")
    return model.get_submodule(path), name


def _stored(scheme: LayerScheme, model: torch.nn.Module, target: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    if tensor.dim() == 3:
        stack = ExpertStack.from_dense(tensor, scheme, transposed=bool(_place(model, target)[0].is_transposed))
        return native.to_tensors(scheme.codec, stack.matrix, stack.fields, tensor.dtype, stack=True)
    return native.to_tensors(scheme.codec, tuple(tensor.shape), scheme.codec.encode(tensor), tensor.dtype)  # type: ignore[arg-type]


@contextlib.contextmanager
def _whole(out: Path) -> Iterator[Path]:
    """Give a folder that takes the place of ``out`` at the end, and is gone if anything fails."""
    temporary = out.with_name(f".{out.name}.{secrets.token_hex(4)}.part")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if out.exists():
            out.rmdir()  # empty: checked before
        os.replace(temporary, out)
    except OSError as error:
        raise EngineError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
