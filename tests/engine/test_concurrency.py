"""Requests that run at the same time equal their serial runs bit for bit: encoding, denoising and decoding."""

from __future__ import annotations

import numpy as np
import pytest

from omniloom import Omni, SamplingParams

TEXT = "a red fox on blue with a very long tail and much more to say about the weather in the north"
SIZES = ((32, 32), (32, 48), (48, 32), (64, 64))


def eight_requests(family: str) -> list[tuple[str, SamplingParams]]:
    """Requests that differ in seed, steps, size, prompt length and text length."""
    requests = []
    for i in range(8):
        height, width = SIZES[i % len(SIZES)]
        guided = {"true_cfg_scale": 2.0 + i} if family.startswith("flux") else {"guidance_scale": 2.0 + i}
        params = SamplingParams(
            seed=i,
            num_inference_steps=1 + i % 4,
            height=height,
            width=width,
            negative_prompt="bad " * i + "bad",
            max_sequence_length=16 + 8 * (i % 3),
            output_type="np",
            **guided,
        )
        requests.append((" ".join(TEXT.split()[: 2 + 2 * i]), params))
    return requests


def hammer(omni: Omni, requests: list[tuple[str, SamplingParams]], rounds: int) -> None:
    serial = [omni.generate(prompt, params)[0].images for prompt, params in requests]
    assert len({image.tobytes() for image in serial}) == len(requests)
    for _ in range(rounds):
        handles = [omni.submit(prompt, params) for prompt, params in requests]
        for handle, expected in zip(handles, serial, strict=True):
            output = handle.result(timeout=120)
            assert output.error is None
            assert np.array_equal(output.images, expected)


@pytest.mark.parametrize("family", ["flux", "flux-tiny-vae", "sd3"])
def test_eight_requests_on_four_workers(tiny_folder, family: str) -> None:
    with Omni(tiny_folder(family), dtype="float32", device="cpu", engine={"workers": 4}) as omni:
        assert set(c["call_state"] for c in omni.report.to_dict()["components"].values()) == {"concurrent", "copy"}
        hammer(omni, eight_requests(family), rounds=8)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["flux", "flux-tiny-vae", "sd3"])
def test_eight_requests_on_four_workers_for_fifty_rounds(tiny_folder, family: str) -> None:
    with Omni(tiny_folder(family), dtype="float32", device="cpu", engine={"workers": 4}) as omni:
        hammer(omni, eight_requests(family), rounds=50)


def test_fifty_rounds_with_the_demo_model() -> None:
    """The same with trained weights; one small step a request, so that fifty rounds stay quick."""
    prompts = ["a fox on blue", "a red heart on white", "a rocket", "a green background with a pizza"] * 2
    requests = [
        (f"{prompt}", SamplingParams(seed=i, num_inference_steps=1 + i % 2, output_type="np"))
        for i, prompt in enumerate(prompts)
    ]
    with Omni("demo", dtype="float32", device="cpu", engine={"workers": 4}) as omni:
        hammer(omni, requests, rounds=50)
