"""Train the demo VAE, an AutoencoderTiny that maps 64 x 64 pictures to 16 x 16 x 8 latents, on every render."""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from captions import COLORS, all_items, load_sheet
from diffusers import AutoencoderTiny


def make_vae(width: int) -> AutoencoderTiny:
    """The untrained autoencoder: two stride-2 stages, 8 latent channels."""
    return AutoencoderTiny(
        encoder_block_out_channels=(width,) * 3,
        decoder_block_out_channels=(width,) * 3,
        num_encoder_blocks=(0, 1, 3),
        num_decoder_blocks=(3, 1, 0),
        latent_channels=8,
        scaling_factor=1.0,
        shift_factor=0.0,
    )


class Pictures:
    """Random training pictures: demo concepts or any render, on palette or random backgrounds."""

    def __init__(self, seed: int, demo_share: float) -> None:
        self.demo_share = demo_share
        icons, _ = load_sheet()
        self.icons = torch.from_numpy(np.ascontiguousarray(icons))
        self.demo = torch.tensor(sorted({it.index for it in all_items()}))
        self.palette = torch.tensor(list(COLORS.values())).float()
        self.rng = torch.Generator().manual_seed(seed)

    def batch(self, size: int) -> torch.Tensor:
        """A (size, 3, 64, 64) batch in [-1, 1], flipped and shifted a little at random."""
        g = self.rng
        pick = torch.randint(len(self.icons), (size,), generator=g)
        share = round(size * self.demo_share)
        pick[:share] = self.demo[torch.randint(len(self.demo), (share,), generator=g)]
        icon = self.icons[pick].float()
        color = self.palette[torch.randint(len(self.palette), (size,), generator=g)]
        anywhere = torch.rand(size, generator=g) < 0.15
        color[anywhere] = torch.rand(int(anywhere.sum()), 3, generator=g) * 255
        alpha = icon[..., 3:] / 255
        x = icon[..., :3] * alpha + color[:, None, None] * (1 - alpha)
        x = (x / 127.5 - 1).permute(0, 3, 1, 2)
        if torch.rand((), generator=g) < 0.5:
            x = x.flip(3)
        dy, dx = (int(v) for v in torch.randint(-2, 3, (2,), generator=g))
        x = F.pad(x, (2, 2, 2, 2), mode="replicate")[:, :, 2 + dy : 66 + dy, 2 + dx : 66 + dx]
        return x.contiguous(memory_format=torch.channels_last)


def gradients(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Horizontal and vertical differences."""
    return x[..., 1:] - x[..., :-1], x[..., 1:, :] - x[..., :-1, :]


def loss_of(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """L1 + MSE + gradient L1, with a weak pull that keeps the latents about unit sized."""
    (xh, xv), (yh, yv) = gradients(x), gradients(y)
    edges = (yh - xh).abs().mean() + (yv - xv).abs().mean()
    size = (z.pow(2).mean() - 1).relu() + F.relu(z.abs() - 3).mean()
    return (y - x).abs().mean() + 2 * F.mse_loss(y, x) + 0.5 * edges + 1e-3 * size


def main() -> None:
    """Train for a time budget and write a diffusers VAE folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/vae"))
    parser.add_argument("--seconds", type=float, default=660, help="training time budget")
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--demo-share", type=float, default=0.5, help="share of the demo's own concepts in a batch")
    parser.add_argument("--init", type=Path, help="continue from this VAE folder")
    parser.add_argument("--freeze-encoder", action="store_true", help="improve the decoder alone: the latents stay")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16 (faster on CPUs that have it)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    vae = AutoencoderTiny.from_pretrained(args.init) if args.init else make_vae(args.width)
    vae.to(memory_format=torch.channels_last)
    if args.freeze_encoder:
        vae.encoder.requires_grad_(False)
    parameters = [p for p in vae.parameters() if p.requires_grad]
    ema = [p.detach().clone() for p in parameters]
    optimizer = torch.optim.AdamW(parameters, args.lr, betas=(0.9, 0.99), weight_decay=0.0)
    pictures = Pictures(0, args.demo_share)
    print(f"{sum(p.numel() for p in parameters) / 1e6:.3f} M parameters", flush=True)
    start, step, running = time.time(), 0, 0.0
    while (done := (time.time() - start) / args.seconds) < 1:
        lr = args.lr * min(1, (step + 1) / 50) * (1 if done < 0.6 else max(0.02, (1 - done) / 0.4))
        for group in optimizer.param_groups:
            group["lr"] = lr
        x = pictures.batch(args.batch)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            z = vae.encoder(x)
            y = vae.decoder(z + 0.05 * torch.randn_like(z))
        y, z = y.float(), z.float()
        loss = loss_of(x, y, z)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        decay = min(0.995, step / (step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(ema, [p.detach() for p in parameters], 1 - decay)
            mse = F.mse_loss(y, x).item()
        running = 0.98 * running + 0.02 * mse if running else mse
        if step % 100 == 0:
            seconds = time.time() - start
            psnr = 10 * math.log10(4 / running)
            print(f"{step} {seconds:.0f}s loss {loss.item():.4f} psnr {psnr:.2f} lr {lr:.5f}", flush=True)
    with torch.no_grad():
        torch._foreach_copy_(parameters, ema)
        x = torch.cat([Pictures(k, 0.5).batch(64) for k in range(1, 5)])
        z = vae.encoder(x)
        y = vae.decoder(z).clamp(-1, 1)
        psnr = (10 * torch.log10(4 / (y - x).pow(2).mean((1, 2, 3)))).mean().item()
    if not args.freeze_encoder:
        vae.register_to_config(scaling_factor=1 / z.std().item(), shift_factor=z.mean().item())
    vae.to(memory_format=torch.contiguous_format).save_pretrained(args.out)
    report = {"steps": step, "seconds": round(time.time() - start), "psnr": round(psnr, 2), "batch": args.batch}
    (args.out / "training.json").write_text(json.dumps(report) + "\n", encoding="utf-8")
    print(report)


if __name__ == "__main__":
    main()
