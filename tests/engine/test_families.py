"""Every family and task of the mission equals plain diffusers bit for bit."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from omniloom import Omni, SamplingParams
from omniloom.errors import Cancelled, RequestError
from tests.engine.asking import as_array, asked, content
from tests.fixtures.reference import load, run
from tests.fixtures.registry import PROMPT
from tests.fixtures.tiny import FAMILIES

# The FLUX.1 variants that differ in width only, and SD3, are in test_exactness.
NAMES = [name for name in FAMILIES if name not in ("flux-wide", "flux-256", "flux-odd")]
CASES = [(name, task) for name in NAMES for task in FAMILIES[name].tasks]
BIG = {"qwen-image-edit-plus", "qwen-image-layered"}  # seconds a call: one size in the quick run
UNGUIDED = {
    "sd3": {"guidance_scale": 1.0},
    "flux2-klein": {"guidance_scale": 1.0},
    "z-image": {"guidance_scale": 0.0},
    "glm-image": {"guidance_scale": 1.0},
    "ltx": {"guidance_scale": 1.0},
    "wan22-t2v": {"guidance_scale": 1.0},
    "wan22-i2v": {"guidance_scale": 1.0},
    "wan22-ti2v": {"guidance_scale": 1.0},
    "wan21-t2v": {"guidance_scale": 1.0},
    "qwen-image": {"true_cfg_scale": 1.0},
    "qwen-image-edit": {"true_cfg_scale": 1.0},
}


@pytest.fixture(scope="module")
def opened(tiny_folder):
    """One loaded model per family for the whole module."""
    models: dict[str, Omni] = {}

    def get(name: str) -> Omni:
        if name not in models:
            models[name] = Omni(tiny_folder(name), dtype="float32", device="cpu")
        return models[name]

    yield get
    for model in models.values():
        model.unload()


def same(omni: Omni, pipe: Any, call: dict[str, Any], kind: str, seeds: list[int]) -> np.ndarray:
    """Assert that both give the same, and return it."""
    expected = run(pipe, seed=seeds, output_type=kind, **call)
    prompt, params = asked(call, seed=seeds[0], output_type=kind)
    [output] = omni.generate(prompt, params)
    assert output.seeds == seeds
    ours = content(output)
    assert np.array_equal(ours, as_array(expected))
    assert np.isfinite(ours).all()
    return ours


@pytest.mark.parametrize(("family", "task"), CASES)
def test_family(tiny_folder, opened, family: str, task: str) -> None:
    facts = FAMILIES[family]
    pipe = load(tiny_folder(family), pipeline_class=facts.class_for(task))
    kinds = ("np",) if "layered" in family else ("latent", "np")  # diffusers cannot return latents of layers
    first, second = facts.sizes
    results = [same(opened(family), pipe, facts.request(first, task=task), kind, [5]) for kind in kinds]
    if family not in BIG:
        results.append(same(opened(family), pipe, facts.request(second, task=task), kinds[0], [6]))
        if facts.takes_size:
            assert results[-1].size != results[0].size


@pytest.mark.parametrize("family", UNGUIDED)
def test_without_guidance(tiny_folder, opened, family: str) -> None:
    facts = FAMILIES[family]
    pipe = load(tiny_folder(family), pipeline_class=facts.class_for())
    guided = same(opened(family), pipe, facts.request(), "latent", [5])
    plain = same(opened(family), pipe, facts.request(**UNGUIDED[family]), "latent", [5])
    assert not np.array_equal(guided, plain)


ONE_OUTPUT = {"hunyuan-video-15"}  # diffusers itself fails for two


@pytest.mark.parametrize("family", [name for name in NAMES if name not in BIG | ONE_OUTPUT])
def test_two_outputs(tiny_folder, opened, family: str) -> None:
    facts = FAMILIES[family]
    pipe = load(tiny_folder(family), pipeline_class=facts.class_for())
    two = same(opened(family), pipe, facts.request(**{facts.n_kwarg: 2}), "latent", [5, 6])
    half = len(two) // 2
    assert not np.array_equal(two[:half], two[half:])


@pytest.mark.parametrize("family", ONE_OUTPUT)
def test_what_makes_one_output_says_so(opened, family: str) -> None:
    prompt, params = asked(FAMILIES[family].request(), num_outputs_per_prompt=2)
    with pytest.raises(RequestError, match="one output per request"):
        opened(family).generate(prompt, params)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "task"), CASES)
def test_family_in_bfloat16(tiny_folder, family: str, task: str) -> None:
    import torch

    facts = FAMILIES[family]
    pipe = load(tiny_folder(family), pipeline_class=facts.class_for(task), dtype=torch.bfloat16)
    kind = "np" if "layered" in family else "latent"
    expected = run(pipe, seed=5, output_type=kind, **facts.request(task=task))
    with Omni(tiny_folder(family), dtype="bfloat16", device="cpu") as omni:
        prompt, params = asked(facts.request(task=task), seed=5, output_type=kind)
        [output] = omni.generate(prompt, params)
    value = output.latents if output.latents is not None else as_array(output.images)
    if isinstance(value, torch.Tensor):
        assert torch.equal(value, expected)
    else:
        assert np.array_equal(value, as_array(expected))


@pytest.mark.parametrize("family", ["hunyuan-image-21", "hunyuan-video-15"])
def test_guidance_of_a_guider_object(tiny_folder, opened, family: str) -> None:
    """Their calls take no guidance_scale: the pipeline's guider has it, and a request gets a guider of its own."""
    facts = FAMILIES[family]
    pipe = load(tiny_folder(family))
    before = dict(vars(opened(family)._pipe.guider))
    for scale in (0.0, 1.0, 2.5, 7.0):
        pipe.guider = pipe.guider.new(guidance_scale=scale)
        expected = run(pipe, seed=5, **facts.request())
        prompt, params = asked(facts.request(), seed=5, output_type="latent", guidance_scale=scale)
        [output] = opened(family).generate(prompt, params)
        assert np.array_equal(content(output), as_array(expected)), scale
        assert output.params["guidance_scale"] == scale
    assert vars(opened(family)._pipe.guider).keys() == before.keys()
    assert opened(family)._pipe.guider.guidance_scale == before["guidance_scale"]


@pytest.mark.parametrize("second", [None, 0.0, 1.0, 5.0])
def test_guidance_of_the_second_transformer(tiny_folder, opened, second: float | None) -> None:
    """RB-35a: an omitted second guidance is the first one, an explicit 0 is 0."""
    facts = FAMILIES["wan22-t2v"]
    pipe = load(tiny_folder("wan22-t2v"))
    changes = {} if second is None else {"guidance_scale_2": second}
    same(opened("wan22-t2v"), pipe, facts.request(**changes), "latent", [5])


@pytest.mark.parametrize("family", [name for name in NAMES if FAMILIES[name].frames])
def test_frame_counts_are_exact_or_refused_with_the_nearest(opened, family: str) -> None:
    facts = FAMILIES[family]
    legal = facts.call["num_frames"]
    for frames in range(legal, legal + 9):
        prompt, params = asked(facts.request(num_frames=frames), seed=1, output_type="np")
        try:
            [output] = opened(family).generate(prompt, params)
        except RequestError as error:
            near = [int(word) for word in str(error).split("nearest: ")[1].split(" or ")]
            assert near[0] < frames < near[1]
        else:
            assert output.frames.shape[1] == frames


@pytest.mark.parametrize("family", [name for name in NAMES if FAMILIES[name].takes_size and name not in BIG])
def test_sizes_are_exact_or_refused(opened, family: str) -> None:
    facts = FAMILIES[family]
    height, width = facts.sizes[0]
    seen = set()
    for extra in (0, 1, 8, 16, 32):
        prompt, params = asked(facts.request((height + extra, width)), seed=1, output_type="np")
        try:
            [output] = opened(family).generate(prompt, params)
        except RequestError as error:
            assert "nearest: " in str(error)
            seen.add("refused")
        else:
            pictures = output.images if output.images is not None else output.frames[0]
            assert pictures.shape[1:3] == (height + extra, width)
            seen.add("exact")
    assert seen == {"refused", "exact"}


def test_the_task_follows_what_is_given(opened) -> None:
    image = FAMILIES["flux"].request(task="inpaint")
    quick = SamplingParams(num_inference_steps=3, height=32, width=32, max_sequence_length=16, seed=1)
    picture, mask = image["image"], image["mask_image"]
    flux = opened("flux")
    assert flux.generate(PROMPT, quick)[0].ok
    assert flux.generate({"prompt": PROMPT, "image": picture}, quick)[0].ok
    assert flux.generate({"prompt": PROMPT, "image": picture, "mask": mask}, quick)[0].ok
    refusals = [
        ("flux-fill", {"prompt": PROMPT}, "inpaint"),
        ("wan22-t2v", {"prompt": PROMPT, "image": picture}, "text-to-video"),
        ("wan22-i2v", {"prompt": PROMPT}, "image-to-video"),
        ("qwen-image-edit", {"prompt": PROMPT}, "image-to-image"),
        ("hunyuan-image-21", {"prompt": PROMPT, "image": picture}, "text-to-image"),
        ("glm-image", {"prompt": PROMPT, "image": picture, "mask": mask}, "text-to-image"),
    ]
    for family, prompt, can in refusals:
        with pytest.raises(RequestError, match="it can do: ") as caught:
            opened(family).generate(prompt, SamplingParams(num_inference_steps=1))
        assert can in str(caught.value).split("it can do: ")[1] and "\n" not in str(caught.value)
    assert "inpaint" not in opened("wan22-t2v").tasks
    with pytest.raises(RequestError, match="works from one image, 2 are given"):
        flux.generate({"prompt": PROMPT, "images": [picture, picture]}, quick)


@pytest.mark.parametrize("family", NAMES)
def test_nothing_is_left_on_the_shared_modules(tiny_folder, opened, family: str) -> None:
    """diffusers' own cache_context leaves a registry on the transformer; a request of ours leaves nothing."""
    if family in BIG:
        pytest.skip("covered by its smaller relatives")
    facts = FAMILIES[family]
    omni = opened(family)
    modules = [
        omni._pipe.components[name]
        for name in omni._engine.call_states
        if hasattr(omni._pipe.components[name], "forward")
    ]
    before = [set(vars(module)) for module in modules]
    prompt, params = asked(facts.request(), seed=1, output_type="np")
    omni.generate(prompt, params)
    assert [set(vars(module)) for module in modules] == before


def mixed(family: str) -> list[tuple[dict[str, Any], SamplingParams]]:
    """Four requests that differ in size, steps, seed and the length of their prompt."""
    facts = FAMILIES[family]
    requests = []
    for i in range(4):
        size = facts.sizes[i % 2]
        call = facts.request(size, prompt="a red cat " * (1 + i) + "on a hill", num_inference_steps=2 + i % 2)
        requests.append(asked(call, seed=i, output_type="np"))
    return requests


def hammered(folder: Any, family: str, rounds: int) -> None:
    with Omni(folder, dtype="float32", device="cpu", engine={"workers": 4}) as omni:
        requests = mixed(family)
        serial = [content(omni.generate(prompt, params)[0]) for prompt, params in requests]
        assert len({value.tobytes() for value in serial}) == len(serial)
        for _ in range(rounds):
            handles = [omni.submit(prompt, params) for prompt, params in requests]
            for handle, expected in zip(handles, serial, strict=True):
                output = handle.result(timeout=300)
                assert output.error is None
                assert np.array_equal(content(output), expected)


@pytest.mark.parametrize("family", [name for name in NAMES if name not in BIG and name != "sd3"])
def test_four_requests_at_once(tiny_folder, family: str) -> None:
    hammered(tiny_folder(family), family, rounds=2)


@pytest.mark.slow
@pytest.mark.parametrize("family", NAMES)
def test_four_requests_at_once_for_fifty_rounds(tiny_folder, family: str) -> None:
    hammered(tiny_folder(family), family, rounds=3 if family in BIG else 50)


@pytest.mark.parametrize("family", [name for name in NAMES if name not in BIG])
def test_cancelling_in_each_phase_leaves_the_next_request_exact(tiny_folder, opened, family: str) -> None:
    omni = opened(family)
    prompt, params = asked(FAMILIES[family].request(), seed=3, output_type="np")
    expected = content(omni.generate(prompt, params)[0])
    for phase in ("encode", "denoise", "decode"):
        box: list[Any] = []
        ready = threading.Event()

        def stop(progress: Any, phase: str = phase, box: list[Any] = box, ready: threading.Event = ready) -> None:
            if progress.phase == phase:
                ready.wait(60)
                box[0].cancel()

        box.append(omni.submit(prompt, params, on_progress=stop))
        ready.set()
        assert isinstance(box[0].result(300).error, Cancelled), phase
    assert np.array_equal(content(omni.generate(prompt, params)[0]), expected)


def test_the_global_random_state_is_left_alone(opened) -> None:
    import torch

    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    prompt, params = asked(FAMILIES["glm-image"].request(), seed=3, output_type="latent")
    opened("glm-image").generate(prompt, params)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_glm_image_with_given_prior_tokens(tiny_folder, opened) -> None:
    facts = FAMILIES["glm-image"]
    height, width = facts.sizes[0]
    pipe = load(tiny_folder("glm-image"))
    call = facts.request((height, width), **facts.gate(height, width))
    given = same(opened("glm-image"), pipe, call, "latent", [5])
    assert not np.array_equal(given, same(opened("glm-image"), pipe, facts.request((height, width)), "latent", [5]))


def test_frame_rate_reaches_the_model_and_the_result(tiny_folder, opened) -> None:
    facts = FAMILIES["ltx"]
    pipe = load(tiny_folder("ltx"))
    prompt, params = asked(facts.request(), seed=5, output_type="latent", fps=12.0)
    [output] = opened("ltx").generate(prompt, params)
    assert np.array_equal(content(output), as_array(run(pipe, seed=5, frame_rate=12.0, **facts.request())))
    assert output.params["fps"] == 12.0
    prompt, params = asked(facts.request(), seed=5, output_type="latent")
    [output] = opened("ltx").generate(prompt, params)
    assert output.params["fps"] == 25
    prompt, params = asked(FAMILIES["wan22-t2v"].request(), seed=5, output_type="latent")
    assert opened("wan22-t2v").generate(prompt, params)[0].params["fps"] == 16
