"""Peaks of resident memory, measured in a process of its own over what each action found."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

CHILD = """
import json, sys, threading, time, torch
from omniloom.checkpoint import TensorSource, single_file

def resident():
    for line in open("/proc/self/status"):
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024

def convert(source):
    return [source.read(name, dtype=torch.float32) for name in source.names()]

def convert_many(source):
    return [tensor for _, tensor in source.load_many(source.names(), dtype_of=lambda name: torch.float32, workers=2)]

def pass_through(source):
    for _, tensor in source.load_many(source.names(), workers=2, prefer="read", in_flight=60 << 20):
        float(tensor[0])
    return []

def map_all(source):
    tensors = [source.map(name) for name in source.names()]
    assert sum(float(tensor.sum()) for tensor in tensors) > 0
    return tensors

def measure(action, path):
    peak, stop = 0, threading.Event()
    def watch():  # VmHWM cannot be reset everywhere
        nonlocal peak
        while not stop.is_set():
            peak = max(peak, resident())
            time.sleep(0.002)
    with TensorSource(single_file(path)) as source:
        before = resident()
        watcher = threading.Thread(target=watch)
        watcher.start()
        kept = action(source)
        stop.set()
        watcher.join()
        final = sum(tensor.nbytes for tensor in kept)
        figures = {"final": final, "file": source.nbytes, "rise": max(peak, resident()) - before}
    del kept
    return figures | {"left": resident() - before}

half, full = sys.argv[1:]
measure(convert, full)  # loads the code
print(json.dumps({
    "convert": measure(convert, half),
    "convert_many": measure(convert_many, half),
    "pass_through": measure(pass_through, half),
    "map_all": measure(map_all, full),
}))
"""


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    folder = tmp_path_factory.mktemp("memory")
    half, full = folder / "half.safetensors", folder / "full.safetensors"
    save_file({f"t{n}": torch.full((12_500_000,), 1.5, dtype=torch.bfloat16) for n in range(12)}, half)  # 300 MB
    save_file({f"t{n}": torch.full((6_250_000,), 1.5) for n in range(4)}, full)  # 100 MB
    result = subprocess.run(
        [sys.executable, "-c", CHILD, str(half), str(full)], check=True, stdout=subprocess.PIPE, text=True
    )
    half.unlink()
    full.unlink()
    return json.loads(result.stdout)


@pytest.mark.parametrize("action", ["convert", "convert_many"])
def test_converting_peaks_at_the_final_bytes(figures: dict[str, dict[str, int]], action: str) -> None:
    found = figures[action]
    assert found["final"] == 600_000_000
    assert found["rise"] <= 1.1 * found["final"], found


def test_passing_through_holds_only_what_is_in_flight(figures: dict[str, dict[str, int]]) -> None:
    """Two tensors of 25 MB in flight, one handed over, one still in the consumer's hand: 100 of 300 MB."""
    found = figures["pass_through"]
    assert found["rise"] <= 0.38 * found["file"], found


def test_mapping_adds_the_file_once(figures: dict[str, dict[str, int]]) -> None:
    found = figures["map_all"]
    assert 0.9 * found["file"] <= found["rise"] <= 1.05 * found["file"], found


def test_nothing_stays_behind(figures: dict[str, dict[str, int]]) -> None:
    for action, found in figures.items():
        assert found["left"] <= 0.05 * found["file"], (action, found)
