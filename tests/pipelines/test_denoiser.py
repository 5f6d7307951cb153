"""The identity of denoiser calls: request, step, branch, for every family, against what the pipelines really do."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from omniloom import Omni, SamplingParams
from omniloom.diffusion.hooks.state import current_call
from omniloom.pipelines.denoiser import CallIdentity, CallTracker, Denoiser
from omniloom.pipelines.family import Branches, BranchRule
from tests.engine.asking import asked
from tests.fixtures.tiny import FAMILIES

COND, BOTH = [("cond",)], [("cond",), ("uncond",)]
EXPECTED = {
    "flux": COND,
    "flux-kontext": COND,
    "flux2": COND,
    "flux2-klein": BOTH,
    "flux2-klein-distilled": COND,
    "qwen-image": BOTH,
    "qwen-image-edit": BOTH,
    "glm-image": BOTH,
    "wan22-t2v": BOTH,
    "wan22-ti2v": BOTH,
    "sd3": [("uncond", "cond")],
    "z-image": [("cond", "uncond")],
    "hunyuan-image-21": [("pred_cond",), ("pred_uncond",)],
    "hunyuan-video-15": [("pred_cond",), ("pred_uncond",)],
}


def identities(omni: Omni, prompt: Any, params: SamplingParams) -> list[CallIdentity]:
    """Run a request and return what its denoiser calls were, as seen from inside of them."""
    seen: list[CallIdentity] = []
    modules = [omni._pipe.components[n] for n in omni._loaded.family.denoisers if omni._pipe.components.get(n)]
    hooks = [module.register_forward_pre_hook(lambda *_: seen.append(current_call())) for module in modules]
    try:
        omni.generate(prompt, params)
    finally:
        for hook in hooks:
            hook.remove()
    assert current_call() is None
    return seen


@pytest.mark.parametrize("family", EXPECTED)
def test_each_call_of_each_family_is_named(tiny_folder, family: str) -> None:
    with Omni(tiny_folder(family), dtype="float32", device="cpu") as omni:
        seen = identities(omni, *asked(FAMILIES[family].request(), seed=1, output_type="latent"))
    per_step = EXPECTED[family]
    steps = len(seen) // len(per_step)
    assert len(seen) == steps * len(per_step) > 1
    for number, call in enumerate(seen):
        names = per_step[number % len(per_step)]
        assert (call.step, call.index) == divmod(number, len(per_step))
        assert call.branch == "+".join(names)
        assert call.rows == (names if len(names) > 1 else ())
    if family == "wan22-t2v":  # the high-noise transformer comes first, and each has its steps
        components = [call.component for call in seen]
        assert components == sorted(components) and set(components) == {"transformer", "transformer_2"}


def test_pipelines_without_a_context_are_named_by_order(tiny_folder) -> None:
    facts = FAMILIES["flux"]
    with Omni(tiny_folder("flux"), dtype="float32", device="cpu") as omni:
        call = facts.request(task="image-to-image", true_cfg_scale=3.0, negative_prompt="dark")
        seen = identities(omni, *asked(call, seed=1, output_type="latent"))
        assert [c.branch for c in seen] == ["cond", "uncond"] * (len(seen) // 2)


def test_skip_layer_guidance_is_a_third_branch(tiny_folder) -> None:
    facts = FAMILIES["sd3"]
    extra = {"skip_guidance_layers": [0], "skip_layer_guidance_start": 0.0, "skip_layer_guidance_stop": 1.0}
    with Omni(tiny_folder("sd3"), dtype="float32", device="cpu") as omni:
        seen = identities(omni, *asked(facts.request(**extra), seed=1, output_type="latent"))
        assert "skip_layers" in {c.branch for c in seen}
        unguided = identities(omni, *asked(facts.request(guidance_scale=1.0), seed=1, output_type="latent"))
        assert {c.rows for c in unguided} == {("cond",)}
        two = identities(omni, *asked(facts.request(num_images_per_prompt=2), seed=1, output_type="latent"))
        assert {c.rows for c in two} == {("uncond", "cond")}


def test_unexpected_calls_make_every_later_branch_unknown() -> None:
    tracker = CallTracker("r", Branches(BranchRule.ORDER, ("cond", "uncond")))
    for expected in ("cond", "uncond", None):
        assert tracker.identify("transformer").branch == expected
        tracker.index += 1
    tracker.begin_step()
    assert tracker.identify("transformer").branch is None
    tracker.context = "cond"
    assert tracker.identify("transformer").branch == "cond"
    assert CallTracker("r", Branches()).identify("transformer").branch is None


def test_threads_see_their_own_call() -> None:
    class Model:
        def __call__(self, hidden_states: list[int]) -> CallIdentity | None:
            barrier.wait(10)
            return current_call()

    import contextlib

    barrier = threading.Barrier(2)
    results: dict[str, Any] = {}

    def work(name: str) -> None:
        tracker = CallTracker(name, Branches(BranchRule.ORDER, ("cond",)))
        results[name] = Denoiser(Model(), "transformer", tracker, contextlib.nullcontext(), 1)([1])

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results["a"].request == "a" and results["b"].request == "b"
