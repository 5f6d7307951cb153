"""Copies, locks and shared components of a request's clone."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from omniloom.pipelines.build import LoadedPipeline
from omniloom.pipelines.call_state import CallState, Exclusive, call_state
from omniloom.pipelines.clone import CloneFactory
from omniloom.pipelines.denoiser import CallTracker
from omniloom.pipelines.families import family_of
from tests.fixtures.reference import load


class Fragile(torch.nn.Module):
    """A module that two calls at a time break."""

    def __init__(self) -> None:
        super().__init__()
        self.busy = 0
        self.config = {"scale": 2}

    def _work(self, x: int) -> int:
        self.busy += 1
        assert self.busy == 1
        time.sleep(0.005)
        self.busy -= 1
        return x + 1

    def forward(self, x: int) -> int:
        return self._work(x)

    def decode(self, x: int) -> int:
        return self.forward(x)


def test_exclusive_lets_one_call_through_and_looks_like_its_module() -> None:
    proxy = Exclusive(Fragile(), threading.RLock())
    assert isinstance(proxy, Fragile) and isinstance(proxy, torch.nn.Module)
    assert proxy.config == {"scale": 2}
    results: list[int] = []
    threads = [
        threading.Thread(target=lambda i=i: results.append(proxy.decode(i) if i % 2 else proxy(i))) for i in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == list(range(1, 13))


def test_unknown_modules_are_exclusive_and_the_rest_is_copied(tiny_folder) -> None:
    assert call_state(Fragile()) is CallState.EXCLUSIVE
    pipe = load(tiny_folder("flux"))
    pipe.vae.__class__ = type("AutoencoderUnheardOf", (type(pipe.vae),), {})
    factory = CloneFactory(LoadedPipeline(pipe, family_of("FluxPipeline"), None, {}, {}))

    def clone() -> Any:
        return factory.clone(pipe, CallTracker("r", factory.branches), 1)

    one, two = clone(), clone()
    assert factory.states["vae"] is CallState.EXCLUSIVE
    assert one.vae is not pipe.vae and isinstance(one.vae, type(pipe.vae))
    assert vars(one.vae)["_lock"] is vars(two.vae)["_lock"]
    assert one.transformer.proj_out is two.transformer.proj_out is pipe.transformer.proj_out
    assert isinstance(one.transformer, type(pipe.transformer)) and one.transformer is not two.transformer
    assert len({id(p.scheduler) for p in (pipe, one, two)}) == 3
    assert one.tokenizer is two.tokenizer is not pipe.tokenizer  # one copy per thread
    other: list[object] = []
    thread = threading.Thread(target=lambda: other.append(clone().tokenizer))
    thread.start()
    thread.join()
    assert other[0] is not one.tokenizer
    assert not hasattr(pipe, "_omniloom_trace") and type(pipe.scheduler) is type(load(tiny_folder("flux")).scheduler)
