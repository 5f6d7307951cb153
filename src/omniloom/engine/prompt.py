"""What a request is about: a text and what goes with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omniloom.config import UNSET, Unset
from omniloom.errors import RequestError, suggest

_IMAGE_KEYS = {"image", "images"}
_MASK_KEYS = {"mask", "mask_image"}
_TENSOR_KEYS = {
    "prompt_embeds",
    "pooled_prompt_embeds",
    "negative_prompt_embeds",
    "negative_pooled_prompt_embeds",
    "latents",
}
_KEYS = {"prompt", "prompt_2", "prompt_3", "negative_prompt", *_IMAGE_KEYS, *_MASK_KEYS, *_TENSOR_KEYS}


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt. ``text`` may be absent only where embeddings are given. ``extra``: further call arguments."""

    text: str | None
    negative: str | None | Unset = UNSET
    images: tuple[Any, ...] = ()
    mask: Any | None = None
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def parse_prompt(value: Any) -> Prompt:
    """Make a ``Prompt`` of a string or a dict; image files are opened. Raises ``RequestError``.

    Dict keys: prompt, prompt_2, prompt_3, negative_prompt, image or images (PIL images or paths), mask or mask_image,
    prompt_embeds, pooled_prompt_embeds, negative_prompt_embeds, negative_pooled_prompt_embeds, latents.
    """
    if isinstance(value, Prompt):
        return value
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, Mapping):
        raise RequestError(f"a prompt must be a string or a dict, not {type(value).__name__}")
    for key in value:
        if key not in _KEYS:
            raise RequestError(
                f"unknown prompt key {key!r}{suggest(str(key), _KEYS)} (allowed: {', '.join(sorted(_KEYS))})"
            )
    given = {key: item for key, item in value.items() if item is not None or key == "negative_prompt"}
    text = given.get("prompt")
    for key in ("prompt", "prompt_2", "prompt_3"):
        _check_text(key, given.get(key))
    if text is None and "prompt_embeds" not in given:
        raise RequestError("the prompt is missing: give a text, for example 'a fox on blue'")
    negative = given.get("negative_prompt", UNSET)
    if not isinstance(negative, (str, Unset, type(None))):
        raise RequestError(f"negative_prompt={negative!r}: must be a string or None")
    images = _images(given)
    masks = [given[key] for key in _MASK_KEYS if key in given]
    if masks and not images:
        raise RequestError("a mask needs an image: give both")
    extra = {key: given[key] for key in given if key in _TENSOR_KEYS or key in ("prompt_2", "prompt_3")}
    return Prompt(text, negative, images, _open(masks[0]) if masks else None, extra)


def _check_text(key: str, text: Any) -> None:
    if text is None:
        return
    if not isinstance(text, str):
        raise RequestError(f"{key}={text!r}: must be a string")
    if not text.strip():
        raise RequestError(f"the {key} is empty: give a text, for example 'a fox on blue'")


def _images(given: Mapping[str, Any]) -> tuple[Any, ...]:
    values = [given[key] for key in sorted(_IMAGE_KEYS) if key in given]
    if len(values) > 1:
        raise RequestError("give either 'image' or 'images', not both")
    if not values:
        return ()
    items = values[0] if isinstance(values[0], (list, tuple)) else [values[0]]
    return tuple(_open(item) for item in items)


def _open(value: Any) -> Any:
    from PIL import Image, UnidentifiedImageError

    if not isinstance(value, (str, Path)):
        return value
    path = Path(value).expanduser()
    try:
        with Image.open(path) as image:
            image.load()
            return image if image.mode in ("RGB", "RGBA", "L") else image.convert("RGB")
    except FileNotFoundError:
        raise RequestError(f"image file {path} does not exist") from None
    except (UnidentifiedImageError, OSError) as error:
        raise RequestError(f"{path} cannot be read as an image: {error}") from error
