"""Quantizing a component while its weights are read, or taking it as its files have it quantized already."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from omniloom.errors import CheckpointError, ConfigError, ModelError
from omniloom.pipelines.components import QUANTIZATION_KEY, read_json
from omniloom.pipelines.families import family_of
from omniloom.pipelines.index import PipelineIndex
from omniloom.pipelines.tensor_plan import Source, Stored, TensorPlan
from omniloom.quantization.convert import make_shells
from omniloom.quantization.expert_stack import ExpertStack
from omniloom.quantization.experts import expert_parameters, stack_shape
from omniloom.quantization.layouts import native
from omniloom.quantization.layouts.names import known_suffixes, stored_name
from omniloom.quantization.linear import QuantizedLinear
from omniloom.quantization.matching import unmatched_everywhere
from omniloom.quantization.methods import QuantizationConfig
from omniloom.quantization.methods.base import OnlineConfig
from omniloom.quantization.resolve import ComponentFacts, resolve_components
from omniloom.quantization.rules import Selection, select_layers
from omniloom.quantization.scheme import LayerScheme

log = logging.getLogger(__name__)
_WIDE = 16  # bits from which on a stored number is no code


@dataclasses.dataclass
class ComponentQuantization:
    """What is quantized in one component, how, and what it saves.

    ``bytes_before``: of the component in its compute dtype. ``needed_bytes``: of the fields that are made while the
    weights are read, known once ``apply`` made the layers.
    """

    config: QuantizationConfig
    selection: Selection
    bytes_before: int
    needed_bytes: int = 0

    def apply(self, model: torch.nn.Module, plan: TensorPlan, dtype: torch.dtype) -> None:
        """Replace the chosen layers by quantized ones without values, and let ``plan`` hand the values over."""
        make_shells(model, self.selection.quantized, dtype)
        for path in self.selection.quantized:
            layer: Any = model.get_submodule(path)
            target = _parameter(layer, path)
            layer.compute_dtype = plan.dtypes.get(target) or dtype
            if target in plan.stored:
                plan.stored[target].take = _taker_of_fields(layer)
            else:
                plan.encode[target] = _encoder(layer)
                self.needed_bytes += sum(spec.nbytes for spec in layer.field_specs().values())
            plan.missing.discard(target)


def component_configs(
    index: PipelineIndex, config: Any, given: str, replaced: str | None = None
) -> dict[str, QuantizationConfig | None]:
    """Return the quantization config of each component, from what the user and the checkpoints' own configs say.

    ``given``: what the user typed ``config`` into; ``replaced``: a component whose files are not the folder's.
    Raises ``ConfigError`` where they contradict each other, or for a component that is not there.
    """
    denoisers = family_of(index.pipeline_class).denoisers
    facts = []
    for spec in index.components:
        if not spec.is_model():
            continue
        path = spec.folder / "config.json"
        disk = read_json(path).get(QUANTIZATION_KEY) if spec.name != replaced and path.is_file() else None
        facts.append(ComponentFacts(spec.name, spec.name in denoisers, disk, str(path)))
    found = resolve_components(config, facts, given=given, note=log.warning)
    for part in facts:
        if not part.denoiser and getattr(found[part.name], "w4a8_fallback_steps", None):
            raise ConfigError(
                f"{given}: {part.name!r} is given w4a8_fallback_steps, but has no denoising steps: leave them out there"
            )
    return found


def plan_quantization(
    model: torch.nn.Module,
    plan: TensorPlan,
    source: Source,
    config: QuantizationConfig,
    *,
    component: str,
    where: str,
    given: str,
) -> ComponentQuantization:
    """Choose the layers of an empty ``model`` and take their tensors out of ``plan``'s ordinary ones.

    Raises ``ConfigError`` or ``CheckpointError`` where config and files contradict each other, before a tensor is read.
    ``given``: what the user typed the config into.
    """
    before = _dense_bytes(model, plan)
    if not isinstance(config, OnlineConfig):
        raise ModelError(f"{where}: weights of quantization method {config.method!r} cannot be loaded yet")
    if config.serialized:
        selection = _stored_layers(model, plan, source, config, where, given)
        return ComponentQuantization(config, selection, before)
    config.check_online()
    _refuse_codes(plan, source, config, where, given)
    selection = select_layers(model, config, component=component, stored_names=plan.direct)
    return ComponentQuantization(config, selection, before)


def warn_of_unmatched(parts: Mapping[str, ComponentQuantization], given: str) -> None:
    """Log, once, the entries of the user's lists that match no layer of any component that they are meant for."""
    online = [part for part in parts.values() if not part.config.serialized]
    for entry in unmatched_everywhere((part.config.ignore_lists(), part.selection.unmatched) for part in online):
        names = ", ".join(name for name, part in parts.items() if entry in part.selection.unmatched)
        log.warning("%s: ignored layers: the entry %r matches no layer of %s", given, entry, names)


def quantization_report(model: Any, record: ComponentQuantization | None) -> dict[str, Any]:
    """Return what the report says of a component: method, layers, codecs, kernels, bytes; empty if it is dense."""
    from omniloom.quantization.prepared import prepare_kernels

    if not isinstance(model, torch.nn.Module):
        return {}
    layers = {path: m for path, m in model.named_modules() if isinstance(m, (QuantizedLinear, ExpertStack))}
    if not layers:
        return {}
    kernels = prepare_kernels(model)
    if stacks := sum(isinstance(layer, ExpertStack) for layer in layers.values()):
        kernels["experts"] = stacks
    codecs: dict[str, int] = {}
    hidden = parameters = 0
    for layer in layers.values():
        name = layer.scheme.codec.name
        codecs[name] = codecs.get(name, 0) + 1
        parameters += math.prod(layer.shape)
        if isinstance(layer, QuantizedLinear) and layer.prepared is not None:
            hidden += layer.prepared.nbytes
    return {
        "method": record.config.method if record else None,
        "quantized_layers": sorted(layers),
        "skipped_layers": dict(record.selection.skipped) if record else {},
        "codecs": codecs,
        "kernels": kernels,
        "bytes_before": record.bytes_before if record else None,
        "prepared_bytes": hidden,
        "matrix_elements": parameters,
    }


def _parameter(layer: Any, path: str) -> str:
    return f"{path}.weight" if isinstance(layer, QuantizedLinear) else path


def _dense_bytes(model: torch.nn.Module, plan: TensorPlan) -> int:
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    ties: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    for tied in [name for name, source in ties.items() if name != source and source in named]:
        named.pop(tied, None)  # one tensor once the model is loaded
    return sum(t.numel() * (plan.dtypes.get(name) or t.dtype).itemsize for name, t in named.items())


def _encoder(layer: Any) -> Callable[[torch.Tensor], None]:
    def encode(dense: torch.Tensor) -> None:
        if isinstance(layer, ExpertStack):
            made = ExpertStack.from_dense(dense, layer.scheme, transposed=layer.transposed)
            layer.set_fields(made.fields)
            return
        layer.set_fields(layer.scheme.codec.encode(dense))
        layer.prepare_kernel()

    return encode


def _taker_of_fields(layer: Any) -> Callable[[dict[str, torch.Tensor]], None]:
    stack = isinstance(layer, ExpertStack)

    def take(tensors: dict[str, torch.Tensor]) -> None:
        fields = native.from_tensors(layer.scheme.codec, tensors, stack)
        specs = layer.field_specs()
        layer.set_fields({name: tensor.reshape(specs[name].shape) for name, tensor in fields.items()})
        if not stack:
            layer.prepare_kernel()

    return take


def _refuse_codes(plan: TensorPlan, source: Source, config: QuantizationConfig, where: str, given: str) -> None:
    """Raise ``ConfigError`` if the files hold quantized weights: their codes would be quantized a second time."""
    names = [*plan.direct.values(), *(name for conversion in plan.conversions for name in conversion.names())]
    for name in names:
        info = source.info(name)
        if info.torch_dtype.itemsize * 8 < _WIDE and info.torch_dtype != torch.bool and name.endswith("weight"):
            raise ConfigError(
                f"{given} asks for {config.method!r}, which quantizes dense weights, but {name!r} in "
                f"{_file(source, name, where)} is stored as {info.dtype}: the weights are "
                f"quantized already; leave {given} out, or use the dense checkpoint"
            )


def _stored_layers(
    model: torch.nn.Module, plan: TensorPlan, source: Source, config: QuantizationConfig, where: str, given: str
) -> Selection:
    """Return the layers that the files hold quantized; their tensors move from ``plan.direct`` to ``plan.stored``."""
    state = model.state_dict()
    names = set(source.names())
    quantized: dict[str, LayerScheme] = {}
    skipped: dict[str, str] = {}
    for target, name in list(plan.direct.items()):
        above, _, leaf = target.rpartition(".")
        module = model.get_submodule(above)
        experts: int | None = None
        if leaf == "weight" and isinstance(module, torch.nn.Linear):
            path, shape = above, (module.out_features, module.in_features)
        elif leaf in expert_parameters(module):
            path, shape, experts = target, stack_shape(module, leaf), len(state[target])
        else:
            continue
        beside = {suffix: stored_name(name, suffix) for suffix in known_suffixes()}
        found = {suffix: stored for suffix, stored in beside.items() if stored in names}
        if not found:
            skipped[path] = f"dense in {where}"
            continue
        found[""] = name
        scheme = config.scheme(path, shape)
        shapes = {suffix: tuple(source.info(stored).shape) for suffix, stored in found.items()}
        codec = native.stored_codec(scheme.codec, shape, shapes, name, experts)
        quantized[path] = dataclasses.replace(scheme, codec=codec)
        del plan.direct[target]
        plan.unexpected -= set(found.values())
        plan.stored[target] = Stored({stored: suffix for suffix, stored in found.items()}, _not_set)
    if not quantized:
        raise _no_codes(plan, source, config, where, given)
    return Selection(quantized, skipped, ())


def _no_codes(plan: TensorPlan, source: Source, config: QuantizationConfig, where: str, given: str) -> Exception:
    """Return the error for weights that are dense although a config, the file's or the user's, says otherwise."""
    example = next((name for name in plan.direct.values() if name.endswith("weight")), "")
    stored = f"{example!r} in {_file(source, example, where)} is stored as {source.info(example).dtype}"
    path = Path(where) / "config.json"
    if path.is_file() and read_json(path).get(QUANTIZATION_KEY):
        return CheckpointError(
            f"{path} declares weights that are quantized with {config.method!r}, but no layer is ({stored}): "
            f"remove {QUANTIZATION_KEY} from it, or use the quantized files"
        )
    return ConfigError(
        f"{given} says that the weights are quantized with {config.method!r} already ({config.serialized_key}), but no "
        f"layer is ({stored}): leave {config.serialized_key} out, or use the quantized files"
    )


def _file(source: Source, name: str, where: str) -> str:
    """Return the file that holds a tensor, if the source knows."""
    return str(getattr(source.info(name), "file", where))


def _not_set(tensors: dict[str, torch.Tensor]) -> None:
    raise RuntimeError("the layer that takes these tensors was never made")
