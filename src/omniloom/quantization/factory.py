"""From what a user or a checkpoint says to a quantization config."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from omniloom.errors import ConfigError, UserError, suggest
from omniloom.quantization.component import (
    DEFAULT,
    KNOWN_COMPONENTS,
    AnyConfig,
    ComponentQuantizationConfig,
    is_known_component,
)
from omniloom.quantization.methods import QuantizationConfig
from omniloom.quantization.methods.base import canonical, get_method
from omniloom.quantization.methods.modelopt import is_modelopt, normalise

_METHOD_KEYS = ("method", "quant_method")
_NO_METHOD = "must have a 'method' or 'quant_method' key or be a per-component config"
_OVERRIDES: dict[str, Callable[..., QuantizationConfig]] = {}


def build_quant_config(spec: Any, **kwargs: Any) -> AnyConfig | None:
    """Return the quantization config that ``spec`` stands for.

    ``spec``: ``None`` or ``"none"`` (no quantization), a method's name (``"fp8"``), a dict with ``method`` or
    ``quant_method`` and the method's keys, a dict of such per component (``{"transformer": "fp8", "vae": None,
    "default": ...}``), the same as JSON text, or a config, which is returned as it is. ``kwargs`` are further keys of
    the method and win over those in a dict.

    A plain method is for the denoisers, see ``omniloom.quantization.component``. Raises ``ConfigError`` for unknown
    methods and keys, wrong types and contradictions.
    """
    if isinstance(spec, str) and spec.lstrip().startswith("{"):
        spec = _from_json(spec)
    if isinstance(spec, str) and canonical(spec) != "none":
        return _build(spec, kwargs)
    if isinstance(spec, Mapping) and not _is_component_map(spec):
        return _build(*_method_of(spec, kwargs))
    if kwargs:
        raise ConfigError(f"quantization keys {', '.join(kwargs)} need a method's name or a dict with one beside them")
    if spec is None or isinstance(spec, (str, QuantizationConfig, ComponentQuantizationConfig)):
        return None if isinstance(spec, str) else spec
    if isinstance(spec, Mapping):
        entries = {str(name): _entry(str(name), value) for name, value in spec.items()}
        default = entries.pop(DEFAULT, None)
        return ComponentQuantizationConfig(entries, default)
    raise ConfigError(
        f"a quantization config cannot be of type {type(spec).__name__}: give a method's name, a dict or a config"
    )


build_quantization_config = build_quant_config


def register_quantization_override(name: str, builder: Callable[..., QuantizationConfig]) -> None:
    """Let ``builder(**keys)`` make the config of method ``name``, a new one or one that exists already."""
    if not callable(builder):
        raise TypeError("builder must be callable")
    _OVERRIDES[canonical(name)] = builder


def config_from_disk(
    raw: Mapping[str, Any] | str, *, where: str = "config.json", stored_dtypes: Collection[str] | None = None
) -> QuantizationConfig | None:
    """Return the config of a checkpoint's own ``quantization_config``; ``None`` if it names no method.

    Keys that a method does not know are left out. The weights count as serialized unless the checkpoint says
    otherwise, or ``stored_dtypes`` (the tensors' dtypes as safetensors spells them) show that they are not; a bare
    method's name says nothing about them. Raises ``ConfigError`` naming ``where`` for an unknown method or bad values.
    """
    try:
        if isinstance(raw, str):
            return None if canonical(raw) == "none" else _build(raw, {})
        if is_modelopt(raw):
            name, keys = normalise(raw)
        else:
            method, keys = _disk_method(raw), dict(raw)
            if method is None:
                return None
            name = method
        keys = {key: value for key, value in keys.items() if key not in _METHOD_KEYS}
        if canonical(name) in _OVERRIDES:
            return _build(name, keys)
        return get_method(name, _OVERRIDES).from_disk(keys, name, stored_dtypes)
    except UserError as error:
        raise ConfigError(f"{where}, quantization_config: {error}") from error


def _build(name: str, keys: Mapping[str, Any]) -> QuantizationConfig:
    builder = _OVERRIDES.get(canonical(name))
    if builder is None:
        return get_method(name, _OVERRIDES).from_user(keys, name)
    try:
        inspect.signature(builder).bind(**keys)
    except TypeError as error:
        raise ConfigError(f"quantization method {name!r}: its builder {error}") from error
    config = builder(**keys)
    if not isinstance(config, QuantizationConfig):
        raise ConfigError(f"the builder registered for quantization method {name!r} returned no QuantizationConfig")
    return config


def _entry(component: str, value: Any) -> QuantizationConfig | None:
    """Return the config of one component."""
    try:
        config = build_quant_config(value)
    except UserError as error:
        raise ConfigError(f"quantization of {component!r}: {error}") from error
    if isinstance(config, ComponentQuantizationConfig):
        raise ConfigError(f"quantization of {component!r}: give a method, not a map of components")
    return config


def _is_component_map(spec: Mapping[Any, Any]) -> bool:
    """Whether a dict maps components to methods rather than being a method's own."""
    values = list(spec.values())
    if any(key in spec for key in _METHOD_KEYS) or is_modelopt(spec) or not values:
        return False
    if any(value is not None and not isinstance(value, (str, Mapping, QuantizationConfig)) for value in values):
        return False
    if all(isinstance(value, str) for value in values):
        return all(is_known_component(str(key)) for key in spec)
    return any(value is None or isinstance(value, QuantizationConfig) or _names_method(value) for value in values)


def _names_method(value: Any) -> bool:
    return isinstance(value, Mapping) and (any(key in value for key in _METHOD_KEYS) or is_modelopt(value))


def _method_of(spec: Mapping[str, Any], kwargs: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    if is_modelopt(spec):
        name, keys = normalise(spec)
        return name, {**keys, **kwargs}
    keys = {**spec, **kwargs}
    name = keys.pop("method", None)
    if name is None:
        name = keys.pop("quant_method", None)
    elif "quant_method" in keys and canonical(str(keys.pop("quant_method"))) != canonical(str(name)):
        raise ConfigError(f"quantization config with method={name!r} and another quant_method={spec['quant_method']!r}")
    if not isinstance(name, str):
        unknown = next((str(key) for key in spec if not is_known_component(str(key))), "")
        hint = suggest(unknown, (*KNOWN_COMPONENTS, *_METHOD_KEYS))
        raise ConfigError(
            f"a quantization config {_NO_METHOD}; got the keys {', '.join(map(str, spec)) or '(none)'}{hint}"
        )
    return name, keys


def _disk_method(raw: Mapping[str, Any]) -> str | None:
    name = raw.get("quant_method") or raw.get("method")
    if name is None and (raw.keys() & {"load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit"}):
        return "bitsandbytes"  # transformers wrote no method before it had several
    return None if name is None else str(name)


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"the quantization config {text!r} is not valid JSON: {error}") from error
