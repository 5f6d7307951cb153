"""Sampling parameters and prompts: what is accepted, what is refused, before anything runs."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from omniloom import Omni, SamplingParams
from omniloom.config import UNSET
from omniloom.engine.prompt import parse_prompt
from omniloom.errors import OmniloomError, RequestError

BAD = [-1, 1.5, "4", True, math.nan, math.inf, []]


@pytest.mark.parametrize("field", ["num_inference_steps", "num_outputs_per_prompt", "height", "width", "num_frames"])
@pytest.mark.parametrize("value", [*BAD, 0], ids=repr)
def test_counts_refuse_what_is_no_count(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=field):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("field", ["guidance_scale", "true_cfg_scale", "strength"])
@pytest.mark.parametrize("value", [v for v in BAD if v != 1.5], ids=repr)
def test_scales_refuse_what_is_no_number(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=field):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("field", ["guidance_scale", "true_cfg_scale", "strength", "seed"])
def test_zero_is_zero_and_none_is_not_given(field: str) -> None:
    assert SamplingParams(**{field: 0}).given() == {field: 0}
    assert SamplingParams(**{field: None}).given() == {}


def test_negative_prompt_none_is_given() -> None:
    assert SamplingParams().negative_prompt is UNSET
    weaker = SamplingParams(negative_prompt="blurry", seed=1)
    assert SamplingParams(negative_prompt=None).over(weaker).given() == {"negative_prompt": None, "seed": 1}


def test_unknown_names_get_a_suggestion() -> None:
    with pytest.raises(RequestError, match="did you mean 'num_inference_steps'"):
        SamplingParams.from_mapping({"num_inference_step": 3})


@pytest.mark.parametrize("sigmas", [[], [0.5, 0.7], [1.0, 1.0], ["1"], [math.nan], 3, [True]], ids=repr)
def test_sigmas_are_checked(sigmas: object) -> None:
    with pytest.raises(RequestError, match="sigmas"):
        SamplingParams(sigmas=sigmas)
    with pytest.raises(RequestError, match="contradicts"):
        SamplingParams(sigmas=[1.0, 0.5], num_inference_steps=3)


@given(
    st.dictionaries(
        st.sampled_from([f.name for f in dataclasses.fields(SamplingParams)]),
        st.one_of(
            st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.lists(st.floats(), max_size=3)
        ),
    )
)
def test_any_values_are_accepted_or_refused_in_one_line(values: dict) -> None:
    try:
        params = SamplingParams(**values)
    except RequestError as error:
        assert "\n" not in str(error)
    else:
        assert params == SamplingParams.from_mapping(params.to_dict())
        assert params.over(SamplingParams()) == params
        with pytest.raises(dataclasses.FrozenInstanceError):
            params.seed = 3


@given(
    st.recursive(
        st.one_of(st.none(), st.text(max_size=5), st.integers()),
        lambda inner: st.dictionaries(
            st.sampled_from(["prompt", "negative_prompt", "image", "mask", "prompts", "latents"]), inner
        ),
        max_leaves=4,
    )
)
def test_any_prompt_is_accepted_or_refused(value: object) -> None:
    try:
        prompt = parse_prompt(value)
    except RequestError as error:
        assert "\n" not in str(error)
    else:
        assert prompt.text is None or prompt.text.strip()


def test_prompt_pictures(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4), "red").save(tmp_path / "a.png")
    (tmp_path / "b.png").write_text("no picture")
    prompt = parse_prompt({"prompt": "a fox", "image": str(tmp_path / "a.png"), "mask": Image.new("L", (4, 4))})
    assert prompt.images[0].size == (4, 4) and prompt.mask.mode == "L"
    for bad, said in (
        ({"image": tmp_path / "c.png"}, "does not exist"),
        ({"image": tmp_path / "b.png"}, "as an image"),
        ({"mask": Image.new("L", (4, 4))}, "needs an image"),
        ({"image": 1, "images": 2}, "not both"),
    ):
        with pytest.raises(RequestError, match=said):
            parse_prompt({"prompt": "a fox", **bad})


@pytest.fixture(scope="module")
def omni(tiny_folder):
    with Omni(tiny_folder("sd3"), dtype="float32", device="cpu") as omni:
        yield omni


@pytest.mark.parametrize("side", range(20, 45))
def test_sizes_are_exact_or_refused_with_the_nearest(omni: Omni, side: int) -> None:
    params = SamplingParams(height=side, width=32, num_inference_steps=1, seed=1, max_sequence_length=16)
    stride = omni._pipe.vae_scale_factor * omni._pipe.patch_size
    if side % stride == 0:
        assert omni.generate("a fox", params)[0].images[0].size == (32, side)
        return
    with pytest.raises(RequestError) as caught:
        omni.generate("a fox", params)
    low = side // stride * stride
    assert f"32x{low} or 32x{low + stride}" in str(caught.value)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"true_cfg_scale": 2.0}, "takes no true_cfg_scale; it takes: "),
        ({"num_frames": 9}, "takes no num_frames"),
        ({"fps": 9.0}, "takes no fps"),
        ({"strength": 0.5}, "takes no strength"),
        ({"extra_args": {"skip_guidance_layer": [1]}}, "did you mean 'skip_guidance_layers'"),
        ({"max_sequence_length": 4000}, "max_sequence_length"),
    ],
)
def test_what_the_pipeline_does_not_take_is_refused(omni: Omni, params: dict, said: str) -> None:
    with pytest.raises(OmniloomError) as caught:
        omni.generate(
            "a fox", SamplingParams.from_mapping({"height": 32, "width": 32, "num_inference_steps": 1, **params})
        )
    assert isinstance(caught.value, RequestError) and said in str(caught.value)


def test_ineffective_guidance_is_said(tiny_folder) -> None:
    quick = {"height": 32, "width": 32, "num_inference_steps": 1, "max_sequence_length": 16}
    for family, warned in (("flux", True), ("flux-guidance", False)):
        with Omni(tiny_folder(family), dtype="float32", device="cpu") as omni:
            [out] = omni.generate("a fox", SamplingParams(guidance_scale=2.0, **quick))
            assert bool(out.warnings) is warned
            assert not omni.generate("a fox", SamplingParams(**quick))[0].warnings
