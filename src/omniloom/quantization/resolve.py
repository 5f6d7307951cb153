"""What a user wants against what a checkpoint is, for every component. Pure functions: no weights are read.

An online config over weights that are quantized already would quantize codes a second time; a config of quantized
weights over full-precision ones would leave scales without values. So the two are brought together here, or it is an
error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from omniloom.errors import ConfigError
from omniloom.quantization.component import (
    AnyConfig,
    ComponentQuantizationConfig,
    check_components,
    component_config,
    covering,
    is_disabled,
)
from omniloom.quantization.factory import config_from_disk
from omniloom.quantization.methods import QuantizationConfig

Disk = Mapping[str, Any] | str | None
Note = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class ComponentFacts:
    """One component before its weights are read.

    ``denoiser``: whether the denoising loop calls it. ``disk``: the ``quantization_config`` of its checkpoint, which
    the file ``where`` holds. ``stored_dtypes``: its tensors' dtypes as safetensors spells them, where known.
    """

    name: str
    denoiser: bool
    disk: Disk = None
    where: str = "config.json"
    stored_dtypes: Collection[str] | None = None


def resolve_components(
    config: AnyConfig | None,
    components: Iterable[ComponentFacts],
    *,
    given: str = "--quantization",
    note: Note | None = None,
) -> dict[str, QuantizationConfig | None]:
    """Return the config of every component, ``None`` for those that stay as they are.

    ``given``: what the user typed the config into, for messages; ``note`` is called with what else is worth a line.
    Raises ``ConfigError`` for components that do not exist, and where user and checkpoint contradict each other.
    """
    components = list(components)
    check_components(config, [part.name for part in components])
    return {part.name: _resolve_component(config, part, given, note) for part in components}


def _resolve_component(
    config: AnyConfig | None, part: ComponentFacts, given: str, note: Note | None
) -> QuantizationConfig | None:
    named = isinstance(config, ComponentQuantizationConfig) and covering(config.components, part.name) is not None
    source = f"{given} ({part.name})" if named else given
    active = component_config(config, part.name, denoiser=part.denoiser)
    own = config_from_disk(part.disk, where=part.where, stored_dtypes=part.stored_dtypes) if part.disk else None
    if is_disabled(config, part.name):
        if own is not None and own.serialized:
            raise ConfigError(
                f"{source} asks for {part.name!r} without quantization, but {part.where} says that its weights are "
                f"quantized with {own.method!r}: leave {part.name!r} out, or use another checkpoint"
            )
        return None
    if not part.denoiser and not named:
        return resolve_encoder_quant_config(active, part.disk, where=part.where, given=source, note=note)
    return resolve_quant_config_from_disk(
        active, part.disk, where=part.where, given=source, stored_dtypes=part.stored_dtypes, note=note
    )


def resolve_quant_config_from_disk(
    active: QuantizationConfig | None,
    disk: Disk,
    *,
    where: str = "config.json",
    given: str = "--quantization",
    stored_dtypes: Collection[str] | None = None,
    note: Note | None = None,
) -> QuantizationConfig | None:
    """Return the config to load with, from the user's and the checkpoint's.

    A checkpoint that says nothing leaves the user's config, and the other way round. The methods must agree, where a
    user's ``fp8`` agrees with ModelOpt's as well. Of two that agree the checkpoint's is taken if its weights are
    serialized and the user's config does not say so, or if their formats or ignored layers differ; what only concerns
    running (MXFP4's fallbacks and scale rule) stays the user's. Raises ``ConfigError`` that names both sources.
    """
    stored = config_from_disk(disk, where=where, stored_dtypes=stored_dtypes) if disk else None
    if stored is None or active is None:
        return active if stored is None else stored
    if not _agree(active, stored):
        raise ConfigError(
            f"{where} declares quant_method={stored.method!r} but {given} asks for {active.method!r}: "
            f"give {stored.method!r} as well, or leave {given} out"
        )
    if isinstance(disk, str):
        return active
    _reject_contradiction(active, stored, where, given)
    same = type(active) is type(stored)
    if same and not _must_rebuild(active, stored, disk or {}):
        return active
    ignored = {entry for part in active.ignore_lists() for entry in part.entries}
    listed = {entry for part in stored.ignore_lists() for entry in part.entries}
    if note and ignored - listed:
        note(f"{given}: layers to ignore are those of {where}, not {', '.join(sorted(ignored - listed))}")
    return _with_runtime_keys(stored, active) if same else stored


def resolve_encoder_quant_config(
    active: QuantizationConfig | None,
    disk: Disk = None,
    *,
    where: str = "config.json",
    given: str = "--quantization",
    note: Note | None = None,
) -> QuantizationConfig | None:
    """Return the config of a text encoder (or other part) that the user did not name.

    Its own checkpoint's config wins. A config that describes a pre-quantized transformer is not handed on to it:
    its weights are not in that format. Raises ``ConfigError`` for a bad config of the checkpoint.
    """
    stored = config_from_disk(disk, where=where) if disk else None
    if stored is None:
        return None if active is None or active.serialized or not active.loads_online else active
    if active is not None and _agree(active, stored):
        return resolve_quant_config_from_disk(active, disk, where=where, given=given, note=note)
    if active is not None and active.loads_online and note:
        note(f"{where} declares quant_method={stored.method!r}, which is used instead of {active.method!r} of {given}")
    return stored


def _agree(active: QuantizationConfig, stored: QuantizationConfig) -> bool:
    """Whether the names fit: the same method, or the generic ``fp8`` for ModelOpt's FP8."""
    return active.method == stored.method or (active.method, stored.method) == ("fp8", "modelopt")


def _must_rebuild(active: QuantizationConfig, stored: QuantizationConfig, disk: Mapping[str, Any]) -> bool:
    if stored.serialized and not active.serialized:
        return True
    if disk.get("data_type") == "mx_fp":
        return True
    if any(getattr(active, key) != getattr(stored, key) for key in stored.layout_keys):
        return True
    return _ignored(active) != _ignored(stored)


def _ignored(config: QuantizationConfig) -> set[tuple[str, str]]:
    return {(part.style, entry) for part in config.ignore_lists() for entry in part.entries}


def _reject_contradiction(active: QuantizationConfig, stored: QuantizationConfig, where: str, given: str) -> None:
    """Raise ``ConfigError`` if the user asked for another format than that of the stored weights."""
    if type(active) is not type(stored) or not stored.serialized:
        return
    defaults = {field.name: field.default for field in dataclasses.fields(active)}
    for key in stored.layout_keys:
        mine, theirs = getattr(active, key), getattr(stored, key)
        if mine not in (theirs, defaults[key]) and theirs is not None:
            raise ConfigError(
                f"{given} asks for {key}={mine!r}, but {where} says that the weights are stored with {key}={theirs!r}: "
                f"leave {key} out"
            )


def _with_runtime_keys(stored: QuantizationConfig, active: QuantizationConfig) -> QuantizationConfig:
    changes = {key: getattr(active, key) for key in stored.runtime_keys}
    if getattr(active, "require_smooth_scale", False):
        changes["require_smooth_scale"] = True
    return dataclasses.replace(stored, **changes)
