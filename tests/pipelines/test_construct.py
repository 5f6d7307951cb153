"""Construction excludes running requests, and leaves nothing of its process-wide switches behind."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from diffusers import AutoencoderTiny

from omniloom.pipelines.construct import GATE, ConstructionGate, empty_diffusers_model

CONFIG = {
    "encoder_block_out_channels": (8, 8),
    "decoder_block_out_channels": (8, 8),
    "num_encoder_blocks": (1, 1),
    "num_decoder_blocks": (1, 1),
}


def test_parameters_are_meta_and_buffers_are_not() -> None:
    model = empty_diffusers_model(AutoencoderTiny, CONFIG, torch.bfloat16)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in model.parameters())
    assert torch.get_default_dtype() == torch.float32
    assert not torch.nn.Linear(2, 2).weight.is_meta
    with pytest.raises(TypeError):
        empty_diffusers_model(AutoencoderTiny, {**CONFIG, "num_encoder_blocks": 3}, torch.float32)
    assert not torch.nn.Linear(2, 2).weight.is_meta


def test_a_running_forward_never_sees_a_foreign_dtype_or_meta_parameters() -> None:
    stop, wrong = threading.Event(), []

    def forward() -> None:
        while not stop.is_set():
            with GATE.running():
                for _ in range(20):
                    if torch.zeros(1).dtype != torch.float32 or torch.nn.Linear(2, 2).weight.is_meta:
                        wrong.append(True)

    threads = [threading.Thread(target=forward) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(30):
        empty_diffusers_model(AutoencoderTiny, CONFIG, torch.bfloat16)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


def test_gate_admits_many_readers_or_one_writer() -> None:
    gate = ConstructionGate()
    log: list[str] = []
    inside = threading.Event()
    release = threading.Event()

    def reader() -> None:
        with gate.running(), gate.running():  # nests, also while a writer waits
            inside.set()
            release.wait(10)
            with gate.running():
                log.append("read")

    def writer() -> None:
        with gate.constructing():
            log.append("write")

    first = threading.Thread(target=reader)
    first.start()
    inside.wait(10)
    second = threading.Thread(target=writer)
    second.start()
    time.sleep(0.05)
    late = threading.Thread(target=lambda: [gate.running().__enter__(), log.append("late")])
    late.start()
    time.sleep(0.05)
    assert log == []  # the writer waits for the reader, and the late reader for the writer
    release.set()
    for thread in (first, second, late):
        thread.join(10)
    assert log == ["read", "write", "late"]


def test_construction_inside_a_request_is_refused_instead_of_hanging() -> None:
    with GATE.running(), pytest.raises(RuntimeError, match="wait for itself"):
        empty_diffusers_model(AutoencoderTiny, CONFIG, torch.float32)


def test_gate_is_released_by_errors() -> None:
    gate = ConstructionGate()
    with pytest.raises(ZeroDivisionError), gate.constructing():
        1 / 0  # noqa: B018
    with pytest.raises(ZeroDivisionError), gate.running():
        1 / 0  # noqa: B018
    with gate.constructing():
        pass
