from __future__ import annotations

from pathlib import Path

import pytest

from omniloom.platform import cpu
from omniloom.platform.cpu import detect_cpu
from tests.platform import trees

EVERY = frozenset(range(4))


def test_x86_without_bf16(tmp_path: Path) -> None:
    trees.write(tmp_path, {"proc/cpuinfo": trees.cpuinfo("avx avx2 fma f16c")})
    found = detect_cpu(tmp_path, "linux", EVERY)
    assert found.name == "AMD EPYC 7763 64-Core Processor"
    assert (found.logical, found.physical, found.threads) == (4, 2, 4)
    assert found.features == ("avx", "avx2", "fma", "f16c")
    assert found.native_bf16 is None


@pytest.mark.parametrize(
    ("flags", "feature"),
    [("avx512f avx512_bf16", "avx512_bf16"), ("avx512_bf16 amx_bf16 amx_tile", "amx_bf16"), ("avx512f avx_vnni", None)],
)
def test_x86_native_bf16(tmp_path: Path, flags: str, feature: str | None) -> None:
    trees.write(tmp_path, {"proc/cpuinfo": trees.cpuinfo(flags)})
    assert detect_cpu(tmp_path, "linux", EVERY).native_bf16 == feature


def test_arm(tmp_path: Path) -> None:
    text = trees.cpuinfo("asimd asimdhp asimddp i8mm bf16 sve", template=trees.ARM)
    found = detect_cpu(trees.write(tmp_path, {"proc/cpuinfo": text}), "linux", EVERY)
    assert found.features == ("neon", "fp16", "dotprod", "bf16", "i8mm", "sve")
    assert found.native_bf16 == "bf16"
    assert found.name == "ARM implementer 0x41 part 0xd4f"
    assert found.physical == 4  # ARM's cpuinfo has no core ids


def test_affinity_and_quota(tmp_path: Path) -> None:
    trees.write(tmp_path, {"proc/cpuinfo": trees.cpuinfo("avx2")})
    assert detect_cpu(tmp_path, "linux", frozenset({2})).threads == 1
    trees.write(tmp_path, trees.v2("/a", {"a": {"cpu.max": "150000 100000\n"}}))
    found = detect_cpu(tmp_path, "linux", EVERY)
    assert (found.quota, found.threads) == (1.5, 2)


def test_nothing_known(tmp_path: Path) -> None:
    found = detect_cpu(tmp_path, "linux")
    assert found.features == () and found.name and found.logical >= 1 and found.physical >= 1 and found.threads >= 1


def test_this_machine() -> None:
    found = detect_cpu()
    assert 1 <= found.threads <= found.logical
    assert found.physical <= found.logical


def test_apple_silicon(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "machdep.cpu.brand_string": "Apple M2",
        "hw.logicalcpu": "8",
        "hw.physicalcpu": "8",
        "hw.optional.AdvSIMD": "1",
        "hw.optional.arm.FEAT_BF16": "1",
        "hw.optional.arm.FEAT_I8MM": "0",
    }
    monkeypatch.setattr(cpu, "sysctl", lambda name: values.get(name, ""))
    monkeypatch.setattr(cpu.platform, "machine", lambda: "arm64")
    found = detect_cpu(system="darwin")
    assert (found.name, found.threads, found.features) == ("Apple M2", 8, ("neon", "bf16"))


def test_intel_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"machdep.cpu.features": "FPU FMA AVX1.0 F16C", "machdep.cpu.leaf7_features": "BMI1 AVX2"}
    monkeypatch.setattr(cpu, "sysctl", lambda name: values.get(name, ""))
    monkeypatch.setattr(cpu.platform, "machine", lambda: "x86_64")
    assert detect_cpu(system="darwin").features == ("avx", "avx2", "fma", "f16c")
