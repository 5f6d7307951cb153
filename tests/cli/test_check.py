from __future__ import annotations

import json

import pytest

from omniloom.cli import check
from omniloom.platform import Cpu, Device, Memory, Platform
from tests.cli.conftest import Cli


def machine(*devices: Device) -> Platform:
    cpu = Cpu("Some CPU", "x86_64", 8, 4, 2, 1.5, ("avx2", "fma"))
    memory = Memory(2**35, 2**34, 2**33, 2**32)
    return Platform("Linux", "CPython 3.11", {"torch": "2.13.0"}, cpu, memory, devices)


def test_this_machine(cli: Cli) -> None:
    result = cli("check")
    assert (result.code, result.err) == (0, "")
    assert "This machine" in result.out and "What omniloom uses" in result.out
    assert all(line == line.rstrip() for line in result.out.splitlines())


def test_json(cli: Cli) -> None:
    data = json.loads(cli("check", "--json").out)
    assert data["choices"]["dtype"]["value"] in ("float32", "bfloat16", "float16")
    assert data["choices"]["device"]["reason"]
    assert isinstance(data["devices"], list)


def test_a_limited_container(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omniloom.platform.detect", lambda devices: machine())
    out = cli("check").out
    assert "Some CPU, 4 cores, 8 logical, 2 usable, quota 1.5 CPUs" in out
    assert "32.0 GiB, limited to 8.0 GiB, 4.0 GiB usable now" in out
    assert "float32: the CPU only emulates bfloat16" in out
    assert "no accelerator" in out


def test_a_gpu(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Device("cuda:0", "cuda", "NVIDIA H200", "sm_90", 2**37, 2**36, True, True)
    monkeypatch.setattr("omniloom.platform.detect", lambda devices: machine(gpu))
    out = cli("check").out
    assert "NVIDIA H200 (sm_90), cuda, 64.0 GiB of 128.0 GiB free, native: bfloat16, float8" in out
    assert "cuda: NVIDIA H200 is there" in out
    assert "bfloat16: NVIDIA H200 multiplies bfloat16 in hardware" in out


def test_without_pyav_it_says_how_to_get_it(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omniloom.cli.target.can_write_mp4", lambda: False)
    assert "pip install 'omniloom[video]'" in cli("check").out
    assert check.check.__doc__
