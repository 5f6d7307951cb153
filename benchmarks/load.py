"""Loading: peak memory and time against diffusers, each in a child process of its own.

    python benchmarks/load.py [--gigabytes 1.6] [--rounds 3]

Builds a sharded FLUX-layout pipeline of random weights, stored as float32 and as bfloat16, and loads it at float32 (and
bfloat16) by omniloom and by plain diffusers. Measured in the child: the peak resident set over the one before loading
(libraries imported already), relative to the bytes of all weights in the compute dtype, while loading and up to the end
of the first forward (mapped weights count once they are touched); and the seconds of load plus first forward of the
transformer. A warm-up load comes first, the two sides take turns at going first; medians are printed, the ratio is the
median of the ratios of adjacent runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

# A child runs this right before what it measures: from here on ``peak`` follows the resident set, until ``stop``.
WATCH = """
import threading, time

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

before = status("VmRSS")
peak, stop = before, False
def watch():
    global peak
    while not stop:
        peak = max(peak, status("VmRSS"))
        time.sleep(0.005)
thread = threading.Thread(target=watch); thread.start()
start = time.perf_counter()
"""

CHILD = (
    """
import json, sys, threading, time, warnings
warnings.filterwarnings("ignore")
import diffusers, torch, transformers
from diffusers import FluxPipeline
from transformers import CLIPTextModel, T5EncoderModel
from omniloom.pipelines.build import build_pipeline
diffusers.utils.logging.set_verbosity_error(); diffusers.utils.logging.disable_progress_bar()
transformers.utils.logging.disable_progress_bar()
who, folder, dtype = sys.argv[1], sys.argv[2], getattr(torch, sys.argv[3])
torch.nn.Linear(64, 64)(torch.zeros(8, 64))  # the math library's own first-use memory
"""
    + WATCH
    + """
if who == "omniloom":
    from pathlib import Path
    pipe = build_pipeline(Path(folder), dtype=dtype).pipe
else:
    pipe = FluxPipeline.from_pretrained(folder, torch_dtype=dtype)
loaded = time.perf_counter() - start
load_peak = max(peak, status("VmRSS"))
model = pipe.transformer
config = model.config
with torch.no_grad():
    model(
        hidden_states=torch.ones(1, 16, config.in_channels, dtype=dtype), timestep=torch.ones(1, dtype=dtype),
        pooled_projections=torch.ones(1, config.pooled_projection_dim, dtype=dtype),
        encoder_hidden_states=torch.ones(1, 8, config.joint_attention_dim, dtype=dtype),
        txt_ids=torch.zeros(8, 3), img_ids=torch.zeros(16, 3), return_dict=False,
    )
total = time.perf_counter() - start
stop = True; thread.join()
size = sum(p.nbytes for m in pipe.components.values() if isinstance(m, torch.nn.Module) for p in m.parameters())
print(json.dumps({"before": before, "load_peak": load_peak - before, "peak": peak - before, "bytes": size,
                  "load": loaded, "total": total}))
"""
)


def build(folder: Path, gigabytes: float, dtype: str) -> None:
    """Save a FLUX-layout pipeline whose transformer has about ``gigabytes`` of float32 weights, in shards."""
    import torch
    from diffusers import AutoencoderTiny, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel

    torch.manual_seed(0)
    blocks = max(1, round(gigabytes * 1e9 / 4 / (15 * 1024 * 1024)))  # a single block has 15 width² parameters
    words = Tokenizer(WordLevel({"<unk>": 0, "</s>": 1}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>")
    clip = CLIPTextConfig(
        vocab_size=2000, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4
    )
    t5 = T5Config(vocab_size=2000, d_model=512, d_kv=64, d_ff=1024, num_layers=2, num_heads=8)
    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=AutoencoderTiny(encoder_block_out_channels=(32,) * 3, decoder_block_out_channels=(32,) * 3,
                            num_encoder_blocks=(0, 1, 1), num_decoder_blocks=(1, 1, 0), latent_channels=8),
        text_encoder=CLIPTextModel(clip),
        tokenizer=tokenizer,
        text_encoder_2=T5EncoderModel(t5),
        tokenizer_2=tokenizer,
        transformer=FluxTransformer2DModel(
            in_channels=32, num_layers=1, num_single_layers=blocks, attention_head_dim=64, num_attention_heads=16,
            joint_attention_dim=512, pooled_projection_dim=128, axes_dims_rope=(16, 24, 24),
        ),
    )  # fmt: skip
    pipe.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size="400MB")


def measure(who: str, folder: Path, dtype: str) -> dict[str, float]:
    """Run one load in a child process."""
    run = subprocess.run([sys.executable, "-c", CHILD, who, str(folder), dtype], capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(run.stderr)
    return json.loads(run.stdout.splitlines()[-1])


def main() -> None:
    """Build, measure, print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.6, help="float32 bytes of the transformer")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(
        f"{'stored':>9} {'compute':>9} {'who':>10} {'weights':>8}"
        f" {'load peak':>10} {'+forward':>9} {'load s':>7} {'+forward s':>11} {'ratio':>6}"
    )
    with tempfile.TemporaryDirectory() as scratch:
        for stored in ("float32", "bfloat16"):
            folder = Path(scratch) / stored
            build(folder, args.gigabytes, stored)
            for compute in ("float32",) if stored == "float32" else ("float32", "bfloat16"):
                runs: dict[str, list[dict[str, float]]] = {"omniloom": [], "diffusers": []}
                measure("diffusers", folder, compute)
                for turn in range(args.rounds):
                    for who in sorted(runs, reverse=bool(turn % 2)):
                        runs[who].append(measure(who, folder, compute))
                pairs = zip(runs["omniloom"], runs["diffusers"], strict=True)
                ratio = statistics.median(ours["total"] / theirs["total"] for ours, theirs in pairs)
                for who, found in runs.items():
                    middle = {key: statistics.median(run[key] for run in found) for key in found[0]}
                    print(
                        f"{stored:>9} {compute:>9} {who:>10} {middle['bytes'] / 1e9:>6.2f}GB"
                        f" {middle['load_peak'] / middle['bytes']:>10.3f} {middle['peak'] / middle['bytes']:>9.3f}"
                        f" {middle['load']:>7.2f} {middle['total']:>11.2f}"
                        f" {ratio if who == 'omniloom' else 1:>6.2f}"
                    )


if __name__ == "__main__":
    main()
