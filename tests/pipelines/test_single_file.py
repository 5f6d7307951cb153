"""A single-file transformer in original or ComfyUI naming, over a base folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from omniloom import Omni, SamplingParams
from omniloom.errors import CheckpointError, ConfigError, ModelError
from tests.fixtures.registry import PROMPT
from tests.fixtures.tiny import FAMILIES

QKV = ("q", "k", "v")


def original_flux(state: dict[str, torch.Tensor], double: int, single: int) -> dict[str, torch.Tensor]:
    """Write a FLUX transformer under the names of the original release; independent of the reader under test."""
    old: dict[str, torch.Tensor] = {}

    def move(new: str, name: str) -> None:
        for leaf in ("weight", "bias"):
            if f"{new}.{leaf}" in state:
                old[f"{name}.{leaf}"] = state[f"{new}.{leaf}"]

    def fuse(parts: list[str], name: str) -> None:
        for leaf in ("weight", "bias"):
            old[f"{name}.{leaf}"] = torch.cat([state[f"{part}.{leaf}"] for part in parts])

    move("x_embedder", "img_in")
    move("context_embedder", "txt_in")
    for new, name in (
        ("timestep_embedder", "time_in"),
        ("text_embedder", "vector_in"),
        ("guidance_embedder", "guidance_in"),
    ):
        move(f"time_text_embed.{new}.linear_1", f"{name}.in_layer")
        move(f"time_text_embed.{new}.linear_2", f"{name}.out_layer")
    for i in range(double):
        new, name = f"transformer_blocks.{i}", f"double_blocks.{i}"
        for ours, theirs in (("norm1", "img"), ("norm1_context", "txt")):
            move(f"{new}.{ours}.linear", f"{name}.{theirs}_mod.lin")
        fuse([f"{new}.attn.to_{x}" for x in QKV], f"{name}.img_attn.qkv")
        fuse([f"{new}.attn.add_{x}_proj" for x in QKV], f"{name}.txt_attn.qkv")
        for ours, theirs in (
            ("norm_q", "img_attn.norm.query_norm"),
            ("norm_k", "img_attn.norm.key_norm"),
            ("norm_added_q", "txt_attn.norm.query_norm"),
            ("norm_added_k", "txt_attn.norm.key_norm"),
        ):
            old[f"{name}.{theirs}.scale"] = state[f"{new}.attn.{ours}.weight"]
        for ours, theirs in (
            ("attn.to_out.0", "img_attn.proj"),
            ("attn.to_add_out", "txt_attn.proj"),
            ("ff.net.0.proj", "img_mlp.0"),
            ("ff.net.2", "img_mlp.2"),
            ("ff_context.net.0.proj", "txt_mlp.0"),
            ("ff_context.net.2", "txt_mlp.2"),
        ):
            move(f"{new}.{ours}", f"{name}.{theirs}")
    for i in range(single):
        new, name = f"single_transformer_blocks.{i}", f"single_blocks.{i}"
        move(f"{new}.norm.linear", f"{name}.modulation.lin")
        fuse([*(f"{new}.attn.to_{x}" for x in QKV), f"{new}.proj_mlp"], f"{name}.linear1")
        move(f"{new}.proj_out", f"{name}.linear2")
        old[f"{name}.norm.query_norm.scale"] = state[f"{new}.attn.norm_q.weight"]
        old[f"{name}.norm.key_norm.scale"] = state[f"{new}.attn.norm_k.weight"]
    move("proj_out", "final_layer.linear")
    for leaf in ("weight", "bias"):  # the original has shift before scale
        scale, shift = state[f"norm_out.linear.{leaf}"].chunk(2)
        old[f"final_layer.adaLN_modulation.1.{leaf}"] = torch.cat([shift, scale])
    assert sum(t.numel() for t in old.values()) == sum(t.numel() for t in state.values())
    return {name: tensor.contiguous() for name, tensor in old.items()}


def original_sd3(state: dict[str, torch.Tensor], blocks: int) -> dict[str, torch.Tensor]:
    """Write a Stable Diffusion 3 transformer under the names of the original release."""
    old = {"pos_embed": state["pos_embed.pos_embed"]}

    def move(new: str, name: str, swap: bool = False) -> None:
        for leaf in ("weight", "bias"):
            if f"{new}.{leaf}" in state:
                value = state[f"{new}.{leaf}"]
                old[f"{name}.{leaf}"] = torch.cat(value.chunk(2)[::-1]) if swap else value

    def fuse(parts: list[str], name: str) -> None:
        for leaf in ("weight", "bias"):
            old[f"{name}.{leaf}"] = torch.cat([state[f"{part}.{leaf}"] for part in parts])

    move("pos_embed.proj", "x_embedder.proj")
    move("context_embedder", "context_embedder")
    for new, name in (("timestep_embedder", "t_embedder"), ("text_embedder", "y_embedder")):
        move(f"time_text_embed.{new}.linear_1", f"{name}.mlp.0")
        move(f"time_text_embed.{new}.linear_2", f"{name}.mlp.2")
    for i in range(blocks):
        new, x, c = f"transformer_blocks.{i}", f"joint_blocks.{i}.x_block", f"joint_blocks.{i}.context_block"
        fuse([f"{new}.attn.to_{k}" for k in QKV], f"{x}.attn.qkv")
        fuse([f"{new}.attn.add_{k}_proj" for k in QKV], f"{c}.attn.qkv")
        if f"{new}.attn2.to_q.weight" in state:  # 3.5 medium
            fuse([f"{new}.attn2.to_{k}" for k in QKV], f"{x}.attn2.qkv")
        for ours, theirs in (
            ("attn.norm_q", f"{x}.attn.ln_q"),
            ("attn.norm_k", f"{x}.attn.ln_k"),
            ("attn.norm_added_q", f"{c}.attn.ln_q"),
            ("attn.norm_added_k", f"{c}.attn.ln_k"),
            ("attn2.norm_q", f"{x}.attn2.ln_q"),
            ("attn2.norm_k", f"{x}.attn2.ln_k"),
            ("attn2.to_out.0", f"{x}.attn2.proj"),
            ("attn.to_out.0", f"{x}.attn.proj"),
            ("attn.to_add_out", f"{c}.attn.proj"),
            ("norm1.linear", f"{x}.adaLN_modulation.1"),
            ("ff.net.0.proj", f"{x}.mlp.fc1"),
            ("ff.net.2", f"{x}.mlp.fc2"),
            ("ff_context.net.0.proj", f"{c}.mlp.fc1"),
            ("ff_context.net.2", f"{c}.mlp.fc2"),
        ):
            move(f"{new}.{ours}", theirs)
        move(f"{new}.norm1_context.linear", f"{c}.adaLN_modulation.1", swap=i == blocks - 1)
    move("proj_out", "final_layer.linear")
    move("norm_out.linear", "final_layer.adaLN_modulation.1", swap=True)
    assert sum(t.numel() for t in old.values()) == sum(t.numel() for t in state.values())
    return {name: tensor.contiguous() for name, tensor in old.items()}


@pytest.fixture(scope="module")
def sd3(tiny_folder):
    """(base folder, state dict, original state dict) of a tiny Stable Diffusion 3."""
    folder = tiny_folder("sd3")
    state = load_file(next((folder / "transformer").glob("*.safetensors")))
    blocks = len({name.split(".")[1] for name in state if name.startswith("transformer_blocks")})
    return folder, state, original_sd3(state, blocks)


def latents(model: Path, **options: object) -> torch.Tensor:
    height, width = FAMILIES["sd3"].sizes[0]
    params = SamplingParams(seed=1, output_type="latent", height=height, width=width, **FAMILIES["sd3"].call)
    with Omni(model, dtype="float32", device="cpu", **options) as omni:
        assert omni.report.to_dict()["plan"]["file"] == (str(model) if options else None)
        return omni.generate(PROMPT, params)[0].latents


def test_every_naming_gives_the_same_model(sd3, tmp_path: Path) -> None:
    folder, state, original = sd3
    expected = latents(folder)
    prefixed = {f"model.diffusion_model.{name}": tensor for name, tensor in original.items()}
    others = {"vae.decoder.conv_in.weight": torch.zeros(2), "text_encoders.t5.shared.weight": torch.zeros(2)}
    namings = {"diffusers": state, "original": original, "comfy": prefixed, "all_in_one": {**prefixed, **others}}
    for name, tensors in namings.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
        assert torch.equal(latents(tmp_path / f"{name}.safetensors", base=folder), expected), name
    bare = shutil.copytree(folder, tmp_path / "bare")  # a base without a transformer of its own
    for weights in (bare / "transformer").glob("*.safetensors"):
        weights.unlink()
    assert torch.equal(latents(tmp_path / "comfy.safetensors", base=bare), expected)
    save_file({name: tensor + 0.05 for name, tensor in original.items()}, tmp_path / "moved.safetensors")
    assert not torch.equal(latents(tmp_path / "moved.safetensors", base=folder), expected)


def test_what_does_not_fit_is_refused(sd3, tmp_path: Path) -> None:
    folder, state, original = sd3
    file = tmp_path / "model.safetensors"

    def refused(tensors: dict[str, torch.Tensor], *said: str) -> None:
        save_file(tensors, file)
        with pytest.raises(CheckpointError) as caught:
            Omni(file, base=folder, device="cpu")
        for word in said:
            assert word in str(caught.value)
        assert "\n" not in str(caught.value)

    refused({**original, "joint_blocks.0.x_block.extra": torch.zeros(2)}, "joint_blocks.0.x_block.extra")
    refused({k: v for k, v in original.items() if k != "x_embedder.proj.bias"}, "x_embedder.proj.bias")
    refused({k: v for k, v in original.items() if "joint_blocks.1.x_block.mlp" not in k}, str(file))
    refused({**state, "extra": torch.zeros(1)}, "extra")
    refused({k: v for k, v in state.items() if k != "proj_out.bias"}, "proj_out.bias")
    refused({"weight": torch.zeros(2)}, str(file))
    save_file(state, file)
    with pytest.raises(ModelError, match="--base"):
        Omni(file, device="cpu")
    with pytest.raises(ConfigError, match="single-file"):
        Omni(folder, base=folder, device="cpu")


@pytest.mark.slow
def test_original_flux_at_its_real_width(tmp_path: Path) -> None:
    """diffusers' conversion of FLUX knows one width, 3072: one block of each kind, 0.6 GB in bfloat16."""
    from diffusers import FluxTransformer2DModel

    from omniloom.pipelines.components import ComponentSpec
    from omniloom.pipelines.index import PipelineIndex
    from omniloom.pipelines.single_file import transformer_source

    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = FluxTransformer2DModel(num_layers=1, num_single_layers=1, guidance_embeds=True)
    finally:
        torch.set_default_dtype(before)
    model.save_config(tmp_path / "transformer")
    state = model.state_dict()
    for prefix in ("", "model.diffusion_model."):
        save_file({prefix + k: v for k, v in original_flux(state, 1, 1).items()}, tmp_path / "flux.safetensors")
        spec = ComponentSpec("transformer", "diffusers", "FluxTransformer2DModel", tmp_path / "transformer")
        index = PipelineIndex(tmp_path, "FluxPipeline", (spec,), (), {})
        source = transformer_source(tmp_path / "flux.safetensors", index)
        assert set(source.names()) == set(state)
        assert all(torch.equal(source.read(name), state[name]) for name in state)
