"""Our loader against ``from_pretrained``: every parameter, buffer and tensor attribute bit for bit, and strictness."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from omniloom.errors import CheckpointError, ModelError
from omniloom.pipelines.build import build_pipeline
from omniloom.pipelines.components import load_model
from omniloom.pipelines.weights import meta_leftovers
from tests.fixtures.reference import load
from tests.fixtures.tiny import FAMILIES

NAMES = [name for name in FAMILIES if name not in ("flux-wide", "flux-256", "flux-odd")]


def tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor of a module under its path, with ties listed under each name."""
    found: dict[str, torch.Tensor] = {}
    for path, part in module.named_modules():
        plain = {k: v for k, v in vars(part).items() if isinstance(v, torch.Tensor)}
        for kind, group in (("parameter", part._parameters), ("buffer", part._buffers), ("attribute", plain)):
            found |= {f"{kind} {path}.{name}": value for name, value in group.items() if value is not None}
    return found


def assert_same(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    a, b = tensors(ours), tensors(theirs)
    assert a.keys() == b.keys()
    for name, value in b.items():
        assert not a[name].is_meta, name
        if not value.is_meta:  # the libraries leave some plain attributes without values
            assert a[name].dtype == value.dtype, name
            assert torch.equal(a[name], value), name
    assert ours.training == theirs.training is False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", NAMES)
def test_equal_to_from_pretrained(tiny_folder, family: str, dtype: torch.dtype) -> None:
    reference = load(tiny_folder(family), dtype=dtype)
    ours = build_pipeline(tiny_folder(family), dtype=dtype).pipe
    assert type(ours) is type(reference)
    assert dict(ours.config) == dict(reference.config)
    for name, component in reference.components.items():
        if isinstance(component, torch.nn.Module):
            assert_same(ours.components[name], component)
            assert not meta_leftovers(ours.components[name])
        else:
            assert type(ours.components[name]) is type(component)


@pytest.mark.parametrize("family", ["flux", "sd3"])
def test_bfloat16_files_at_float32_and_back(tiny_folder, tmp_path: Path, family: str) -> None:
    folder = tmp_path / "model"
    load(tiny_folder(family), dtype=torch.bfloat16).save_pretrained(folder)
    for dtype in (torch.float32, torch.bfloat16):
        reference = load(folder, dtype=dtype)
        ours = build_pipeline(folder, dtype=dtype).pipe
        for name, component in reference.components.items():
            if isinstance(component, torch.nn.Module):
                assert_same(ours.components[name], component)


def test_sharded_component(tiny_folder, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder("flux"), tmp_path / "model")
    reference = load(folder)
    shutil.rmtree(folder / "transformer")
    reference.transformer.save_pretrained(folder / "transformer", max_shard_size="100KB")
    assert len(list((folder / "transformer").glob("*.safetensors"))) > 2
    ours = build_pipeline(folder, dtype=torch.float32).pipe
    assert_same(ours.transformer, reference.transformer)


def test_tied_weights_stay_one_storage(tiny_folder, tmp_path: Path) -> None:
    """T5's shared table, stored once (as saved) and stored twice (as old files have it): RB-31."""
    folder = shutil.copytree(tiny_folder("flux"), tmp_path / "model")
    file = next((folder / "text_encoder_2").glob("*.safetensors"))
    once = load_file(file)
    assert "shared.weight" in once and "encoder.embed_tokens.weight" not in once
    twice = {**once, "encoder.embed_tokens.weight": once["shared.weight"].clone()}
    other = {k: v for k, v in twice.items() if k != "shared.weight"}
    for stored in (once, twice, other):
        save_file(stored, file, {"format": "pt"})
        model = build_pipeline(folder, dtype=torch.float32).pipe.text_encoder_2
        assert model.shared.weight is model.encoder.embed_tokens.weight
        assert torch.equal(model.shared.weight, once["shared.weight"])


def test_legacy_key_names(tiny_folder, tmp_path: Path) -> None:
    """Names of older releases load like current ones: VAE attention, LayerNorm gamma and beta, a base-model prefix."""
    folder = shutil.copytree(tiny_folder("flux"), tmp_path / "model")
    reference = load(folder)

    vae = next((folder / "vae").glob("*.safetensors"))
    state = load_file(vae)
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    renamed = {}
    for name, value in state.items():
        for new, ancient in old.items():
            if "attentions" in name:
                name = name.replace(f".{new}.", f".{ancient}.")
        renamed[name] = value
    assert renamed.keys() != state.keys()
    save_file(renamed, vae, {"format": "pt"})

    clip = next((folder / "text_encoder").glob("*.safetensors"))
    state = load_file(clip)
    flipped = {
        (k.removeprefix("text_model.") if k.startswith("text_model.") else f"text_model.{k}"): v
        for k, v in state.items()
    }
    flipped["text_model.embeddings.position_ids"] = torch.arange(77)[None]
    save_file(flipped, clip, {"format": "pt"})

    ours = build_pipeline(folder, dtype=torch.float32).pipe
    assert_same(ours.vae, reference.vae)
    assert_same(ours.text_encoder, reference.text_encoder)


@pytest.mark.parametrize("family", ["qwen-image", "flux2", "flux2-klein"])
def test_names_as_saved_and_as_the_module_has_them(tiny_folder, tmp_path: Path, family: str) -> None:
    """transformers saves some encoders under older names than their modules have; both load, to the same model."""
    folder = shutil.copytree(tiny_folder(family), tmp_path / "model")
    reference = load(folder)
    renamed = 0
    for name, component in reference.components.items():
        if not isinstance(component, torch.nn.Module) or "text_encoder" not in name and "encoder" not in name:
            continue
        file = next((folder / name).glob("*.safetensors"))
        stored = load_file(file)
        ties = set(getattr(component, "all_tied_weights_keys", None) or {})
        current = {k: v.clone() for k, v in component.state_dict().items() if k not in ties}
        renamed += len(current.keys() - stored.keys())
        save_file(current, file, {"format": "pt"})
    ours = build_pipeline(folder, dtype=torch.float32).pipe
    for name, component in reference.components.items():
        if isinstance(component, torch.nn.Module):
            assert_same(ours.components[name], component)
    assert renamed or family == "flux2-klein"


def damaged(folder: Path, tmp_path: Path, component: str, change: Any) -> Path:
    copy = shutil.copytree(folder, tmp_path / "damaged")
    file = next((copy / component).glob("*.safetensors"))
    state = load_file(file)
    change(state)
    save_file(state, file, {"format": "pt"})
    return copy


@pytest.mark.parametrize("component", ["transformer", "text_encoder", "text_encoder_2", "vae"])
def test_missing_unknown_and_misshapen_keys_are_refused(tiny_folder, tmp_path: Path, component: str) -> None:
    """RB-30: no model starts with values that the file does not give it."""
    names = list(load_file(next((tiny_folder("flux") / component).glob("*.safetensors"))))
    norm = next(name for name in names if "norm" in name and name.endswith("weight"))
    many = names[3:20]

    cases: list[tuple[Any, list[str]]] = [
        (lambda s: s.pop(norm), [norm, "missing"]),
        (
            lambda s: [s.pop(name) for name in many],
            [many[0] if many[0] == min(many) else "in all", f"{len(many)} in all"],
        ),
        (lambda s: s.update({"extra.weight": torch.zeros(2)}), ["extra.weight"]),
        (lambda s: s.update({norm: torch.zeros(*s[norm].shape, 2)}), [norm, "shape"]),
    ]
    for i, (change, said) in enumerate(cases):
        folder = damaged(tiny_folder("flux"), tmp_path / str(i), component, change)
        with pytest.raises(CheckpointError) as caught:
            build_pipeline(folder, dtype=torch.float32)
        message = str(caught.value)
        assert str(folder / component) in message and "\n" not in message
        for word in said:
            assert word in message


def test_foreign_folders_are_refused(tiny_folder, tmp_path: Path) -> None:
    def refused(folder: Path, *said: str) -> None:
        with pytest.raises(ModelError) as caught:
            build_pipeline(folder, dtype=torch.float32)
        for word in said:
            assert word in str(caught.value)
        assert "\n" not in str(caught.value)

    refused(tmp_path / "nothing", "does not exist")
    refused(tmp_path, "no model_index.json")
    refused(tiny_folder("flux") / "transformer", "single component")
    refused(tiny_folder("flux").parent, "did you mean", str(tiny_folder("flux")))

    folder = shutil.copytree(tiny_folder("flux"), tmp_path / "model")
    index = json.loads((folder / "model_index.json").read_text())

    def with_index(**changes: Any) -> None:
        (folder / "model_index.json").write_text(json.dumps({**index, **changes}))

    with_index(transformer=["diffusers", "FluxTransformer3DModel"])
    refused(folder, "FluxTransformer3DModel", "did you mean 'FluxTransformer2DModel'")
    with_index(transformer=["evil", "Model"])
    refused(folder, "'evil'", "only diffusers and transformers")
    with_index(_class_name="FluxPipelin")
    refused(folder, "FluxPipelin", "did you mean 'FluxPipeline'")
    with_index(upscaler=["diffusers", "AutoencoderKL"])
    refused(folder, "no component 'upscaler'")
    (folder / "model_index.json").write_text(json.dumps({k: v for k, v in index.items() if k != "vae"}))
    refused(folder, "lacks components", "vae")
    (folder / "model_index.json").write_text("{")
    refused(folder, "not valid JSON")
    with_index()
    shutil.rmtree(folder / "text_encoder")
    refused(folder, str(folder / "text_encoder"), "missing")


def test_code_from_a_checkpoint_is_never_run(tiny_folder, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder("flux"), tmp_path / "model")
    index = json.loads((folder / "model_index.json").read_text())
    index["transformer"] = ["custom", "Evil"]
    (folder / "model_index.json").write_text(json.dumps(index))
    (folder / "transformer" / "custom.py").write_text("raise SystemExit('ran')\nclass Evil: ...")
    with pytest.raises(ModelError, match="own code"):
        build_pipeline(folder, dtype=torch.float32)


def test_variants_are_loaded_on_request_only(tiny_folder, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder("flux"), tmp_path / "model")
    reference = load(folder)
    half = load(folder, dtype=torch.float16)
    half.transformer.save_pretrained(folder / "transformer", variant="fp16")
    plain = build_pipeline(folder, dtype=torch.float32).pipe
    assert_same(plain.transformer, reference.transformer)
    ours = build_pipeline(folder, dtype=torch.float32, variant="fp16").pipe
    assert torch.equal(ours.transformer.proj_out.weight, half.transformer.proj_out.weight.float())
    assert_same(ours.vae, reference.vae)
    with pytest.raises(ModelError, match="bf16"):
        build_pipeline(folder, dtype=torch.float32, variant="bf16")


def test_progress_counts_every_byte(tiny_folder) -> None:
    seen: dict[str, tuple[int, int]] = {}
    build_pipeline(
        tiny_folder("flux"), dtype=torch.bfloat16, progress=lambda n, done, total: seen.update({n: (done, total)})
    )
    assert set(seen) == {"transformer", "vae", "text_encoder", "text_encoder_2"}
    assert all(done == total > 0 for done, total in seen.values())


def test_fp32_islands_are_kept(tmp_path: Path) -> None:
    """``_keep_in_fp32_modules`` of a diffusers model (Wan's time embedder) and of T5 in float16."""
    from diffusers import WanTransformer3DModel
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(0)
    wan = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=32,
        num_layers=1,
        cross_attn_norm=True,
        rope_max_seq_len=32,
    )
    wan.save_pretrained(tmp_path / "wan")
    for dtype in (torch.bfloat16, torch.float16):
        ours = load_model(WanTransformer3DModel, tmp_path / "wan", dtype=dtype)
        assert_same(ours, WanTransformer3DModel.from_pretrained(tmp_path / "wan", torch_dtype=dtype))
        assert ours.condition_embedder.time_embedder.linear_1.weight.dtype == torch.float32
        assert ours.blocks[0].attn1.to_q.weight.dtype == dtype
    T5EncoderModel(T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)).save_pretrained(
        tmp_path / "t5"
    )
    for dtype, kept in ((torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)):
        ours = load_model(T5EncoderModel, tmp_path / "t5", dtype=dtype)
        assert_same(ours, T5EncoderModel.from_pretrained(tmp_path / "t5", dtype=dtype))
        assert ours.encoder.block[0].layer[-1].DenseReluDense.wo.weight.dtype == kept
