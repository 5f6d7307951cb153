"""Peak memory and time of quantizing while loading, each method in a child process of its own.

    python benchmarks/quantize.py [--gigabytes 1.6] [--methods fp8,int8] [--json FILE]

Builds a sharded FLUX-layout pipeline of random float32 weights. Measured in the child: the peak resident set over the
one before loading (libraries imported already), up to the end of loading, beside the bound that is promised: the bytes
of all components as loaded (codes, scales, prepared operands, dense rest) + the two largest dense tensors + 100 MB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from load import WATCH, build  # type: ignore[import-not-found]  # the script beside this one

CHILD = (
    """
import json, sys, threading, time, warnings
warnings.filterwarnings("ignore")
import diffusers, torch, transformers
from diffusers import FluxPipeline
from transformers import CLIPTextModel, T5EncoderModel
from omniloom import Omni
import omniloom.pipelines.quantizing, omniloom.quantization.prepared
diffusers.utils.logging.set_verbosity_error()
folder, method = sys.argv[1:3]
torch.nn.Linear(64, 64)(torch.zeros(8, 64))  # the math library's own first-use memory
"""
    + WATCH
    + """
omni = Omni(folder, dtype="float32", quantization_config=method)
seconds = time.perf_counter() - start
stop = True; thread.join()
peak = max(peak, status("VmRSS"))
parts = omni.report.to_dict()["components"]
transformer = parts["transformer"]
print(json.dumps({"peak": peak - before, "seconds": seconds, "after": sum(p["bytes"] for p in parts.values()),
                  "transformer_before": transformer.get("bytes_before", transformer["bytes"]),
                  "transformer_after": transformer["bytes"], "kernels": transformer.get("kernels", {})}))
"""
)
METHODS = ("none", "fp8", "int8", "bitsandbytes", "mxfp8", "mxfp4", "mxfp4_dualscale")
SLACK = 100e6


def largest_two(folder: Path) -> int:
    """Return the bytes of the two largest tensors in the transformer's files."""
    from omniloom.checkpoint import find_weights

    return sum(sorted(info.nbytes for info in find_weights(folder / "transformer").tensors.values())[-2:])


def main() -> None:
    """Build, measure, print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.6, help="float32 bytes of the transformer")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    rows = []
    print(
        f"{'method':>16} {'before':>9} {'after':>9} {'peak':>9} {'bound':>9} {'peak/bound':>10} {'seconds':>8}  kernels"
    )
    with tempfile.TemporaryDirectory() as scratch:
        build(Path(scratch), args.gigabytes, "float32")
        largest = largest_two(Path(scratch))
        for method in args.methods.split(","):
            run = subprocess.run([sys.executable, "-c", CHILD, scratch, method], capture_output=True, text=True)
            if run.returncode:
                raise SystemExit(run.stderr)
            row = {"method": method, **json.loads(run.stdout.splitlines()[-1])}
            row["bound"] = row["after"] + largest + SLACK
            rows.append(row)
            print(
                f"{method:>16} {row['transformer_before'] / 1e6:>6.0f} MB {row['transformer_after'] / 1e6:>6.0f} MB"
                f" {row['peak'] / 1e6:>6.0f} MB {row['bound'] / 1e6:>6.0f} MB {row['peak'] / row['bound']:>10.2f}"
                f" {row['seconds']:>8.1f}  {', '.join(row['kernels'])}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
