from __future__ import annotations

import pytest

from omniloom.errors import ConfigError
from omniloom.platform import Cpu, Device, choose_device, choose_dtype, recommended_dtype
from omniloom.platform.devices import cuda_precision, rocm_precision


def cpu(*features: str) -> Cpu:
    return Cpu("x", "x86_64", 4, 2, 4, None, features)


def device(name: str, backend: str, bf16: bool = True, capability: str | None = None) -> Device:
    return Device(name, backend, "Some GPU", capability, 2**34, 2**33, bf16, False)


CUDA = device("cuda:0", "cuda")
TURING = device("cuda:1", "cuda", bf16=False, capability="sm_75")
ROCM = device("cuda:0", "rocm")
XPU = device("xpu:0", "xpu")
MPS = device("mps", "mps", bf16=False)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ([], "cpu"),
        ([MPS], "mps"),
        ([MPS, XPU], "xpu"),
        ([XPU, ROCM], "cuda"),
        ([XPU, CUDA, MPS], "cuda"),
    ],
)
def test_best_kind_of_device(devices: list[Device], expected: str) -> None:
    choice = choose_device(devices)
    assert choice.value == expected
    assert choice.reason and "\n" not in choice.reason


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ((), "float32"),
        (("avx2", "avx512f", "avx512_vnni"), "float32"),
        (("avx512_bf16",), "bfloat16"),
        (("amx_bf16",), "bfloat16"),
        (("neon", "bf16"), "bfloat16"),
        (("neon",), "float32"),
    ],
)
def test_dtype_on_cpu(features: tuple[str, ...], expected: str) -> None:
    choice = choose_dtype("cpu", cpu=cpu(*features))
    assert choice.value == expected
    assert "bfloat16" in choice.reason


@pytest.mark.parametrize(
    ("name", "expected"),
    [("cuda", "bfloat16"), ("cuda:0", "bfloat16"), ("cuda:1", "float16"), ("xpu", "bfloat16"), ("mps", "float32")],
)
def test_dtype_on_accelerators(name: str, expected: str) -> None:
    assert choose_dtype(name, devices=[CUDA, TURING, XPU, MPS]).value == expected


def test_reason_names_the_generation() -> None:
    assert "sm_75" in choose_dtype("cuda:1", devices=[CUDA, TURING]).reason


@pytest.mark.parametrize("name", ["cuda:7", "tpu", "", "mps:1"])
def test_absent_device_says_what_is_there(name: str) -> None:
    with pytest.raises(ConfigError, match=r"torch finds: cpu, cuda:0\)"):
        choose_dtype(name, devices=[CUDA])


def test_this_machine() -> None:
    assert recommended_dtype("cpu") in ("float32", "bfloat16")


def test_generations() -> None:
    assert cuda_precision(7, 5) == (False, False)
    assert cuda_precision(8, 0) == (True, False)
    assert cuda_precision(8, 9) == (True, True)
    assert cuda_precision(12, 0) == (True, True)
    assert rocm_precision("gfx942:sramecc+:xnack-") == (True, True)
    assert rocm_precision("gfx1030") == (False, False)
    assert rocm_precision("gfx1100") == (True, False)
