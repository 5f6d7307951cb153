"""Turn a training checkpoint into the stock diffusers folder ``demo/model`` (replaced file by file)."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from captions import DEMO, MAX_LENGTH, SIZE
from diffusers import AutoencoderTiny, FlowMatchEulerDiscreteScheduler, FluxPipeline
from networks import Models, make_models
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

DEFAULTS = {
    "num_inference_steps": 20,
    "guidance_scale": 0.0,
    "true_cfg_scale": 3.0,
    "negative_prompt": "",
    "max_sequence_length": MAX_LENGTH,
    "height": SIZE,
    "width": SIZE,
}


def load_checkpoint(run: Path, vocab_size: int, weights: str) -> tuple[Models, dict]:
    """The networks with the weights ("ema" or "weights") of a run's checkpoint, and its counters."""
    state = torch.load(run / "checkpoint.pt", weights_only=True, mmap=True)
    arch = json.loads((run / "arch.json").read_text(encoding="utf-8"))
    models = make_models(vocab_size, arch["double"], arch["single"])
    with torch.no_grad():
        torch._foreach_copy_(models.parameters(), list(state[weights]))
    return models, {k: state[k] for k in ("step", "elapsed", "loss")}


def store_as_bf16(folder: Path) -> None:
    """Round the stored tensors to bfloat16; the configs go on saying float32, which is what they are computed in."""
    for path in folder.rglob("*.safetensors"):
        tensors = {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})


def tidy(folder: Path) -> None:
    """Drop local paths from the configs and name the tokenizer class that every transformers release knows."""
    for path in (folder / "model_index.json", *folder.glob("*/*config.json")):
        config = json.loads(path.read_text(encoding="utf-8"))
        config.pop("_name_or_path", None)
        if config.get("_class_name") == "AutoencoderTiny":
            config.pop("block_out_channels", None)  # derived on loading; stored, it only causes a warning
        if "tokenizer_class" in config:
            config["tokenizer_class"] = "PreTrainedTokenizerFast"
        for name in ("tokenizer", "tokenizer_2"):
            if name in config:
                config[name] = ["transformers", "PreTrainedTokenizerFast"]
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def swap(new: Path, old: Path) -> None:
    """Move every file of ``new`` over its counterpart in ``old`` and remove what ``new`` does not have."""
    files = {p.relative_to(new) for p in new.rglob("*") if p.is_file()}
    for name in sorted(files):
        (old / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(new / name, old / name)
    for path in [p for p in old.rglob("*") if p.is_file() and p.relative_to(old) not in files]:
        path.unlink()


def main() -> None:
    """Write the model folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vae", type=Path, default=Path("runs/vae"))
    parser.add_argument("--run", type=Path, default=Path("runs/transformer"), help="folder written by train.py")
    parser.add_argument("--out", type=Path, default=DEMO / "model")
    parser.add_argument("--weights", choices=("ema", "weights"), default="ema")
    parser.add_argument("--fp32", action="store_true", help="store float32 instead of bfloat16")
    args = parser.parse_args()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.run / "tokenizer")
    models, counters = load_checkpoint(args.run, len(tokenizer), args.weights)
    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=1.0),
        vae=AutoencoderTiny.from_pretrained(args.vae),
        text_encoder=models.clip,
        tokenizer=tokenizer,
        text_encoder_2=models.t5,
        tokenizer_2=tokenizer,
        transformer=models.transformer,
    )
    args.out.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=args.out.resolve().parent, prefix=".export-"))
    try:
        pipe.save_pretrained(temporary)
        if not args.fp32:
            store_as_bf16(temporary)
        tidy(temporary)
        text = json.dumps({"name": "demo", "defaults": DEFAULTS}, indent=2) + "\n"
        (temporary / "omniloom.json").write_text(text, encoding="utf-8")
        for path in temporary.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        swap(temporary, args.out)
    finally:
        shutil.rmtree(temporary)
    size = sum(p.stat().st_size for p in args.out.rglob("*") if p.is_file())
    print(f"{args.out}: {size / 1e6:.2f} MB, {counters}")


if __name__ == "__main__":
    main()
