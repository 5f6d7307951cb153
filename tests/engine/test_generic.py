"""Pipelines that omniloom has no facts about: they run by the common protocol, or the reason is said."""

from __future__ import annotations

from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from transformers import CLIPTextConfig, CLIPTextModel

from omniloom import Omni, SamplingParams
from omniloom.errors import EngineError, ModelError, RequestError
from tests.fixtures.reference import load, run
from tests.fixtures.tiny import FAMILIES


@pytest.fixture(scope="module")
def unet_folder(tiny_folder, tmp_path_factory) -> Path:
    """A tiny Stable Diffusion 1 with a stateful multistep scheduler."""
    tokenizer = load(tiny_folder("flux")).tokenizer
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        unet = diffusers.UNet2DConditionModel(
            sample_size=8, block_out_channels=(8, 16), layers_per_block=1, cross_attention_dim=16, norm_num_groups=4,
            attention_head_dim=4, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        )  # fmt: skip
        vae = diffusers.AutoencoderKL(
            block_out_channels=(8, 8), latent_channels=4, norm_num_groups=4,
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        )  # fmt: skip
        text = CLIPTextModel(
            CLIPTextConfig(vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                           num_attention_heads=2, max_position_embeddings=77)
        )  # fmt: skip
    pipe = diffusers.StableDiffusionPipeline(
        vae,
        text,
        tokenizer,
        unet,
        diffusers.PNDMScheduler(skip_prk_steps=True),
        None,
        None,
        requires_safety_checker=False,
    )
    folder = tmp_path_factory.mktemp("sd1") / "model"
    pipe.save_pretrained(folder)
    return folder


def test_stable_diffusion_1_runs_without_facts(unet_folder: Path) -> None:
    call = {"num_inference_steps": 4, "guidance_scale": 5.0, "negative_prompt": "dark", "height": 16, "width": 24}
    pipe = load(unet_folder)
    with Omni(unet_folder, dtype="float32", device="cpu", engine={"workers": 3}) as omni:
        assert omni.report.to_dict()["family"] == "generic"
        for kind in ("latent", "np"):
            expected = run(pipe, seed=[1, 2], output_type=kind, prompt="a cat", num_images_per_prompt=2, **call)
            params = SamplingParams(seed=1, num_outputs_per_prompt=2, output_type=kind, **call)
            handles = [omni.submit("a cat", params) for _ in range(4)]
            for out in (handle.result(60) for handle in handles):
                assert np.array_equal(out.latents if kind == "latent" else out.images, expected)
        with pytest.raises(RequestError, match="takes no true_cfg_scale"):
            omni.generate("a cat", SamplingParams(true_cfg_scale=2.0))


def test_what_the_protocol_lacks_is_said(tmp_path: Path) -> None:
    unet = diffusers.UNet2DModel(
        sample_size=8, block_out_channels=(8,), layers_per_block=1, norm_num_groups=4,
        down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",),
    )  # fmt: skip
    pipe = diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler())
    pipe.save_pretrained(tmp_path / "model")
    for make in (lambda: Omni(tmp_path / "model", device="cpu"), lambda: Omni.from_pipeline(pipe)):
        with pytest.raises(ModelError, match="DDPMPipeline is not supported: its call takes no 'prompt'"):
            make()
    with pytest.raises(ModelError, match="not a int"):
        Omni.from_pipeline(3)


def test_a_result_that_is_not_finite_is_an_error(tiny_folder) -> None:
    """LTX's guidance rescale divides by a standard deviation: zero predictions must not become a black video (X13)."""
    facts = FAMILIES["ltx"]
    pipe = load(tiny_folder("ltx"))
    height, width = facts.sizes[0]
    params = SamplingParams(
        seed=1, height=height, width=width, output_type="np", extra_args={"guidance_rescale": 0.7}, **facts.call
    )
    with Omni.from_pipeline(pipe) as omni:
        assert omni.generate("a cat", params)[0].ok
        for parameter in pipe.transformer.proj_out.parameters():
            parameter.data.zero_()
        with pytest.raises(EngineError, match="not finite after step"):
            omni.generate("a cat", params)
        assert np.isfinite(
            omni.generate("a cat", SamplingParams(seed=1, height=height, width=width, output_type="np", **facts.call))[
                0
            ].frames
        ).all()
