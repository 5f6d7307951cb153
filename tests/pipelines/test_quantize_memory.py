"""Quantizing while loading never holds the dense model: measured in a child process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CHILD = """
import json, sys, threading, time
import torch
from pathlib import Path
import omniloom.pipelines.quantizing, omniloom.quantization.prepared
from diffusers import FluxTransformer2DModel
from omniloom.pipelines.components import ComponentSpec, make_component
from omniloom.pipelines.quantizing import plan_quantization, quantization_report
from omniloom.quantization import build_quant_config

def rss():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmRSS"))

config = build_quant_config({"method": sys.argv[2], "all_layers": True})
spec = ComponentSpec("transformer", "diffusers", "FluxTransformer2DModel", Path(sys.argv[1]))
def plan(model, tensors, source, where):
    return plan_quantization(model, tensors, source, config, component="transformer", where=where, given="test")
torch.nn.Linear(64, 64)(torch.zeros(8, 64))
before = peak = rss()
done = False
def watch():
    global peak
    while not done:
        peak = max(peak, rss())
        time.sleep(0.001)
thread = threading.Thread(target=watch)
thread.start()
part = make_component(spec, dtype=torch.float32, quantizer=plan)
part.fill()
done = True
thread.join()
peak = max(peak, rss())
model = part.value
size = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
size += sum(m.prepared.nbytes for m in model.modules() if getattr(m, "prepared", None) is not None)
print(json.dumps({"peak": peak - before, "bytes": size, "before": part.quantization.bytes_before}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A FLUX transformer of about 200 MB in bfloat16, in four shards."""
    from diffusers import FluxTransformer2DModel

    path = tmp_path_factory.mktemp("large")
    with torch.device("meta"):
        model = FluxTransformer2DModel(
            in_channels=32,
            num_layers=1,
            num_single_layers=6,
            attention_head_dim=64,
            num_attention_heads=16,
            joint_attention_dim=256,
            pooled_projection_dim=64,
            axes_dims_rope=(16, 24, 24),
        )
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.copy_(torch.empty(parameter.shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator))
    model.save_pretrained(path, max_shard_size="60MB")
    assert len(list(path.glob("*.safetensors"))) >= 4
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("method", ["fp8", "int8", "bitsandbytes"])
def test_the_peak_is_the_result_and_two_dense_tensors(folder: Path, method: str) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD, str(folder), method], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    largest = 2 * (12 * 1024 * 1024 * 2)  # the double block's modulation in bfloat16
    slack = 40e6  # the issue allows 100 MB; less shows more
    assert found["bytes"] < 0.3 * found["before"]
    assert found["peak"] <= found["bytes"] + largest + slack, found
    assert found["peak"] >= 0.9 * found["bytes"]
