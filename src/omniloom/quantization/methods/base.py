"""What a quantization config is, and the registry of methods.

A config is a frozen value that needs no torch: built from what a user gives (strict) or from what a checkpoint's
``quantization_config`` says (tolerant), and written as plain JSON by ``to_dict``. Codecs are imported when a layer's
scheme is asked for.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import typing
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from omniloom.config import coerce, reject_unknown, to_plain
from omniloom.errors import ConfigError, suggest

if TYPE_CHECKING:
    from omniloom.quantization.scheme import LayerScheme

MANY_BLOCKS = r"^(?:blocks|transformer_blocks|layers)\.(\d+)\."  # the list of blocks that a denoiser starts with


@dataclasses.dataclass(frozen=True)
class IgnoreList:
    """A list of layers that stay as they are. ``key``: where it was given; ``style``: how its entries match."""

    key: str
    style: str
    entries: tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizationConfig:
    """Base of all methods. Fields are validated when it is built, directly or from a dict; ``ConfigError`` if wrong.

    ``ignored_layers``: layers that stay as they are, by full path, by a run of whole path components (``img_mlp``
    stands for every layer in every ``img_mlp``), by ``re:`` and a regular expression, or by a glob.
    """

    method: ClassVar[str] = ""
    names: ClassVar[tuple[str, ...]] = ()  # further names that a user may type
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # what some of those names stand for
    loads_online: ClassVar[bool] = False
    serialized_key: ClassVar[str] = "is_checkpoint_serialized"
    stored_dtypes: ClassVar[frozenset[str]] = frozenset()  # safetensors dtypes that prove serialized weights
    layout_keys: ClassVar[tuple[str, ...]] = ()  # what the stored tensors depend on: the checkpoint decides
    runtime_keys: ClassVar[tuple[str, ...]] = ()  # what the user decides for a serialized checkpoint as well
    styles: ClassVar[Mapping[str, str]] = {"ignored_layers": "vllm", "modules_to_not_convert": "hf"}

    ignored_layers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, hint in field_hints(type(self)).items():
            value = coerce(getattr(self, name), hint, f"quantization.{self.method}.{name}")
            object.__setattr__(self, name, to_plain(value) if isinstance(value, dict) else value)
        for key in self.styles:
            check_strings(self, key)
        self.check()

    def check(self) -> None:
        """Raise ``ConfigError`` for fields that are out of range or contradict each other."""

    @property
    def serialized(self) -> bool:
        """Whether the config describes weights that are stored in the method's format already."""
        return bool(getattr(self, self.serialized_key))

    def ignore_lists(self) -> tuple[IgnoreList, ...]:
        """Return the lists of layers to leave as they are, each with the matching rule of its key."""
        pairs = ((key, style, getattr(self, key, ())) for key, style in self.styles.items())
        return tuple(IgnoreList(key, style, entries) for key, style, entries in pairs if entries)

    def check_online(self) -> None:
        """Raise ``ConfigError`` if weights that are stored in full precision cannot be brought to this format."""
        if self.serialized or not self.loads_online:
            raise ConfigError(
                f"quantization method {self.method!r} describes weights that are quantized already, but this model's "
                f"are not: give a checkpoint in that format, or one of {', '.join(online_methods())}"
            )

    def keeps(self, path: str) -> str | None:
        """Say why this config leaves the layer at ``path`` as it is although no list names it, if it does."""
        return None

    def named_layers(self) -> tuple[tuple[str, str], ...]:
        """Return (key, path) of the layers that the config singles out and that must therefore exist."""
        return ()

    def scheme(self, path: str, shape: tuple[int, int]) -> LayerScheme:
        """Return how the layer at ``path`` with an (out, in) weight is stored and computed.

        Raises ``ConfigError`` where only a checkpoint's own tensors can say.
        """
        raise ConfigError(f"quantization method {self.method!r}: the checkpoint's tensors say how {path} is stored")

    def get_name(self) -> str:
        """Return the name of the method."""
        return self.method

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types; ``QuantizationConfig.from_dict`` gives an equal config."""
        return {"method": self.method, **copy.deepcopy(to_plain(self))}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> QuantizationConfig:
        """Return the config that ``to_dict`` wrote. Raises ``ConfigError`` for an unknown method or key."""
        given = dict(data)
        name = given.pop("method", None) or given.pop("quant_method", None)
        return get_method(str(name)).from_user(given, str(name))

    @classmethod
    def from_user(cls, given: Mapping[str, Any], name: str = "") -> QuantizationConfig:
        """Build from a user's keys. Raises ``ConfigError`` for one that the method does not have."""
        given = {**cls.presets.get(canonical(name), {}), **cls.translate(dict(given))}
        reject_unknown(given, set(field_hints(cls)), f"quantization method {cls.method!r}")
        return cls(**given)

    @classmethod
    def from_disk(
        cls, raw: Mapping[str, Any], name: str = "", stored: Collection[str] | None = None
    ) -> QuantizationConfig:
        """Build from a checkpoint's own keys: unknown ones are left out, weights are serialized unless it says not.

        ``stored``: the dtypes of the checkpoint's tensors as safetensors spells them, where they are known.
        """
        given = {**cls.presets.get(canonical(name), {}), **cls.translate(dict(raw))}
        hints = field_hints(cls)
        known = {key: value for key, value in given.items() if key in hints and value is not None}
        if cls.serialized_key not in known:
            known[cls.serialized_key] = stored is None or not cls.stored_dtypes or bool(cls.stored_dtypes & set(stored))
        return cls(**known)

    @classmethod
    def translate(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Return ``given`` with other producers' names of keys replaced by ours."""
        return given

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:  # not the generated one, which fails on fields that are dicts
        return hash(json.dumps(self.to_dict(), sort_keys=True))


@dataclasses.dataclass(frozen=True, eq=False)
class OnlineConfig(QuantizationConfig):
    """Base of the methods that quantize full-precision weights while they are loaded.

    ``modules_to_not_convert``: a list as diffusers and transformers write it. ``all_layers``: quantize the layers that
    are best kept in high precision as well (conditioning, embedders, final projections, towers).
    """

    loads_online: ClassVar[bool] = True

    modules_to_not_convert: tuple[str, ...] = ()
    all_layers: bool = False


_METHODS: dict[str, type[QuantizationConfig]] = {}
_HINTS: dict[type[QuantizationConfig], dict[str, Any]] = {}
_T = TypeVar("_T", bound=QuantizationConfig)


@typing.dataclass_transform(eq_default=False, frozen_default=True)
def method_config(cls: type[_T]) -> type[_T]:
    """Class decorator: a frozen dataclass that is registered under its method's names."""
    cls = dataclasses.dataclass(frozen=True, eq=False)(cls)
    for name in (cls.method, *cls.names):
        if canonical(name) in _METHODS:
            raise ValueError(f"quantization method {name!r} is registered twice")
        _METHODS[canonical(name)] = cls
    return cls


def canonical(name: str) -> str:
    """Return the spelling that method names are compared in."""
    return name.strip().lower().replace("-", "_")


def get_method(name: str, more: Collection[str] = ()) -> type[QuantizationConfig]:
    """Return the config class of a method. Raises ``ConfigError``, listing ``more`` as well, for an unknown name."""
    if canonical(name) not in _METHODS:
        hint = suggest(canonical(name), {*_METHODS, *more})
        supported = ", ".join(sorted({cls.method for cls in _METHODS.values()} | set(more)))
        raise ConfigError(f"unknown quantization method {name!r}{hint} (supported: {supported})")
    return _METHODS[canonical(name)]


def online_methods() -> list[str]:
    """Return the methods that quantize full-precision weights."""
    return sorted({cls.method for cls in _METHODS.values() if cls.loads_online})


def field_hints(cls: type[QuantizationConfig]) -> dict[str, Any]:
    """Return the type of each field."""
    if cls not in _HINTS:
        hints = typing.get_type_hints(cls)
        _HINTS[cls] = {field.name: hints[field.name] for field in dataclasses.fields(cls)}
    return _HINTS[cls]


def check_strings(config: QuantizationConfig, key: str) -> None:
    """Raise ``ConfigError`` unless the field (if there is one) is a list of names."""
    value = getattr(config, key, None)
    if value is not None and not all(isinstance(entry, str) and entry for entry in value):
        raise ConfigError(f"option quantization.{config.method}.{key}={list(value)!r}: must be a list of layer names")


def one_of(config: QuantizationConfig, key: str, allowed: Collection[Any]) -> None:
    """Raise ``ConfigError`` unless the field has one of the values ``allowed``."""
    value = getattr(config, key)
    if value not in allowed:
        hint = suggest(value, [a for a in allowed if isinstance(a, str)]) if isinstance(value, str) else ""
        listed = ", ".join(map(repr, allowed))
        raise ConfigError(f"option quantization.{config.method}.{key}={value!r}{hint}: must be one of {listed}")


def rename(given: dict[str, Any], names: Mapping[str, str], method: str) -> dict[str, Any]:
    """Return ``given`` with keys renamed. Raises ``ConfigError`` if two names of one key have different values."""
    result: dict[str, Any] = {}
    for key, value in given.items():
        target = names.get(key, key)
        if target in result and result[target] != value:
            raise ConfigError(f"quantization method {method!r}: {target!r} is given twice, also as {key!r}")
        result[target] = value
    return result
