"""Concepts, colours, phrasings and the deterministic held-out rule of the demo model, all in one place.

A training picture is one emoji (a concept drawn in one of three styles) composited on a solid background colour. A
caption names the concept and, depending on its phrasing, the style and the background. A caption without a style may
be answered in any style; a caption without a colour means a white background.
"""

from __future__ import annotations

import json
import random
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

DEMO = Path(__file__).resolve().parent
DATA = DEMO / "data"
SIZE = 64
MAX_LENGTH = 16
STYLES = ("noto", "fluent", "twemoji")
COLORS: dict[str, tuple[int, int, int]] = {
    "white": (255, 255, 255),
    "black": (20, 20, 20),
    "red": (220, 50, 47),
    "blue": (50, 100, 220),
    "green": (60, 170, 80),
    "yellow": (250, 215, 70),
    "purple": (140, 80, 190),
    "gray": (150, 150, 150),
}

# Name used in prompts -> label of the emoji in data/emoji64.json (only where the two differ).
_RENAMED = {
    "dog": "dog face", "cat": "cat face", "tiger": "tiger face", "horse": "horse face", "cow": "cow face",
    "pig": "pig face", "mouse": "mouse face", "rabbit": "rabbit face", "monkey": "monkey face",
    "dragon": "dragon face", "whale": "spouting whale", "fish": "tropical fish", "bee": "honeybee",
    "ladybug": "lady beetle", "clover": "four leaf clover", "apple": "red apple", "corn": "ear of corn",
    "fries": "french fries", "cake": "birthday cake", "cheese": "cheese wedge", "car": "automobile",
    "train": "locomotive", "ufo": "flying saucer", "moon": "crescent moon", "pumpkin": "jack-o-lantern",
    "gift": "wrapped gift", "coffee": "hot beverage", "smiley": "grinning face", "lock": "locked",
}  # fmt: skip
CONCEPTS: tuple[str, ...] = (
    # animals
    "dog", "cat", "fox", "panda", "bear", "koala", "lion", "tiger", "horse", "unicorn", "cow", "pig", "mouse",
    "rabbit", "monkey", "elephant", "zebra", "giraffe", "frog", "chicken", "penguin", "owl", "duck", "flamingo",
    "parrot", "turtle", "snake", "crocodile", "dragon", "whale", "dolphin", "fish", "shark", "octopus", "crab", "snail",
    "butterfly", "bee", "ladybug", "spider",
    # plants
    "sunflower", "rose", "tulip", "cactus", "palm tree", "evergreen tree", "mushroom", "clover", "maple leaf",
    # food
    "apple", "banana", "grapes", "watermelon", "lemon", "pineapple", "strawberry", "cherries", "avocado", "carrot",
    "corn", "broccoli", "eggplant", "pizza", "hamburger", "fries", "hot dog", "doughnut", "cookie", "cake",
    "ice cream", "cupcake", "sushi", "cheese", "coffee",
    # vehicles and buildings
    "rocket", "car", "bus", "train", "airplane", "helicopter", "sailboat", "tractor", "ufo", "house", "castle",
    # things
    "red heart", "balloon", "guitar", "drum", "snowman", "ghost", "robot", "alien", "skull", "crown", "star", "moon",
    "sun", "rainbow", "umbrella", "fire", "snowflake", "key", "lock", "bell", "gift", "pumpkin", "soccer ball",
    "anchor", "smiley",
)  # fmt: skip
LABELS: dict[str, str] = {name: _RENAMED.get(name, name) for name in CONCEPTS}
_SYNONYMS = {
    "apple": "red apple", "car": "automobile", "doughnut": "donut", "hamburger": "burger", "red heart": "heart",
    "airplane": "plane", "evergreen tree": "pine tree", "soccer ball": "football", "gray": "grey",
}  # fmt: skip

CANONICAL = "{style} emoji of {name}, {color} background"
# (weight, phrasing); {name} is the bare name, {a} the name with its article.
_STYLE_COLOR: tuple[tuple[float, str], ...] = (
    (8, CANONICAL),
    (2, "{style} emoji of {a} on {color}"),
    (2, "{name} on a {color} background, {style} style"),
    (2, "a {style} {name} on {color}"),
    (1, "{style} {name}, {color} background"),
    (1, "{a} on a {color} background in {style} style"),
)
_COLOR: tuple[tuple[float, str], ...] = (
    (3, "{a} on {color}"),
    (2, "{a} on a {color} background"),
    (2, "a {color} background with {a}"),
    (1, "{name} on {color}"),
    (1, "{name}, {color} background"),
    (1, "emoji of {a} on a {color} background"),
)
_STYLE: tuple[tuple[float, str], ...] = ((2, "{style} emoji of {name}"), (1, "{style} {name}"), (1, "a {style} {name}"))
_BARE: tuple[tuple[float, str], ...] = ((2, "{name}"), (2, "{a}"), (1, "emoji of {a}"), (1, "a picture of {a}"))
PHRASINGS: tuple[str, ...] = tuple(p for group in (_STYLE_COLOR, _COLOR, _STYLE, _BARE) for _, p in group)
_NO_ARTICLE = {"grapes", "cherries", "fries", "cheese", "coffee", "corn", "broccoli", "sushi", "fire"}


@dataclass(frozen=True)
class Item:
    """One target picture: row in the sheet, concept, style and background colour."""

    index: int
    name: str
    style: str
    color: str


def with_article(name: str) -> str:
    """The name with an indefinite article where English wants one."""
    if name in _NO_ARTICLE:
        return name
    return ("an " if name[0] in "aeio" or name in ("umbrella",) else "a ") + name


def caption(phrasing: str, item: Item) -> str:
    """Fill one phrasing for one item."""
    return phrasing.format(style=item.style, color=item.color, name=item.name, a=with_article(item.name))


def random_caption(item: Item, rng: random.Random) -> str:
    """A random training caption of an item; about 60 % say the style, white backgrounds may go unsaid."""
    groups = [(0.62, _STYLE_COLOR), (0.38, _COLOR)]
    if item.color == "white":  # what is unsaid must be white
        groups = [(0.36, _STYLE_COLOR), (0.22, _COLOR), (0.17, _STYLE), (0.25, _BARE)]
    (_, group), *_ = rng.choices(groups, [w for w, _ in groups])
    (_, phrasing), *_ = rng.choices(group, [w for w, _ in group])
    text = caption(phrasing, item)
    for word in (item.name, item.color):
        if word in _SYNONYMS and rng.random() < 0.1:
            text = text.replace(word, _SYNONYMS[word])
            text = text.replace(with_article(word).split()[0] + " " + _SYNONYMS[word], with_article(_SYNONYMS[word]))
    return text


def _hash(text: str) -> int:
    return zlib.crc32(text.encode())


def held_out_pair(style: str, name: str) -> bool:
    """Whether a whole (style, concept) pair is never trained (about 2 %)."""
    return _hash(f"pair|{style}|{name}") % 50 == 0


def held_out_color(style: str, name: str, color: str) -> bool:
    """Whether one (style, concept) x colour combination is never trained (about 8 %)."""
    return _hash(f"color|{style}|{name}|{color}") % 12 == 0


def load_sheet() -> tuple[np.ndarray, list[dict]]:
    """The RGBA renders, (N, 64, 64, 4) uint8, and their metadata."""
    meta = json.loads((DATA / "emoji64.json").read_text(encoding="utf-8"))
    sheet = np.asarray(Image.open(DATA / "emoji64.webp").convert("RGBA"))
    columns = meta["columns"]
    icons = sheet.reshape(-1, SIZE, columns, SIZE, 4).swapaxes(1, 2).reshape(-1, SIZE, SIZE, 4)
    return icons[: len(meta["icons"])], meta["icons"]


def all_items() -> list[Item]:
    """Every concept x style x colour, in a fixed order."""
    _, meta = load_sheet()
    row = {(m["label"], m["style"]): m["index"] for m in meta}
    return [Item(row[LABELS[n], s], n, s, c) for n in CONCEPTS for s in STYLES for c in COLORS]


def split(items: list[Item]) -> tuple[list[int], list[int], list[int]]:
    """Positions of the trained items, the held-out pair x colour combinations and the held-out pairs."""
    train, combos, pairs = [], [], []
    for i, it in enumerate(items):
        if held_out_pair(it.style, it.name):
            pairs.append(i)
        elif held_out_color(it.style, it.name, it.color):
            combos.append(i)
        else:
            train.append(i)
    return train, combos, pairs


def composite(rgba: np.ndarray, color: tuple[int, int, int]) -> np.ndarray:
    """Alpha-composite (..., 4) uint8 renders on a colour; float32 in [0, 255]."""
    alpha = rgba[..., 3:].astype(np.float32) / 255
    return rgba[..., :3] * alpha + np.asarray(color, np.float32) * (1 - alpha)
