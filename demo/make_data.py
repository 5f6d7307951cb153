"""Render the emoji sheet ``data/emoji64.webp`` and its metadata ``data/emoji64.json`` from npm packages.

Needed only to make the sheet anew: ``npm install --ignore-scripts @iconify-json/noto@1.2.9
@iconify-json/fluent-emoji-flat@1.2.6 @iconify-json/twemoji@1.2.5 emojibase-data@17.0.0`` and ``pip install resvg-py``.
"""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path

import numpy as np
import resvg_py
from captions import CONCEPTS, DATA, LABELS, SIZE, STYLES
from PIL import Image

PACKAGES = {"noto": "noto", "fluent": "fluent-emoji-flat", "twemoji": "twemoji"}
SUBGROUPS = set(
    [
        "animal-mammal",
        "animal-bird",
        "animal-amphibian",
        "animal-reptile",
        "animal-marine",
        "animal-bug",
        "plant-flower",
        "plant-other",
        "food-fruit",
        "food-vegetable",
        "food-prepared",
        "food-asian",
        "food-sweet",
        "drink",
        "dishware",
        "transport-ground",
        "transport-water",
        "transport-air",
        "place-building",
        "sport",
        "game",
        "event",
        "sky-weather",
        "heart",
        "face-smiling",
        "face-affection",
        "face-concerned",
        "face-negative",
        "face-costume",
        "clothing",
        "musical-instrument",
        "music",
        "tool",
        "light-video",
        "book-paper",
        "computer",
        "phone",
    ]
)
COLUMNS = 48
ICON = 56  # the drawing; the rest of the 64 x 64 cell is a transparent margin
SUPERSAMPLE = 4


class IconSet:
    """The SVG drawings of one ``@iconify-json`` package, looked up by code point."""

    def __init__(self, folder: Path) -> None:
        self.data = json.loads((folder / "icons.json").read_text(encoding="utf-8"))
        self.chars = json.loads((folder / "chars.json").read_text(encoding="utf-8"))

    def svg(self, hexcode: str) -> str | None:
        """A stand-alone SVG document for a code point sequence, or None if the set lacks it."""
        code = hexcode.lower()
        name = self.chars.get(code) or self.chars.get(code.replace("-fe0f", ""))
        icon = self.data["icons"].get(name)
        if icon is None:
            parent = self.data.get("aliases", {}).get(name, {}).get("parent")
            icon = self.data["icons"].get(parent)
        if icon is None:
            return None
        width = icon.get("width", self.data.get("width", 16))
        height = icon.get("height", self.data.get("height", 16))
        box = f"{icon.get('left', 0)} {icon.get('top', 0)} {width} {height}"
        namespaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
        return f'<svg {namespaces} viewBox="{box}">{icon["body"]}</svg>'


def render(svg: str) -> np.ndarray:
    """Render to a centred (64, 64, 4) uint8 icon, box-filtered from a larger picture with premultiplied alpha."""
    k = SUPERSAMPLE
    png = resvg_py.svg_to_bytes(svg_string=svg, width=ICON * k, height=ICON * k, skip_system_fonts=True)
    picture = Image.open(io.BytesIO(bytes(png))).convert("RGBA")
    canvas = Image.new("RGBA", (SIZE * k, SIZE * k), (0, 0, 0, 0))
    canvas.paste(picture, ((SIZE * k - picture.width) // 2, (SIZE * k - picture.height) // 2))
    pixels = np.asarray(canvas, np.float32)
    alpha = pixels[..., 3:] / 255
    stacked = np.concatenate([pixels[..., :3] * alpha, alpha], -1)
    small = stacked.reshape(SIZE, k, SIZE, k, 4).mean((1, 3))
    color = np.where(small[..., 3:] > 0, small[..., :3] / np.maximum(small[..., 3:], 1e-6), 0)
    return np.concatenate([color, small[..., 3:] * 255], -1).round().clip(0, 255).astype(np.uint8)


def main() -> None:
    """Write the sheet and its metadata."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("node_modules", type=Path, help="folder the npm packages were installed into")
    args = parser.parse_args()
    emojibase = args.node_modules / "emojibase-data"
    entries = json.loads((emojibase / "en" / "data.json").read_text(encoding="utf-8"))
    groups = json.loads((emojibase / "meta" / "groups.json").read_text(encoding="utf-8"))["subgroups"]
    sets = {s: IconSet(args.node_modules / "@iconify-json" / PACKAGES[s]) for s in STYLES}
    names = {label: name for name, label in LABELS.items()}
    icons: list[np.ndarray] = []
    meta: list[dict] = []
    for entry in entries:
        subgroup = groups.get(str(entry.get("subgroup")), "")
        if subgroup not in SUBGROUPS and entry["label"] not in names:
            continue
        drawings = {s: sets[s].svg(entry["hexcode"]) for s in STYLES}
        if None in drawings.values():
            continue
        for style, svg in drawings.items():
            meta.append(
                {
                    "index": len(icons),
                    "concept": names.get(entry["label"]),
                    "label": entry["label"],
                    "style": style,
                    "hex": entry["hexcode"],
                    "subgroup": subgroup,
                    "x": len(icons) % COLUMNS * SIZE,
                    "y": len(icons) // COLUMNS * SIZE,
                }
            )
            icons.append(render(svg))
    missing = [c for c in CONCEPTS if c not in {m["concept"] for m in meta}]
    if missing:
        raise SystemExit(f"concepts without a render in all three styles: {missing}")
    rows = -(-len(icons) // COLUMNS)
    cells = np.zeros((rows * COLUMNS, SIZE, SIZE, 4), np.uint8)
    cells[: len(icons)] = icons
    sheet = cells.reshape(rows, COLUMNS, SIZE, SIZE, 4).swapaxes(1, 2).reshape(rows * SIZE, COLUMNS * SIZE, 4)
    DATA.mkdir(exist_ok=True)
    Image.fromarray(sheet).save(DATA / "emoji64.webp", lossless=True, quality=100, method=6)
    lines = ",\n".join(json.dumps(m, ensure_ascii=False) for m in meta)
    text = f'{{"size": {SIZE}, "columns": {COLUMNS}, "icons": [\n{lines}\n]}}\n'
    (DATA / "emoji64.json").write_text(text, encoding="utf-8")
    print(f"{len(icons)} icons, {(DATA / 'emoji64.webp').stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
