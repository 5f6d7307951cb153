"""Values as they are typed: numbers, sizes and ``key=value`` settings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from omniloom.config import load_file
from omniloom.engine.params import MAX_PIXELS, MAX_SIDE
from omniloom.errors import ConfigError, RequestError

_SIZE = re.compile(r"([0-9]{1,9})\s*[xX×]\s*([0-9]{1,9})")


def parse_integer(text: str) -> int:
    """Return the whole number in ``text`` (ASCII digits only). Raises ``ValueError``."""
    if not re.fullmatch(r"[+-]?[0-9]{1,30}", text.strip()):
        raise ValueError(f"{text!r} is not a whole number")
    return int(text)


def parse_number(text: str) -> float:
    """Return the number in ``text``. Raises ``ValueError``."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None


def parse_json_or_file(text: str) -> Any:
    """Return the value of a JSON text, or the mapping in the JSON or YAML file after an ``@``.

    Raises ``ValueError`` for a text that is no JSON, ``ConfigError`` for a file that cannot be used.
    """
    if text.startswith("@"):
        return load_file(text[1:])
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not valid JSON ({error}); give JSON in quotes, or @FILE") from None


def parse_size(text: str) -> tuple[int, int]:
    """Return (width, height) of "1024x768"; blanks and a capital X are allowed. Raises ``RequestError``."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise RequestError(f"--size {text!r}: must be WIDTHxHEIGHT in pixels, for example 1024x768")
    width, height = int(match[1]), int(match[2])
    if not (1 <= width <= MAX_SIDE and 1 <= height <= MAX_SIDE):
        raise RequestError(f"--size {text!r}: each side must be from 1 to {MAX_SIDE} pixels")
    if width * height > MAX_PIXELS:
        raise RequestError(f"--size {text!r}: {width * height} pixels are too many, at most {MAX_PIXELS} are allowed")
    return width, height


def parse_settings(items: Iterable[str]) -> dict[str, Any]:
    """Turn ``["vae.tiling=true", "dtype=float32"]`` into ``{"vae": {"tiling": True}, "dtype": "float32"}``.

    Values are read as YAML. Raises ``ConfigError`` for a malformed item or a key that is given twice.
    """
    result: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(part.isidentifier() for part in parts):
            raise ConfigError(f"--set {item!r}: must be key=value, for example --set vae.tiling=true")
        place = result
        for part in parts[:-1]:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise ConfigError(f"--set {item!r}: {part!r} was given a value of its own already")
        if parts[-1] in place:
            raise ConfigError(f"--set {item!r}: {key.strip()!r} is given twice")
        place[parts[-1]] = _yaml(item, text)
    return result


def _yaml(item: str, text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        first = " ".join(str(error).split())
        raise ConfigError(f"--set {item!r}: the value is not valid YAML: {first}") from error
