from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from omniloom.platform import detect
from omniloom.platform.devices import _cuda, _mps, _xpu


def test_this_machine_is_plain_json() -> None:
    found = detect()
    data = json.loads(json.dumps(found.to_dict()))
    assert data["devices"] is None
    assert data["libraries"]["torch"] == found.libraries["torch"]
    assert data["cpu"]["threads"] >= 1
    assert data["memory"]["usable"] > 0


def test_devices_are_a_list_when_asked() -> None:
    assert isinstance(detect(devices=True).to_dict()["devices"], list)


def test_without_devices_torch_stays_out() -> None:
    code = "import sys, omniloom.platform as p; p.detect(); p.recommended_dtype('cpu'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def fake_torch(hip: str | None = None, **cuda: object) -> SimpleNamespace:
    facts = SimpleNamespace(name="H200", major=9, minor=0, total_memory=150, gcnArchName="gfx942:sramecc+")
    calls = {"is_available": lambda: True, "device_count": lambda: 1, "get_device_properties": lambda i: facts}
    return SimpleNamespace(
        cuda=SimpleNamespace(**{**calls, "mem_get_info": lambda i: (100, 150), **cuda}),
        xpu=SimpleNamespace(**{**calls, "mem_get_info": lambda i: (_ for _ in ()).throw(RuntimeError("no"))}),
        version=SimpleNamespace(hip=hip),
        backends=SimpleNamespace(mps=SimpleNamespace(is_available=lambda: True)),
        mps=SimpleNamespace(recommended_max_memory=lambda: 100, driver_allocated_memory=lambda: 30),
    )


def test_cuda() -> None:
    [found] = _cuda(fake_torch())
    assert (found.id, found.backend, found.capability, found.free_bytes) == ("cuda:0", "cuda", "sm_90", 100)
    assert found.bf16 and found.fp8


def test_rocm() -> None:
    [found] = _cuda(fake_torch(hip="6.4"))
    assert (found.id, found.backend, found.capability) == ("cuda:0", "rocm", "gfx942")


def test_xpu_that_will_not_say_its_memory() -> None:
    [found] = _xpu(fake_torch())
    assert (found.id, found.free_bytes, found.bf16) == ("xpu:0", None, True)


def test_mps() -> None:
    [found] = _mps(fake_torch())
    assert (found.id, found.total_bytes, found.free_bytes) == ("mps", 100, 70)


@pytest.mark.gpu
def test_real_cuda() -> None:
    import torch

    found = detect(devices=True).devices
    assert found and found[0].id == "cuda:0"
    assert found[0].total_bytes == torch.cuda.get_device_properties(0).total_memory
