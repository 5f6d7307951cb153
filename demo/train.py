"""Train the demo's text encoders and transformer together on precomputed VAE latents (rectified flow).

The schedule follows the elapsed training time, not a step count: ``budget.json`` in the run folder holds the number of
seconds and is read at every step, so that a run can be shortened or lengthened while it goes on. Stop it at any time
and continue with ``--resume``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from captions import COLORS, MAX_LENGTH, Item, all_items, composite, load_sheet, random_caption, split
from diffusers import AutoencoderTiny
from networks import Models, make_models, make_tokenizer
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedTokenizerFast

GRID = 8  # 8 x 8 packed tokens of 2 x 2 x 8 latents
VARIANTS = 3  # the untouched picture and two slightly moved ones


def pack(z: torch.Tensor) -> torch.Tensor:
    """(B, 8, 16, 16) latents to the transformer's (B, 64, 32) tokens."""
    return z.view(len(z), 8, GRID, 2, GRID, 2).permute(0, 2, 4, 1, 3, 5).reshape(len(z), GRID * GRID, 32)


def moved(x: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    """A batch of pictures, each zoomed by up to 6 % and shifted by up to 3 pixels."""
    zoom = 1 + 0.06 * (2 * torch.rand(len(x), generator=rng) - 1)
    shift = (2 * torch.rand(len(x), 2, generator=rng) - 1) * 3 / 32
    theta = torch.zeros(len(x), 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = 1 / zoom
    theta[:, :, 2] = shift
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, mode="bicubic", padding_mode="border", align_corners=False).clamp(-1, 1)


@torch.no_grad()
def encode_items(vae: AutoencoderTiny, items: list[Item]) -> torch.Tensor:
    """(VARIANTS, items, 64, 32) normalised, packed latents."""
    icons, _ = load_sheet()
    rng = torch.Generator().manual_seed(0)
    out: list[list[torch.Tensor]] = [[] for _ in range(VARIANTS)]
    for k in range(0, len(items), 48):
        pictures = np.stack([composite(icons[it.index], COLORS[it.color]) for it in items[k : k + 48]])
        x = torch.from_numpy(pictures).permute(0, 3, 1, 2).contiguous() / 127.5 - 1
        for v in range(VARIANTS):
            z = vae.encode(moved(x, rng) if v else x).latents
            out[v].append(pack((z - vae.config.shift_factor) * vae.config.scaling_factor))
    return torch.stack([torch.cat(zs) for zs in out])


def contrast_weights(items: list[Item], most: float) -> list[float]:
    """How often each item is drawn, from 1 to ``most``: drawings that hardly differ from their background add little to
    the loss, and are the ones that come out wrong.
    """
    icons, _ = load_sheet()
    pictures = np.stack([composite(icons[it.index], COLORS[it.color]) for it in items]).astype(np.float32)
    grounds = np.array([COLORS[it.color] for it in items], np.float32)[:, None, None]
    contrast = np.sqrt(((pictures - grounds) ** 2).mean((1, 2, 3)))
    return np.clip(np.median(contrast) / np.maximum(contrast, 1), 1, most).tolist()


class FlowLoss:
    """The rectified-flow loss: predict noise - x0 at t = sigmoid(N(shift, 1))."""

    def __init__(self, models: Models, bf16: bool) -> None:
        self.models, self.bf16 = models, bf16
        side = torch.arange(GRID, dtype=torch.float32)
        self.img_ids = torch.stack(torch.meshgrid(torch.zeros(1), side, side, indexing="ij"), -1).reshape(-1, 3)
        self.txt_ids = torch.zeros(MAX_LENGTH, 3)

    def __call__(self, x0: torch.Tensor, ids: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
        noise = torch.randn_like(x0)
        t = torch.sigmoid(torch.randn(len(x0)) + shift)
        xt = torch.lerp(x0, noise, t[:, None, None])
        # The plain attention is several times faster here than the CPU flash kernel's backward pass.
        with sdpa_kernel(SDPBackend.MATH), torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            v = self.models.transformer(
                hidden_states=xt,
                timestep=t,
                pooled_projections=self.models.clip(ids).pooler_output,
                encoder_hidden_states=self.models.t5(ids)[0],
                txt_ids=self.txt_ids,
                img_ids=self.img_ids,
                return_dict=False,
            )[0]
        return F.mse_loss(v.float(), noise - x0)


def make_optimizers(models: Models, lr: float, muon_lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the weight matrices inside the blocks and text layers, AdamW for everything else."""
    hidden, rest = [], []
    for module in (models.clip, models.t5, models.transformer):
        for name, p in module.named_parameters():
            inside = any(key in name for key in ("blocks.", "layers.", "block."))
            hidden_matrix = inside and p.ndim == 2 and "bias" not in name
            (hidden if hidden_matrix else rest).append(p)
    return [
        torch.optim.Muon(hidden, muon_lr, weight_decay=0.01, momentum=0.95, ns_steps=4, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr, betas=(0.9, 0.98), weight_decay=0.01),
    ]


def read_budget(path: Path, fallback: float) -> float:
    """The training seconds now asked for; a missing or half-written file keeps the last value."""
    try:
        return float(json.loads(path.read_text(encoding="utf-8"))["seconds"])
    except (OSError, ValueError, KeyError):
        return fallback


def load_exported(models: Models, folder: Path) -> None:
    """Take the weights of an exported pipeline folder (the optimizers start anew)."""
    for network, name in (
        (models.clip, "text_encoder"),
        (models.t5, "text_encoder_2"),
        (models.transformer, "transformer"),
    ):
        network.load_state_dict(type(network).from_pretrained(str(folder / name)).float().state_dict())


def main() -> None:
    """Train until the time budget is spent."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vae", type=Path, default=Path("runs/vae"), help="folder written by train_vae.py")
    parser.add_argument("--out", type=Path, default=Path("runs/transformer"))
    parser.add_argument("--seconds", type=float, default=6300, help="budget, unless budget.json says otherwise")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1.5e-3, help="AdamW's peak rate")
    parser.add_argument("--muon-lr", type=float, default=5e-3, help="Muon's, scaled to AdamW's update size")
    parser.add_argument("--noise-shift", type=float, default=0.8, help="mean of logit(t) at first; falls to 0")
    parser.add_argument("--ema", type=float, default=0.998)
    parser.add_argument(
        "--contrast", type=float, default=2.5, help="draw low-contrast items up to so many times as often"
    )
    parser.add_argument("--double", type=int, default=1, help="double-stream blocks")
    parser.add_argument("--single", type=int, default=4, help="single-stream blocks")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16 (faster on CPUs that have it)")
    parser.add_argument("--compile", action="store_true", help="torch.compile the transformer's single-stream blocks")
    parser.add_argument("--init", type=Path, help="start from the weights of an exported model folder")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    checkpoint, budget_file = args.out / "checkpoint.pt", args.out / "budget.json"
    state = torch.load(checkpoint, weights_only=True) if args.resume and checkpoint.exists() else None
    torch.manual_seed(state["step"] if state else 0)
    rng = random.Random(state["step"] if state else 0)
    if state or args.init:
        kept = args.out / "tokenizer" if state else args.init / "tokenizer"
        tokenizer = PreTrainedTokenizerFast.from_pretrained(kept)
    else:
        tokenizer = make_tokenizer()
    if not state:
        tokenizer.save_pretrained(args.out / "tokenizer")
    items = all_items()
    train_items = split(items)[0]
    vae = AutoencoderTiny.from_pretrained(args.vae).eval()
    if state and (args.out / "latents.pt").exists():
        latents = torch.load(args.out / "latents.pt", weights_only=True)
    else:
        latents = encode_items(vae, items)
        torch.save(latents, args.out / "latents.pt")
    models = make_models(len(tokenizer), args.double, args.single)
    if args.init and not state:
        load_exported(models, args.init)
    (args.out / "arch.json").write_text(json.dumps({"double": args.double, "single": args.single}), encoding="utf-8")
    parameters = models.parameters()
    optimizers = make_optimizers(models, args.lr, args.muon_lr)
    ema = [p.detach().clone() for p in parameters]
    step, elapsed, running, saved = 0, 0.0, 0.0, 0.0
    if state:
        with torch.no_grad():
            torch._foreach_copy_(parameters, state["weights"])
            torch._foreach_copy_(ema, state["ema"])
        for optimizer, saved_state in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved_state)
        step, elapsed, running = state["step"], state["elapsed"], state["loss"]
        saved = elapsed
    if args.compile:
        for block in models.transformer.single_transformer_blocks:  # the compiled double block's gradients were NaN
            block.compile(dynamic=False)
    loss_of = FlowLoss(models, args.bf16)
    weights = contrast_weights([items[i] for i in train_items], args.contrast)
    sizes = [sum(p.numel() for p in m.parameters()) / 1e6 for m in (models.clip, models.t5, models.transformer)]
    print(f"CLIP {sizes[0]:.2f} M, T5 {sizes[1]:.2f} M, transformer {sizes[2]:.2f} M parameters", flush=True)
    print(f"{len(train_items)} of {len(items)} items are trained", flush=True)

    def save() -> None:
        data = {"weights": [p.detach() for p in parameters], "ema": ema, "step": step, "elapsed": elapsed}
        data |= {"optimizers": [o.state_dict() for o in optimizers], "loss": running}
        temporary = checkpoint.with_suffix(".tmp")
        torch.save(data, temporary)
        os.replace(temporary, checkpoint)

    seconds, last = args.seconds, time.monotonic()
    while True:
        seconds = read_budget(budget_file, seconds)
        done = elapsed / seconds
        if done >= 1:
            break
        factor = min(1, (step + 1) / 100) * (1 if done < 0.6 else max(0.02, (1 - done) / 0.4))
        for optimizer, peak in zip(optimizers, (args.muon_lr, args.lr), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
        # What a picture shows is decided at high noise, how it looks at low noise: begin with the former.
        shift = args.noise_shift * (1 if done < 0.6 else (1 - done) / 0.4)
        chosen = rng.choices(train_items, weights, k=args.batch)
        variant = rng.choices(range(VARIANTS), (0.9, 0.05, 0.05), k=args.batch)
        texts = ["" if rng.random() < 0.1 else random_caption(items[i], rng) for i in chosen]
        ids = tokenizer(texts, padding="max_length", max_length=MAX_LENGTH, truncation=True, return_tensors="pt")
        loss = loss_of(latents[variant, chosen], ids.input_ids, shift)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        decay = min(args.ema, step / (step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(ema, [p.detach() for p in parameters], 1 - decay)
        running = 0.99 * running + 0.01 * loss.item() if step > 20 else loss.item()
        now = time.monotonic()
        elapsed += min(now - last, 20.0)  # a stopped process does not use up its budget
        last = now
        if step % 50 == 0:
            print(f"{step} {elapsed:.0f}s loss {running:.4f} norm {norm.item():.2f} rate {factor:.3f}", flush=True)
        if elapsed - saved > 180:
            save()
            saved = elapsed
    save()
    print(f"finished: {step} steps, {elapsed:.0f} s, loss {running:.4f}", flush=True)


if __name__ == "__main__":
    main()
