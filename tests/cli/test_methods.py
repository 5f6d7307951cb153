"""``omniloom methods``, the methods in ``omniloom check``, and what ``omniloom inspect`` says of quantized files."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from omniloom.checkpoint import TensorInfo
from omniloom.errors import ModelError
from omniloom.pipelines.demo import demo_folder
from omniloom.platform import Cpu, Device, Memory, Platform
from omniloom.quantization.catalog import ONLINE, PLANNED, known_devices, machine_devices, method_matrix
from omniloom.quantization.codecs import get_codec
from omniloom.quantization.headers import stored_quantization
from omniloom.quantization.layouts import native
from omniloom.quantization.layouts.names import SUFFIXES, stored_name
from omniloom.quantization.methods import online_methods
from omniloom.quantization.methods.base import _METHODS
from tests.cli.conftest import Cli
from tests.pipelines.test_inspect import component

STATUSES = {"native", "emulated", "weight-only", "unsupported"}


def machine(features: tuple[str, ...], *devices: Device) -> Platform:
    cpu = Cpu("Some CPU", "x86_64", 8, 4, 2, None, features)
    return Platform("Linux", "CPython 3.11", {"torch": "2.13.0"}, cpu, Memory(2**35, 2**34, None, None), devices)


def gpu(index: int, capability: str = "sm_90") -> Device:
    return Device(f"cuda:{index}", "cuda", "A GPU", capability, 2**37, 2**36, True, True)


def cells(platform: Platform, device: str) -> dict[str, tuple[str, str | None]]:
    rows = method_matrix(machine_devices(platform))
    return {row.method.label: (row.cells[device].status, row.cells[device].kernel) for row in rows}


def test_every_method_is_in_the_catalog() -> None:
    assert {entry.method for entry in ONLINE} == set(online_methods())
    assert set(PLANNED) == {cls.method for cls in _METHODS.values()} - set(online_methods())
    assert len({entry.label for entry in ONLINE}) == len(ONLINE)


def test_the_catalog_needs_no_torch() -> None:
    code = "import sys, omniloom.quantization.catalog, omniloom.quantization.headers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_it_depends_on_the_machine() -> None:
    plain, wide = machine(("avx2", "fma")), machine(("avx2", "avx512_vnni"), gpu(0), gpu(1), gpu(2, "sm_80"))
    assert list(machine_devices(wide)) == ["cpu", "cuda:0", "cuda:2"]  # one of a kind
    assert cells(plain, "cpu")["int8"][1] != "cpu_int_mm"
    assert cells(wide, "cpu")["int8"] == ("native", "cpu_int_mm")
    assert cells(wide, "cuda:0")["fp8"] == ("native", "cuda_fp8")
    assert cells(wide, "cuda:2")["fp8"] == ("weight-only", "reference")
    assert cells(wide, "cuda:0")["mxfp8"][0] == "emulated"


def test_every_cell_that_is_not_native_says_why() -> None:
    for row in method_matrix(known_devices()):
        for cell in row.cells.values():
            assert cell.status in STATUSES
            assert cell.status == "native" or cell.reason


def test_table(cli: Cli) -> None:
    result = cli("methods")
    assert (result.code, result.err) == (0, "")
    assert all(entry.label in result.out for entry in ONLINE) and all(name in result.out for name in PLANNED)
    everywhere = cli("methods", "--all").out
    assert all(name in everywhere for name in known_devices())


def test_json_and_markdown(cli: Cli) -> None:
    data = json.loads(cli("methods", "--json").out)
    assert set(data["planned"]) == set(PLANNED)
    rows = {row["method"]: row for row in data["methods"] if not row["options"]}
    assert rows["int8"]["devices"]["cpu"].keys() == {"status", "kernel", "reason"}
    assert (rows["mxfp4"]["codec"], rows["mxfp4"]["bits_per_weight"]) == ("mxfp4", 4.25)
    assert cli("methods", "--markdown").out.startswith("| method | bits per weight | cpu |")


def test_check_tells_what_they_run_with_here(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omniloom.platform.detect", lambda devices: machine(("avx2", "avx512_vnni"), gpu(0)))
    out = cli("check").out
    assert "Quantization methods on cuda:0" in out and "native (cuda_int8)" in out
    data = json.loads(cli("check", "--json").out)
    assert data["methods"]["int8"]["cpu"]["kernel"] == "cpu_int_mm"
    assert data["methods"]["fp8"]["cuda:0"]["status"] == "native"
    assert data["choices"]["device"]["value"].startswith("cuda")  # what was there before is there still


@pytest.mark.parametrize(
    ("config", "codec"),
    [
        ({"method": "fp8"}, "fp8_channel"),
        ({"method": "fp8", "weight_granularity": "tensor"}, "fp8_tensor"),
        ({"method": "fp8", "weight_granularity": "block"}, "fp8_block"),
        ({"method": "int8"}, "int8_channel"),
        ({"method": "bitsandbytes"}, "bnb4 nf4"),
        ({"method": "bitsandbytes", "quant_type": "fp4", "compress_statistics": False}, "bnb4 fp4"),
        ({"method": "bitsandbytes", "load_in_8bit": True}, "int8_rowmax"),
        ({"method": "mxfp8"}, "mxfp8"),
        ({"method": "mxfp4"}, "mxfp4"),
        ({"method": "mxfp4_dualscale", "num_bf16_fallback_layers": 1}, "mxfp4_dual"),
    ],
    ids=str,
)
def test_inspect_counts_what_quantize_wrote(cli: Cli, tmp_path: Path, config: dict[str, object], codec: str) -> None:
    try:
        demo_folder()
    except ModelError:
        pytest.skip("this checkout has no demo model")
    words = ("quantize", "demo", "--quantization-config", json.dumps(config), "-o", tmp_path / "m", "--json", "-q")
    written = json.loads(cli(*words).out)["components"]["transformer"]
    part = json.loads(cli("inspect", tmp_path / "m", "--json").out)["components"]["transformer"]
    stored = part["stored_quantization"]
    count = len(written["quantized_layers"])
    assert (stored["method"], stored["layers"], stored["codecs"]) == (config["method"], count, {codec: count})
    dense = part["bytes"] - stored["bytes"]
    assert part["bytes"] == written["bytes_after"] and 0 < dense < written["bytes_before"]
    line = f"transformer: {config['method']}, {count} quantized layers ({count} x {codec})"
    assert line in cli("inspect", tmp_path / "m").out


@pytest.mark.parametrize("name", SUFFIXES)
@pytest.mark.parametrize("experts", [None, 3])
def test_inspect_knows_every_name_that_is_written(name: str, experts: int | None) -> None:
    codes = {torch.float8_e4m3fn: "F8_E4M3", torch.uint8: "U8", torch.int8: "I8", torch.float32: "F32"}
    tensors = {}
    for suffix, (dtype, shape) in native.stored_specs(get_codec(name), (96, 64), experts).items():
        stored = stored_name("x.weight", suffix)
        tensors[stored] = TensorInfo(stored, codes[dtype], shape, Path("f"), 0, math.prod(shape) * dtype.itemsize)
    found = stored_quantization(tensors)
    assert found is not None and found.bytes == sum(info.nbytes for info in tensors.values())
    [(codec, count)] = found.codecs.items()
    assert (codec.split()[0], count) == (name, 1) or (name, experts) == ("fp8_tensor", 3)  # a scale an expert or a row


def test_inspect_of_files_of_others(cli: Cli, tmp_path: Path) -> None:
    tensors = {"a.weight": ("I8", (64, 32)), "a.weight_scale": ("F32", (64, 1)), "b.weight": ("F32", (4, 4))}
    folder = component(tmp_path / "x", tensors, _class_name="SomeModel")
    stored = json.loads(cli("inspect", folder, "--json").out)["components"]["x"]["stored_quantization"]
    assert stored == {"method": None, "layers": 1, "codecs": {"int8_channel": 1}, "bytes": 64 * 32 + 64 * 4}
    assert "x: no quantization_config, 1 quantized layers" in cli("inspect", folder).out
    tensors = {"a.weight": ("U8", (64, 16)), "a.weight_scale": ("BF16", (64, 2))}
    folder = component(tmp_path / "y", tensors, _class_name="SomeModel", quantization_config={"quant_method": "new"})
    stored = json.loads(cli("inspect", folder, "--json").out)["components"]["y"]["stored_quantization"]
    assert (stored["method"], stored["codecs"]) == ("new", {"other": 1})


def test_inspect_of_dense_files_says_nothing(cli: Cli, tmp_path: Path) -> None:
    folder = component(tmp_path / "z", {"a.weight": ("F32", (4, 4))}, _class_name="SomeModel")
    assert json.loads(cli("inspect", folder, "--json").out)["components"]["z"]["stored_quantization"] is None
    assert "quantized layers" not in cli("inspect", folder).out
