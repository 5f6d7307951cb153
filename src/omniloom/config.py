"""One frozen runtime configuration, the same for the command line, Python, JSON and YAML.

A feature registers its own option once (``register``); every entry point then understands it. An option is either a
single value with a parse function or a frozen dataclass, whose fields can be given one by one:

    {"dtype": "float32", "vae": {"tiling": true}}            a JSON or YAML file
    Omni(model, dtype="float32", vae={"tiling": True})       Python
    omniloom generate --dtype float32 --set vae.tiling=true  the command line

``RuntimeConfig.resolve`` merges layers (weakest first); what was not given is ``UNSET``, never 0 or ``None``.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from omniloom.errors import ConfigError, UserError, suggest


class Unset(enum.Enum):
    """The type of ``UNSET``, which marks a value that was not given (an explicit 0 or ``None`` is given)."""

    UNSET = "unset"

    def __repr__(self) -> str:
        return "UNSET"

    def __bool__(self) -> bool:
        return False


UNSET: Final = Unset.UNSET


@dataclasses.dataclass(frozen=True)
class Option:
    """One registered option: its name, its default, how a raw value becomes a typed one, and one line of help."""

    name: str
    default: Any
    parse: Callable[[Any], Any]
    help: str
    section: type | None = None
    shorthand: str | None = None
    plain: Callable[[Any], Any] | None = None


_OPTIONS: dict[str, Option] = {}
_ALIASES: dict[str, str] = {}


def register(
    name: str,
    *,
    default: Any,
    parse: Callable[[Any], Any],
    help: str,
    aliases: tuple[str, ...] = (),
    plain: Callable[[Any], Any] | None = None,
) -> None:
    """Register a single-value option. ``parse`` raises ``ValueError`` with what is allowed.

    ``aliases``: other names that it may be given under, one of them at a time. ``plain``: what turns a value into JSON
    types that ``parse`` understands, if ``to_plain`` does not.
    """
    _add(Option(name, default, parse, help, plain=plain))
    _ALIASES.update(dict.fromkeys(aliases, name))


def register_section(name: str, *, help: str, shorthand: str | None = None) -> Callable[[type], type]:
    """Class decorator that registers a frozen dataclass, all of whose fields have defaults, as option ``name``.

    ``shorthand``: the field that a plain string stands for, so that ``compile="regional"`` works.
    """

    def decorate(cls: type) -> type:
        _add(Option(name, cls(), lambda value: _parse_section(name, cls, value), help, cls, shorthand))
        return cls

    return decorate


def options() -> Mapping[str, Option]:
    """Return all registered options by name."""
    return types.MappingProxyType(_OPTIONS)


def _add(option: Option) -> None:
    if option.name in _OPTIONS:
        raise ValueError(f"option {option.name!r} is registered twice")
    _OPTIONS[option.name] = option


class RuntimeConfig(Mapping[str, Any]):
    """Every option with its resolved value; immutable. ``config.vae.tiling`` and ``config["vae"]`` both work."""

    __slots__ = ("_sources", "_values")
    _values: Mapping[str, Any]
    _sources: Mapping[str, str]

    def __init__(self, values: Mapping[str, Any], sources: Mapping[str, str]) -> None:
        object.__setattr__(self, "_values", types.MappingProxyType(dict(values)))
        object.__setattr__(self, "_sources", types.MappingProxyType(dict(sources)))

    @classmethod
    def resolve(cls, **layers: Mapping[str, Any]) -> RuntimeConfig:
        """Merge named layers, weakest first, for instance ``resolve(file={...}, cli={...})``.

        A section given in several layers is merged field by field. Raises ``ConfigError`` for an unknown key, a value
        of the wrong type or one that is out of range.
        """
        raw: dict[str, Any] = {}
        sources: dict[str, str] = {}
        for layer, given in layers.items():
            for key, value in _by_name(given).items():
                option = _OPTIONS.get(key)
                if option is None:
                    allowed = ", ".join(sorted(_OPTIONS))
                    raise ConfigError(f"unknown option {key!r}{suggest(str(key), _OPTIONS)} (allowed: {allowed})")
                if value is UNSET:
                    continue
                if option.shorthand and isinstance(value, str):
                    value = {option.shorthand: value}
                raw[key] = _over(raw.get(key), value) if option.section else value
                sources[key] = layer
        values = {name: _parse(o, raw[name]) if name in raw else o.default for name, o in _OPTIONS.items()}
        return cls(values, sources)

    def source(self, key: str) -> str:
        """Return the layer that the value of ``key`` came from, or ``"default"``."""
        return self._sources.get(key, "default")

    def to_dict(self) -> dict[str, Any]:
        """Return the resolved values as plain JSON types; ``resolve(dump=cfg.to_dict())`` gives an equal config."""
        return {name: (_OPTIONS[name].plain or to_plain)(value) for name, value in self._values.items()}

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._values:
            raise AttributeError(f"no option {name!r}")
        return self._values[name]

    def __reduce__(self) -> tuple[Any, ...]:
        return RuntimeConfig, (dict(self._values), dict(self._sources))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("a RuntimeConfig is immutable; resolve a new one")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RuntimeConfig) and dict(self._values) == dict(other._values)

    def __hash__(self) -> int:
        return hash(json.dumps(self.to_dict(), sort_keys=True))

    def __repr__(self) -> str:
        return f"RuntimeConfig({', '.join(f'{k}={v!r}' for k, v in self._values.items())})"


def _by_name(given: Mapping[str, Any]) -> dict[str, Any]:
    """Replace aliases by the names they stand for. Raises ``ConfigError`` if an option is given under two names."""
    typed: dict[str, str] = {}
    for key, value in given.items():
        name = _ALIASES.get(key, key)
        if value is UNSET:
            continue
        if name in typed:
            raise ConfigError(f"{typed[name]!r} and {key!r} are one option: give only one of them")
        typed[name] = key
    return {name: given[key] for name, key in typed.items()}


def load_file(path: str | Path) -> dict[str, Any]:
    """Read a JSON or YAML file of options. Raises ``ConfigError`` if it is missing, malformed or not a mapping."""
    path = Path(path).expanduser()
    kind = "JSON" if path.suffix.lower() == ".json" else "YAML"
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file in UTF-8: {error}") from error
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror or error}") from error
    try:
        data = json.loads(text) if kind == "JSON" else _load_yaml(text)
    except Exception as error:  # yaml has its own exception tree; both may recurse too deeply
        raise ConfigError(f"{path} is not valid {kind}: {' '.join(str(error).split())}") from error
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError(f"{path} must hold a mapping of option names to values, for example: dtype: float32")
    return data


def _load_yaml(text: str) -> Any:
    import yaml

    return yaml.safe_load(text)


def to_plain(value: Any) -> Any:
    """Turn a typed value into JSON types: dataclasses and mappings to dicts, paths to strings, ``UNSET`` left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        return {k: to_plain(v) for k, v in pairs if v is not UNSET}
    if isinstance(value, Mapping):
        return {str(k): to_plain(v) for k, v in value.items() if v is not UNSET}
    if isinstance(value, (list, tuple)):
        return [to_plain(v) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


def reject_unknown(given: Mapping[str, Any], known: set[str], where: str) -> None:
    """Raise ``ConfigError`` for the first key of ``given`` that ``known`` lacks, with a suggestion."""
    for key in given:
        if key not in known:
            allowed = ", ".join(sorted(known))
            raise ConfigError(f"unknown key {key!r} in {where}{suggest(str(key), known)} (allowed: {allowed})")


def _over(weaker: Any, stronger: Any) -> Any:
    """Lay a section's stronger value over a weaker one, field by field where both say which fields they give."""
    if not isinstance(stronger, Mapping):
        return stronger
    if dataclasses.is_dataclass(weaker) and not isinstance(weaker, type):
        weaker = {field.name: getattr(weaker, field.name) for field in dataclasses.fields(weaker)}
    base = weaker if isinstance(weaker, Mapping) else {}
    return {**base, **{key: value for key, value in stronger.items() if value is not UNSET}}


def _parse(option: Option, value: Any) -> Any:
    try:
        return option.parse(value)
    except UserError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"option {option.name}={value!r}: {error}") from error


def _parse_section(name: str, cls: type, value: Any) -> Any:
    if isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"give a mapping with some of: {', '.join(f.name for f in dataclasses.fields(cls))}")
    hints = typing.get_type_hints(cls)
    reject_unknown(value, set(hints), f"option {name!r}")
    return cls(**{k: coerce(v, hints[k], f"{name}.{k}") for k, v in value.items() if v is not UNSET})


def coerce(value: Any, hint: Any, where: str) -> Any:
    """Check ``value`` against a simple type hint (bool, int, float, str, unions, tuples of them) and return it typed.

    Raises ``ConfigError`` if it does not fit: ``True`` is no integer, a string is no number, NaN is no float.
    """
    union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    kinds = typing.get_args(hint) if union else (hint,)
    for kind in kinds:
        origin = typing.get_origin(kind) or kind
        if kind is type(None) and value is None:
            return None
        if origin is bool and isinstance(value, bool):
            return value
        if origin is int and isinstance(value, int) and not isinstance(value, bool):
            return value
        if origin is float and _is_finite(value):
            return float(value)
        if origin is str and isinstance(value, str):
            return value
        if origin in (tuple, Mapping, dict) and isinstance(value, (list, tuple) if origin is tuple else Mapping):
            return tuple(value) if origin is tuple else dict(value)
        if origin is Any:
            return value
    allowed = " or ".join(getattr(k, "__name__", str(k)).replace("NoneType", "null") for k in kinds)
    raise ConfigError(f"option {where}={value!r}: must be of type {allowed}")


def _is_finite(value: Any) -> bool:
    """Whether ``value`` is a number that a float can hold (JSON has neither NaN nor infinity)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False
