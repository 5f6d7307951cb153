"""Linear layers: milliseconds of a call, dense against every quantization, ours and others', in the same run.

    python benchmarks/linear.py [--rows 1 64 512 2048] [--threads 1] [--turns 7] [--json linear.json] [--quick]

Contestants take turns, so what else the machine does hits all alike; the median of each counts. Others take part where
they can be imported: torchao, optimum-quanto, bitsandbytes, diffusers' GGUF layers, OpenVINO. Bytes are of the weights.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from omniloom.quantization.codecs import get_codec
from omniloom.quantization.linear import QuantizedLinear
from omniloom.quantization.scheme import Activation, LayerScheme

SHAPES = [(3072, 3072), (12288, 3072)]  # (out_features, in_features)
Contestant = tuple[str, Callable[[torch.Tensor], Any], int, torch.dtype]


def schemes() -> dict[str, LayerScheme]:
    """What we measure of ours."""
    int8, mxfp8, mxfp4 = get_codec("int8_channel"), get_codec("mxfp8"), get_codec("mxfp4")
    return {
        "int8 W8A8": LayerScheme(int8, Activation(int8)),
        "int8 weights": LayerScheme(int8),
        "fp8 weights": LayerScheme(get_codec("fp8_channel")),
        "nf4 weights": LayerScheme(get_codec("bnb4")),
        "int4 weights": LayerScheme(get_codec("int4_group", group_size=128)),
        "mxfp8": LayerScheme(mxfp8, Activation(mxfp8)),
        "mxfp4": LayerScheme(mxfp4, Activation(mxfp4)),
    }


def ours(linear: nn.Linear) -> Iterator[Contestant]:
    yield "dense fp32", linear, linear.weight.nbytes, torch.float32
    half = nn.Linear(linear.in_features, linear.out_features, dtype=torch.bfloat16)
    half.load_state_dict(linear.state_dict())
    yield "dense bf16", half, half.weight.nbytes, torch.bfloat16
    for name, scheme in schemes().items():
        layer = QuantizedLinear.from_dense(linear, scheme)
        kernel = layer.prepare_kernel()
        yield f"omniloom {name} ({kernel})", layer, layer.nbytes(), torch.float32


def copied(linear: nn.Linear) -> nn.Sequential:
    twin = nn.Linear(linear.in_features, linear.out_features)
    twin.load_state_dict(linear.state_dict())
    return nn.Sequential(twin)


def torchao(linear: nn.Linear) -> Iterator[Contestant]:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_

    for name, config in (
        ("weights", Int8WeightOnlyConfig()),
        ("dynamic", Int8DynamicActivationInt8WeightConfig()),
    ):
        model = copied(linear)
        quantize_(model, config)
        yield f"torchao int8 {name}", model, linear.weight.numel(), torch.float32


def quanto(linear: nn.Linear) -> Iterator[Contestant]:
    from optimum.quanto import freeze, qint8, quantize

    model = copied(linear)
    quantize(model, weights=qint8)
    freeze(model)
    yield "optimum-quanto int8 weights", model, linear.weight.numel(), torch.float32


def bitsandbytes(linear: nn.Linear) -> Iterator[Contestant]:
    import bitsandbytes as bnb

    layer = bnb.nn.Linear4bit(linear.in_features, linear.out_features, quant_type="nf4", compute_dtype=torch.float32)
    layer.load_state_dict(linear.state_dict())
    layer.to("cpu")
    yield "bitsandbytes nf4", layer, linear.weight.numel() // 2, torch.float32


def gguf(linear: nn.Linear) -> Iterator[Contestant]:
    import gguf as files
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

    for name in ("Q8_0", "Q4_0"):
        kind = getattr(files.GGMLQuantizationType, name)
        packed = torch.from_numpy(files.quants.quantize(linear.weight.numpy(), kind))
        layer = GGUFLinear(linear.in_features, linear.out_features, True, compute_dtype=torch.float32)
        layer.weight = GGUFParameter(packed, quant_type=kind)
        layer.bias = linear.bias
        yield f"diffusers GGUF {name}", layer, packed.nbytes, torch.float32


def openvino(linear: nn.Linear) -> Iterator[Contestant]:
    import openvino as ov

    config = {"INFERENCE_NUM_THREADS": torch.get_num_threads()}
    example = torch.zeros(8, linear.in_features)
    model = ov.convert_model(linear, example_input=example, input=[(-1, linear.in_features)])
    compiled = ov.compile_model(model, "CPU", config)
    yield "OpenVINO fp32", lambda x: compiled(x.numpy()), linear.weight.nbytes, torch.float32
    import nncf

    compiled8 = ov.compile_model(nncf.compress_weights(model), "CPU", config)
    yield "OpenVINO int8 weights", lambda x: compiled8(x.numpy()), linear.weight.numel(), torch.float32


def contestants(linear: nn.Linear) -> list[Contestant]:
    found = list(ours(linear))
    for source in (torchao, quanto, bitsandbytes, gguf, openvino):
        try:
            for contestant in source(linear):
                found.append(contestant)
        except Exception as error:  # an absent or broken neighbour is a line, not the end
            print(f"without {source.__name__}: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
    return found


def measure(shape: tuple[int, int], rows: list[int], turns: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    linear = nn.Linear(shape[1], shape[0]).requires_grad_(False)
    running = contestants(linear)
    results = []
    for count in rows:
        x = torch.randn(count, shape[1])
        inputs = {torch.float32: x, torch.bfloat16: x.bfloat16()}
        exact = linear(x)
        times: dict[str, list[float]] = {name: [] for name, *_ in running}
        errors: dict[str, float] = {}
        for turn in range(turns + 1):
            for name, call, _, dtype in running:
                begin = time.perf_counter()
                y = call(inputs[dtype])
                took = time.perf_counter() - begin
                if turn:
                    times[name].append(took)
                elif isinstance(y, torch.Tensor):
                    errors[name] = float((y.float() - exact).norm() / exact.norm())
        dense = statistics.median(times["dense fp32"])
        for name, _, size, _ in running:
            median = statistics.median(times[name])
            results.append(
                {
                    "shape": list(shape),
                    "rows": count,
                    "name": name,
                    "ms": round(median * 1e3, 3),
                    "speedup": round(dense / median, 2),
                    "bytes": size,
                    "error": errors.get(name),
                }
            )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 512, 2048])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--json", help="write the results here")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to see that it runs")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shapes = [(256, 256)] if options.quick else SHAPES
    rows = [1, 16] if options.quick else options.rows
    results: list[dict[str, Any]] = []
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for shape in shapes:
            found = measure(shape, rows, 2 if options.quick else options.turns)
            results += found
            for count in rows:
                print(f"\n{shape[1]} -> {shape[0]}, {count} rows, {options.threads} threads")
                print(f"{'':44}{'ms':>10}{'x fp32':>9}{'MB':>9}{'error':>9}")
                for line in [line for line in found if line["rows"] == count]:
                    shown = "" if line["error"] is None else f"{line['error']:.4f}"
                    size = f"{line['bytes'] / 1e6:.2f}"
                    print(f"{line['name']:44}{line['ms']:>10.2f}{line['speedup']:>9.2f}{size:>9}{shown:>9}")
    if options.json:
        about = {"python": platform.python_version(), "torch": torch.__version__, "threads": options.threads}
        with open(options.json, "w") as file:
            json.dump({**about, "cpu": torch.backends.cpu.get_cpu_capability(), "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
