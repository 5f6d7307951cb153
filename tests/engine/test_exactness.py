"""The base of every comparison: eager fp32 output equals plain diffusers', bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from omniloom import Omni, SamplingParams
from tests.fixtures.reference import load, run
from tests.fixtures.registry import NEGATIVE, PROMPT
from tests.fixtures.sensitivity import relative_l2
from tests.fixtures.tiny import FAMILIES

CASES = ["flux", "flux-tiny-vae", "flux-guidance", "flux-wide", "sd3"]


def guidance(family: str, on: bool) -> dict[str, object]:
    """Arguments that switch classifier-free guidance on or off, with a negative prompt where it is on."""
    if family == "sd3":
        return {"guidance_scale": 5.0, "negative_prompt": NEGATIVE} if on else {"guidance_scale": 1.0}
    return {"true_cfg_scale": 3.0, "negative_prompt": NEGATIVE} if on else {}


def small(family: str, **changes: object) -> dict[str, object]:
    """The family's quick call at its first size (the default size of some is 1024 pixels)."""
    height, width = FAMILIES[family].sizes[0]
    return {**FAMILIES[family].call, "height": height, "width": width, **changes}


@pytest.mark.parametrize("guided", [False, True], ids=["plain", "guided"])
@pytest.mark.parametrize("family", CASES)
def test_latents_and_pixels_equal_diffusers(tiny_folder, family: str, guided: bool) -> None:
    facts = FAMILIES[family]
    pipe = load(tiny_folder(family))
    call = {**facts.call, **guidance(family, guided)}
    results = {}
    with Omni(tiny_folder(family), dtype="float32", device="cpu") as omni:
        for height, width in facts.sizes:
            for kind in ("latent", "np"):
                size = {"height": height, "width": width}
                expected = run(pipe, seed=11, output_type=kind, prompt=PROMPT, **call, **size)
                [out] = omni.generate(PROMPT, SamplingParams(seed=11, output_type=kind, **call, **size))
                ours = out.latents if kind == "latent" else out.images
                assert np.array_equal(np.asarray(ours), np.asarray(expected))
                results[height, width, kind] = ours
    assert np.isfinite(np.asarray(ours)).all()
    assert len({value.shape for value in results.values()}) > 2  # the sizes really differ


@pytest.mark.parametrize("family", ["flux", "sd3"])
def test_guidance_and_negative_prompt_matter(tiny_folder, family: str) -> None:
    """The gate for the test above: what it compares reacts to what it varies."""
    call = {**small(family), "seed": 3, "output_type": "latent"}
    with Omni(tiny_folder(family), dtype="float32", device="cpu") as omni:

        def latents(**changes: object) -> torch.Tensor:
            return omni.generate(PROMPT, SamplingParams.from_mapping({**call, **changes}))[0].latents

        plain, guided = latents(**guidance(family, False)), latents(**guidance(family, True))
        other = latents(**{**guidance(family, True), "negative_prompt": "bright yellow flowers"})
    assert relative_l2(guided, plain) > 1e-2
    assert relative_l2(guided, other) > 1e-2


@pytest.mark.parametrize("family", ["flux", "sd3"])
def test_explicit_zero_guidance_is_zero(tiny_folder, family: str) -> None:
    key = "guidance_scale" if family == "sd3" else "true_cfg_scale"
    pipe = load(tiny_folder(family))
    call = small(family, negative_prompt=NEGATIVE, num_inference_steps=2)
    with Omni(tiny_folder(family), dtype="float32", device="cpu") as omni:
        for value in (0, 0.0, 1, 1.0001, 4):
            expected = run(pipe, seed=1, prompt=PROMPT, **{**call, key: value})
            [out] = omni.generate(PROMPT, SamplingParams(seed=1, output_type="latent", **{**call, key: value}))
            assert torch.equal(out.latents, expected)
            assert out.params[key] == value


@pytest.mark.parametrize("family", CASES)
def test_n_images_equal_one_diffusers_call_and_their_solo_runs(tiny_folder, family: str) -> None:
    pipe = load(tiny_folder(family))
    call = small(family, **guidance(family, True))
    with Omni(tiny_folder(family), dtype="float32", device="cpu") as omni:
        for kind in ("latent", "pil"):
            expected = run(pipe, seed=[7, 8, 9], output_type=kind, prompt=PROMPT, num_images_per_prompt=3, **call)
            params = SamplingParams(seed=7, num_outputs_per_prompt=3, output_type=kind, **call)
            [out] = omni.generate(PROMPT, params)
            assert out.seeds == [7, 8, 9]
            for k in range(3):
                [solo] = omni.generate(PROMPT, SamplingParams(seed=7 + k, output_type=kind, **call))
                if kind == "latent":
                    assert torch.equal(out.latents[k], expected[k])
                    assert relative_l2(out.latents[k], solo.latents[0]) <= 1e-5
                    assert all(relative_l2(out.latents[k], out.latents[j]) > 0.1 for j in range(k))
                else:
                    assert out.images[k].tobytes() == expected[k].tobytes()
                    difference = np.asarray(out.images[k], int) - np.asarray(solo.images[0], int)
                    assert np.abs(difference).max() <= 1


def test_bfloat16_equals_diffusers(tiny_folder) -> None:
    pipe = load(tiny_folder("flux"), dtype=torch.bfloat16)
    call = small("flux")
    expected = run(pipe, seed=5, prompt=PROMPT, **call)
    with Omni(tiny_folder("flux"), dtype="bf16", device="cpu") as omni:
        [out] = omni.generate(PROMPT, SamplingParams(seed=5, output_type="latent", **call))
    assert out.latents.dtype == torch.bfloat16
    assert torch.equal(out.latents, expected)


def test_own_sigmas_equal_diffusers_and_leave_nothing_behind(tiny_folder) -> None:
    """Step counts follow each request, whatever ran before it (RB-16, scheduler part)."""
    pipe = load(tiny_folder("flux"))
    call = {k: v for k, v in small("flux").items() if k != "num_inference_steps"}
    sigmas = [1.0, 0.9, 0.7, 0.5, 0.3, 0.2, 0.1]
    runs = [
        {"num_inference_steps": 1},
        {},
        {"num_inference_steps": 12},
        {"num_inference_steps": 4},
        {},
        {"sigmas": sigmas},
    ]
    with Omni(tiny_folder("flux"), dtype="float32", device="cpu") as omni:
        for changes in runs:
            expected = run(pipe, seed=2, prompt=PROMPT, **call, **changes)
            [out] = omni.generate(PROMPT, SamplingParams(seed=2, output_type="latent", **call, **changes))
            assert torch.equal(out.latents, expected)
            wanted = len(sigmas) if "sigmas" in changes else changes.get("num_inference_steps", 28)
            assert out.metrics["steps"] == out.params["num_inference_steps"] == wanted


def test_unseeded_requests_differ_and_can_be_repeated(tiny_folder) -> None:
    call = small("flux")
    with Omni(tiny_folder("flux"), dtype="float32", device="cpu") as omni:
        first, second = (omni.generate(PROMPT, SamplingParams(output_type="latent", **call))[0] for _ in range(2))
        assert first.seeds != second.seeds
        [again] = omni.generate(PROMPT, SamplingParams(seed=first.seeds[0], output_type="latent", **call))
    assert torch.equal(again.latents, first.latents)
    assert not torch.equal(first.latents, second.latents)


def test_from_pipeline_gives_the_same_and_leaves_the_object_alone(tiny_folder) -> None:
    pipe = load(tiny_folder("sd3"))
    call = small("sd3")
    expected = run(pipe, seed=4, prompt=PROMPT, **call)
    before = {name: id(value) for name, value in pipe.components.items()}
    scheduler = vars(pipe.scheduler).copy()
    with Omni.from_pipeline(pipe) as omni:
        [out] = omni.generate(PROMPT, SamplingParams(seed=4, output_type="latent", **call))
        assert torch.equal(out.latents, expected)
        assert omni.report.to_dict()["components"]["transformer"]["class"] == "SD3Transformer2DModel"
    assert {name: id(value) for name, value in pipe.components.items()} == before
    assert vars(pipe.scheduler).keys() == scheduler.keys()
    assert torch.equal(run(pipe, seed=4, prompt=PROMPT, **call), expected)
