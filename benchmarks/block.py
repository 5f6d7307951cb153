"""A slice of FLUX at its real width, one double and two single blocks: dense against every quantization there is.

    python benchmarks/block.py [--width 3072] [--threads 1] [--turns 3] [--compiled] [--json block.json]

256 image and 128 text tokens. Every contestant runs in turn with the dense float32 model, in one process; seconds are
medians, and the ratio is the median of adjacent pairs. ``--compiled`` adds regionally compiled dense and int8 models.
Others take part where they can be imported: torchao, optimum-quanto, bitsandbytes, diffusers' GGUF layers, OpenVINO.
Bytes are of all weights, prepared operands included; the error is the output's relative L2 against dense float32.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

Run = Callable[[], torch.Tensor]
METHODS = ("int8", "fp8", "mxfp8", "bitsandbytes", "mxfp4")


def slice_of_flux(width: int) -> nn.Module:
    """Return the model, of random weights."""
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    return (
        FluxTransformer2DModel(
            in_channels=64,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=128,
            num_attention_heads=width // 128,
            joint_attention_dim=256,
            pooled_projection_dim=256,
        )
        .eval()
        .requires_grad_(False)
    )


def inputs(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Return one call's arguments."""
    generator = torch.Generator().manual_seed(1)
    side = torch.arange(16.0)
    ids = torch.stack(torch.meshgrid(torch.zeros(1), side, side, indexing="ij"), -1).reshape(-1, 3)
    return {
        "hidden_states": torch.randn(1, 256, 64, generator=generator).to(dtype),
        "encoder_hidden_states": torch.randn(1, 128, 256, generator=generator).to(dtype),
        "pooled_projections": torch.randn(1, 256, generator=generator).to(dtype),
        "timestep": torch.tensor([0.5], dtype=dtype),
        "img_ids": ids,
        "txt_ids": torch.zeros(128, 3),
    }


def runner(model: nn.Module, dtype: torch.dtype = torch.float32) -> Run:
    """Return a function that runs the model once."""
    given = inputs(dtype)
    return lambda: model(**given, return_dict=False)[0].float()


def weights(model: nn.Module) -> int:
    """Bytes of parameters, buffers and prepared operands."""
    own = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    return own + sum(m.prepared.nbytes for m in model.modules() if getattr(m, "prepared", None) is not None)


def ours(dense: nn.Module, compiled: bool) -> Iterator[tuple[str, Run, int]]:
    """Yield our models: name, a run, bytes."""
    from omniloom.diffusion.compile import regionally_compile
    from omniloom.quantization import quantize_
    from omniloom.quantization.linear import prepare_kernels

    half = copy.deepcopy(dense).to(torch.bfloat16)
    yield "dense bf16", runner(half, torch.bfloat16), weights(half)
    del half
    for method in METHODS:
        model = copy.deepcopy(dense)
        quantize_(model, method)
        kernels = ", ".join(prepare_kernels(model))
        yield f"omniloom {method} ({kernels})", runner(model), weights(model)
        if method == "int8" and compiled:
            regionally_compile(model, dynamic=False)
            yield f"omniloom {method} compiled", runner(model), weights(model)
        del model
    if compiled:
        model = copy.deepcopy(dense)
        regionally_compile(model, dynamic=False)
        yield "dense fp32 compiled", runner(model), weights(model)


def replaced(dense: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    """Return a copy with the Linears that we quantize replaced by ``make`` of each."""
    from omniloom.quantization import build_quant_config
    from omniloom.quantization.rules import select_layers

    config = build_quant_config("int8")
    assert config is not None
    model = copy.deepcopy(dense)
    for path in select_layers(model, config).quantized:  # type: ignore[arg-type]
        parent, _, name = path.rpartition(".")
        model.get_submodule(parent)._modules[name] = make(model.get_submodule(path))  # type: ignore[arg-type]
    return model


def torchao(dense: nn.Module) -> Iterator[tuple[str, Run, int]]:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    def make(linear: nn.Linear) -> nn.Module:
        quantize_(linear, Int8WeightOnlyConfig())
        return linear

    yield "torchao int8 weights", runner(replaced(dense, make)), 0


def quanto(dense: nn.Module) -> Iterator[tuple[str, Run, int]]:
    from optimum.quanto import QLinear, qint8

    def make(linear: nn.Linear) -> nn.Module:
        layer = QLinear.from_module(linear, weights=qint8)
        layer.freeze()
        return layer

    yield "optimum-quanto int8 weights", runner(replaced(dense, make)), 0


def bitsandbytes(dense: nn.Module) -> Iterator[tuple[str, Run, int]]:
    import bitsandbytes as bnb

    def make(linear: nn.Linear) -> nn.Module:
        layer = bnb.nn.Linear4bit(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            quant_type="nf4",
            compute_dtype=torch.float32,
        )
        layer.load_state_dict(linear.state_dict())
        return layer.to("cpu")

    yield "bitsandbytes nf4", runner(replaced(dense, make)), 0


def gguf(dense: nn.Module) -> Iterator[tuple[str, Run, int]]:
    import gguf as files
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

    for name in ("Q8_0", "Q4_0"):
        kind = getattr(files.GGMLQuantizationType, name)

        def make(linear: nn.Linear, kind: Any = kind) -> nn.Module:
            packed = torch.from_numpy(files.quants.quantize(linear.weight.numpy(), kind))
            layer = GGUFLinear(linear.in_features, linear.out_features, True, compute_dtype=torch.float32)
            layer.weight = GGUFParameter(packed, quant_type=kind)
            layer.bias = linear.bias
            return layer

        yield f"diffusers GGUF {name}", runner(replaced(dense, make)), 0


def openvino(dense: nn.Module) -> Iterator[tuple[str, Run, int]]:
    import openvino as ov

    given = inputs()

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = dense

        def forward(self, *values: torch.Tensor) -> torch.Tensor:
            return self.model(**dict(zip(given, values, strict=True)), return_dict=False)[0]

    config = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32"}
    model = ov.convert_model(Plain(), example_input=tuple(given.values()))
    compiled = ov.compile_model(model, "CPU", config)
    arrays = [value.numpy() for value in given.values()]
    yield "OpenVINO fp32", lambda: torch.from_numpy(compiled(arrays)[0]), 0


def contestants(dense: nn.Module, compiled: bool) -> Iterator[tuple[str, Run, int]]:
    yield from ours(dense, compiled)
    for source in (torchao, quanto, bitsandbytes, gguf, openvino):
        try:
            yield from source(dense)
        except Exception as error:  # an absent or broken neighbour is a line, not the end
            print(f"without {source.__name__}: {type(error).__name__}: {str(error).splitlines()[0][:100]}", flush=True)


def main() -> None:
    """Run everybody beside the dense model and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=3072)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--json", help="write the results here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = []
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dense = slice_of_flux(options.width)
        base = runner(dense)
        exact, size = base(), weights(dense)
        print(f"{'':40}{'seconds':>9}{'dense s':>9}{'x dense':>9}{'of bytes':>10}{'error':>9}", flush=True)
        for name, run, nbytes in contestants(dense, options.compiled):
            y = run()
            pairs = [(clock(base), clock(run)) for _ in range(options.turns)]
            row = {
                "name": name,
                "seconds": statistics.median(own for _, own in pairs),
                "dense": statistics.median(other for other, _ in pairs),
                "speedup": statistics.median(other / own for other, own in pairs),
                "bytes": nbytes / size if nbytes else None,
                "error": float((y - exact).norm() / exact.norm()),
            }
            results.append(row)
            share = f"{row['bytes']:.3f}" if nbytes else ""
            print(
                f"{name:40}{row['seconds']:>9.3f}{row['dense']:>9.3f}{row['speedup']:>9.2f}{share:>10}{row['error']:>9.4f}",
                flush=True,
            )
            del run, y
            gc.collect()
    if options.json:
        about = {"python": platform.python_version(), "torch": torch.__version__, "threads": options.threads}
        with open(options.json, "w") as file:
            json.dump({**about, "cpu": torch.backends.cpu.get_cpu_capability(), "results": results}, file, indent=1)


def clock(run: Run) -> float:
    """Return the seconds of one run."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
