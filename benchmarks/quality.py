"""What quantization costs in picture quality: the demo model against its dense self, same prompts and seeds.

    python benchmarks/quality.py [--prompts 16] [--json FILE] [--markdown]

Printed per method: PSNR in dB and SSIM of the pictures, mean absolute error in grey levels (0-255), cosine and relative
L2 of the pixels, relative L2 of the last latents, and the transformer's bytes as loaded. Figures are means over the
prompts; PSNR is of the mean squared error. ``gates``: whether the default gates hold (PSNR >= 20 dB, MAE <= 12,
cosine >= 0.98, relative L2 <= 0.20).
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from omniloom import Omni, SamplingParams

METHODS: dict[str, Any] = {
    "none": None,
    "fp8": "fp8",
    "fp8 (per tensor)": {"method": "fp8", "weight_granularity": "tensor"},
    "int8": "int8",
    "mxfp8": "mxfp8",
    "bitsandbytes 8-bit": "bitsandbytes_8bit",
    "bitsandbytes nf4": "bitsandbytes",
    "bitsandbytes fp4": {"method": "bitsandbytes", "quant_type": "fp4"},
    "mxfp4": "mxfp4",
    "mxfp4 (4 of 20 steps W4A8)": {"method": "mxfp4", "w4a8_fallback_steps": [0, 1, 18, 19]},
    "mxfp4_dualscale": {"method": "mxfp4_dualscale", "num_bf16_fallback_layers": 1},
}
PROMPTS = [
    f"{thing} on {color}"
    for thing, color in zip(
        ("a fox", "a red heart", "a rocket", "a pizza", "an owl", "a car", "a rose", "a house")
        + ("a cat", "a key", "an apple", "a sailboat", "a guitar", "a frog", "a star", "a cactus"),
        ("blue", "white", "yellow", "green", "black", "gray", "red", "purple") * 2,
        strict=True,
    )
]


def ssim(a: np.ndarray, b: np.ndarray, side: int = 7) -> float:
    """Mean structural similarity of two (H, W, 3) pictures in 0..255, uniform windows (Wang et al. 2004)."""
    x, y = (torch.from_numpy(v.astype(np.float64)).permute(2, 0, 1)[None] for v in (a, b))

    def mean(v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.avg_pool2d(v, side, 1)

    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    mx, my = mean(x), mean(y)
    vx, vy, cov = mean(x * x) - mx * mx, mean(y * y) - my * my, mean(x * y) - mx * my
    return float((((2 * mx * my + c1) * (2 * cov + c2)) / ((mx * mx + my * my + c1) * (vx + vy + c2))).mean())


def pictures(config: Any, prompts: list[str]) -> tuple[list[np.ndarray], list[torch.Tensor], int]:
    """Return the pictures, the last latents and the transformer's bytes."""
    images, latents = [], []
    with Omni("demo", dtype="float32", quantization_config=config) as omni:
        for seed, prompt in enumerate(prompts):
            params = SamplingParams(seed=seed)
            images.append(np.asarray(omni.generate(prompt, params)[0].images[0].convert("RGB")))
            raw = omni.generate(prompt, SamplingParams(seed=seed, output_type="latent"))[0].latents
            latents.append(torch.as_tensor(raw).float())
        return images, latents, omni.report.to_dict()["components"]["transformer"]["bytes"]


def compare(dense: tuple[Any, Any, int], other: tuple[Any, Any, int]) -> dict[str, float]:
    """Return the figures of one method."""
    pairs = [(a.astype(np.float64), b.astype(np.float64)) for a, b in zip(dense[0], other[0], strict=True)]
    mse = float(np.mean([np.mean((a - b) ** 2) for a, b in pairs]))
    return {
        "psnr": 10 * math.log10(255**2 / mse) if mse else math.inf,
        "ssim": float(np.mean([ssim(a, b) for a, b in zip(dense[0], other[0], strict=True)])),
        "mae": float(np.mean([np.mean(np.abs(a - b)) for a, b in pairs])),
        "cosine": float(np.mean([(a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b) for a, b in pairs])),
        "relative_l2": float(np.mean([np.linalg.norm(a - b) / np.linalg.norm(a) for a, b in pairs])),
        "latent_l2": float(
            np.mean([((x - y).norm() / x.norm()).item() for x, y in zip(dense[1], other[1], strict=True)])
        ),
        "bytes": other[2],
    }


def main() -> None:
    """Paint with every method and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help=f"how many of the {len(PROMPTS)} prompts")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    prompts = PROMPTS[: args.prompts]
    dense = pictures(None, prompts)
    rows = {}
    heads = ("method", "PSNR dB", "SSIM", "MAE", "cosine", "rel. L2", "latent rel. L2", "MB", "gates")
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 2) + "---|"]
    print("\n".join(lines) if args.markdown else ("{:>28}" + "{:>15}" * 8).format(*heads), flush=True)
    for name, config in METHODS.items():
        if name == "none":
            continue
        r = rows[name] = compare(dense, pictures(config, prompts))
        passed = r["psnr"] >= 20 and r["mae"] <= 12 and r["cosine"] >= 0.98 and r["relative_l2"] <= 0.2
        cells = [name, f"{r['psnr']:.1f}", f"{r['ssim']:.3f}", f"{r['mae']:.2f}", f"{r['cosine']:.4f}"]
        cells += [
            f"{r['relative_l2']:.3f}",
            f"{r['latent_l2']:.3f}",
            f"{r['bytes'] / 1e6:.1f}",
            "hold" if passed else "no",
        ]
        print(
            "| " + " | ".join(cells) + " |" if args.markdown else ("{:>28}" + "{:>15}" * 8).format(*cells), flush=True
        )
    print(f"\ndense: {dense[2] / 1e6:.1f} MB; {len(prompts)} prompts, float32")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
