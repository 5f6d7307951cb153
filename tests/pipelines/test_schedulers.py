"""Choosing the scheduler by name with options."""

from __future__ import annotations

import diffusers
import pytest
import torch

from omniloom import Omni, SamplingParams
from omniloom.errors import ConfigError
from tests.fixtures.reference import load, run
from tests.fixtures.registry import PROMPT
from tests.fixtures.tiny import FAMILIES


def call(family: str) -> dict[str, object]:
    height, width = FAMILIES[family].sizes[0]
    return {**FAMILIES[family].call, "height": height, "width": width, "num_inference_steps": 4}


@pytest.mark.parametrize("family", ["flux", "sd3"])
def test_chosen_by_name_equals_diffusers(tiny_folder, family: str) -> None:
    pipe = load(tiny_folder(family))
    base = pipe.scheduler
    flow = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": base.config.shift}
    wanted = {
        "unipc": diffusers.UniPCMultistepScheduler.from_config(base.config, **flow),
        "euler": base,
    }
    for name, scheduler in wanted.items():
        pipe.scheduler = scheduler
        expected = run(pipe, seed=1, prompt=PROMPT, **call(family))
        with Omni(tiny_folder(family), dtype="float32", device="cpu", scheduler=name) as omni:
            [out] = omni.generate(PROMPT, SamplingParams(seed=1, output_type="latent", **call(family)))
            assert torch.equal(out.latents, expected), name


def test_options_are_applied(tiny_folder) -> None:
    pipe = load(tiny_folder("sd3"))
    pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_config(pipe.scheduler.config, shift=5.0)
    expected = run(pipe, seed=1, prompt=PROMPT, **call("sd3"))
    for scheduler in ({"shift": 5.0}, {"name": "FlowMatchEulerDiscreteScheduler", "shift": 5.0}):
        with Omni(tiny_folder("sd3"), dtype="float32", device="cpu", scheduler=scheduler) as omni:
            [out] = omni.generate(PROMPT, SamplingParams(seed=1, output_type="latent", **call("sd3")))
            assert torch.equal(out.latents, expected)


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("eulr", "did you mean 'euler'"),
        ("UniPCMultistepSchedule", "did you mean 'UniPCMultistepScheduler'"),
        ({"name": "euler", "shft": 2}, "did you mean 'shift'"),
        ({"name": 3}, "must be a string"),
        ("FluxPipeline", "unknown scheduler"),
        ("ddim", "flow-matching"),
        ("heun", "mu"),
        (7, "option scheduler=7"),
    ],
)
def test_wrong_choices_are_refused_in_one_line(tiny_folder, wanted: object, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Omni(tiny_folder("flux"), dtype="float32", device="cpu", scheduler=wanted)
    assert said in str(caught.value) and "\n" not in str(caught.value)
