"""Which layers of real model classes are quantized by default, and the rule that keeps each of the others."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from omniloom.errors import ConfigError
from omniloom.quantization import build_quant_config, quantize_
from omniloom.quantization.never import HEAD, MIN_SIDE, TOWER, never_quantized
from omniloom.quantization.rules import Selection, select_layers
from tests.fixtures.tiny import FAMILIES
from tests.quantization.default_layers import FF, TABLE
from tests.quantization.test_experts import build as random_model
from tests.quantization.test_experts import omni


def made(family: str) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return FAMILIES[family].make()


def patterns(paths: Any) -> set[str]:
    return {re.sub(r"\d+", "N", path) for path in paths}


def by_reason(selection: Selection) -> dict[str, set[str]]:
    reasons = set(selection.skipped.values())
    return {r: patterns(path for path, why in selection.skipped.items() if why == r) for r in reasons}


@pytest.mark.parametrize("family", TABLE)
def test_denoisers(family: str) -> None:
    quantized, kept = TABLE[family]
    pipe = made(family)
    for name in ("transformer", "transformer_2"):
        if (model := getattr(pipe, name, None)) is None:
            continue
        selection = select_layers(model, build_quant_config("int8"), component=name)  # type: ignore[arg-type]
        assert patterns(selection.quantized) == set(quantized.split())
        assert by_reason(selection) == {reason: set(names.split()) for reason, names in kept.items()}
        linears = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
        assert sorted([*selection.quantized, *selection.skipped]) == sorted(linears)
        everything = select_layers(model, build_quant_config("int8", all_layers=True))  # type: ignore[arg-type]
        short = [path for path in linears if min(model.get_submodule(path).weight.shape) < MIN_SIDE]
        assert everything.skipped == dict.fromkeys(short, "a side shorter than 16")
        assert sorted([*everything.quantized, *short]) == sorted(linears)


def test_every_family_is_in_the_table() -> None:
    from tests.fixtures.registry import FAMILIES as ALL

    same = {"flux": "flux-guidance", "wan21": "wan22-t2v", "wan22": "wan22-t2v"}
    for name in ALL:
        assert any(name.startswith(known) for known in (*TABLE, *same)), name


def test_encoders() -> None:
    config: Any = build_quant_config("int8")
    vision = select_layers(made("qwen-image").text_encoder, config)
    assert {path.split(".")[1] for path in vision.quantized} == {"language_model"}
    assert set(by_reason(vision)) == {TOWER, HEAD}
    assert by_reason(vision)[HEAD] == {"lm_head"}
    assert all(".visual." in path for path in by_reason(vision)[TOWER])
    for family, name in (("flux", "text_encoder_2"), ("wan22-t2v", "text_encoder")):
        t5 = select_layers(getattr(made(family), name), config)
        assert not t5.skipped and {"SelfAttention.k", "DenseReluDense.wo"} <= {
            p.split("N.")[-1] for p in patterns(t5.quantized)
        }
    clip = select_layers(made("sd3").text_encoder, config)
    assert clip.skipped == {"text_projection": HEAD}


@pytest.mark.parametrize("path", ["transformer_blocks.0.ff.net.0.proj", "blocks.1.attn1.to_q", "single.0.proj_out"])
def test_nothing_against_it(path: str) -> None:
    assert never_quantized(path) is None


@pytest.mark.parametrize(
    "path",
    [
        "blocks.0.norm1.linear",
        "norm_out",
        "proj_out",
        "proj_out.linear",
        "blocks.0.modulation.1",
        "lm_head",
        "model.lm_head",
        "head",
        "layers.0.mlp.gate",
        "layers.0.mlp.shared_expert_gate",
        "thinker.visual.blocks.0.proj",
        "code2wav.x",
        "audio_tower.fc1",
        "time_embedding.linear_1",
        "t_embedder.mlp.0",
        "patch_embedding",
        "final_layer.linear",
        "model.embed_tokens",
    ],
)
def test_never(path: str) -> None:
    assert never_quantized(path)


def test_experts_of_omni_models() -> None:
    model = random_model(omni)
    selection = select_layers(model, build_quant_config("int8"), component="thinker")  # type: ignore[arg-type]
    found = patterns(selection.quantized)
    assert {"layers.N.mlp.experts.gate_up_proj", "layers.N.mlp.experts.down_proj"} <= found
    assert {"layers.N.self_attn.q_proj", "layers.N.self_attn.o_proj"} <= found
    assert not any(path.endswith("gate") or "router" in path for path in selection.quantized)
    listed: Any = build_quant_config("int8", ignored_layers=["experts.gate_proj", "experts.up_proj"])
    kept = select_layers(model, listed).skipped
    assert patterns(path for path in kept if "experts" in path) == {"layers.N.mlp.experts.gate_up_proj"}
    with pytest.raises(ConfigError, match=r"experts.gate_up_proj is one matrix of 2 parts.*gate_proj but not"):
        select_layers(model, build_quant_config("int8", ignored_layers=["experts.gate_proj"]))  # type: ignore[arg-type]


SPELLINGS: dict[str, list[str]] = {
    "names": [
        "to_q",
        "to_k",
        "to_v",
        "to_out",
        "add_q_proj",
        "add_k_proj",
        "add_v_proj",
        "to_add_out",
        "single_transformer_blocks",
    ],
    "fused": ["to_qkv", "add_kv_proj", "attn.to_out", "to_add_out", "single_transformer_blocks"],
    "glob": ["*.attn.*", "single_*"],
    "regex": [r"re:.*\.attn\.", "re:single_"],
    "prefixed": ["transformer.transformer_blocks.*.attn.*", "transformer.single_transformer_blocks"],
    "prefixed regex": [r"re:transformer\..*attn", r"re:transformer\.single"],
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_only_the_mlp(spelling: str) -> None:
    config: Any = build_quant_config("int8", ignored_layers=SPELLINGS[spelling])
    selection = select_layers(made("flux").transformer, config, component="transformer")
    assert patterns(selection.quantized) == {f"transformer_blocks.N.{name}" for name in FF.split()}
    assert selection.unmatched == ()
    why = selection.skipped["transformer_blocks.0.attn.to_q"]
    assert why == f"listed: ignored_layers: {SPELLINGS[spelling][0]}"


def test_entries_that_match_nothing() -> None:
    config: Any = build_quant_config("int8", ignored_layers=["to_q", "img_mpl"], modules_to_not_convert=["proj_out"])
    selection = select_layers(made("flux").transformer, config)
    assert selection.unmatched == ("ignored_layers: img_mpl",)


def test_separate_parts_may_differ_but_not_those_of_one_matrix() -> None:
    config: Any = build_quant_config("int8", ignored_layers=["to_q"])
    selection = select_layers(made("flux").transformer, config)
    assert "transformer_blocks.0.attn.to_k" in selection.quantized
    assert "transformer_blocks.0.attn.to_q" in selection.skipped
    whole = nn.ModuleDict({"attn": nn.ModuleDict({"to_qkv": nn.Linear(32, 96), "to_out": nn.Linear(32, 32)})})
    with pytest.raises(ConfigError, match=r"attn.to_qkv is one matrix of 3 parts, .*attn.to_q but not attn.to_k"):
        select_layers(whole, config)
    all_three: Any = build_quant_config("int8", ignored_layers=["to_q", "attn.to_k", "*to_v"])
    assert set(select_layers(whole, all_three).quantized) == {"attn.to_out"}
    assert select_layers(whole, all_three).unmatched == ()


def test_names_of_the_checkpoint() -> None:
    model = nn.ModuleDict({"new": nn.Linear(32, 32), "other": nn.Linear(32, 32)})
    config: Any = build_quant_config("int8", ignored_layers=["old"])
    selection = select_layers(model, config, stored_names={"new.weight": "old.weight", "other.weight": "other.weight"})
    assert set(selection.quantized) == {"other"} and selection.unmatched == ()


def test_nothing_left_is_an_error() -> None:
    with pytest.raises(ConfigError) as error:
        select_layers(nn.Sequential(nn.Linear(64, 8)), build_quant_config("fp8"), component="vae")  # type: ignore[arg-type]
    assert str(error.value) == (
        "quantization method 'fp8' matches no layer of vae: all 1 are skipped (a side shorter than 16)"
    )
    with pytest.raises(ConfigError, match="matches no layer of model: it has no Linear layer"):
        select_layers(nn.Conv2d(3, 3, 3), build_quant_config("fp8"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"matches no layer of transformer: all 28 are skipped \(.*listed: "):
        select_layers(
            made("flux").transformer, build_quant_config("fp8", ignored_layers=["*"]), component="transformer"
        )  # type: ignore[arg-type]


def test_layers_that_a_config_singles_out_must_exist() -> None:
    model = made("wan22-t2v").transformer
    good: Any = build_quant_config("mxfp4", w4a8_fallback_layers=["blocks.0.attn1.to_q"])
    assert select_layers(model, good).quantized["blocks.0.attn1.to_q"].activation.codec.name == "mxfp8"  # type: ignore[union-attr]
    for path, why in {
        "blocks.0.attn1.to_qq": "is no layer of the model; did you mean 'blocks.0.attn1.to_q'?",
        "proj_out": "is not quantized",
    }.items():
        config: Any = build_quant_config("mxfp4", w4a8_fallback_layers=[path])
        with pytest.raises(ConfigError, match=re.escape(f"w4a8_fallback_layers names '{path}', which {why}")):
            select_layers(model, config)


def test_tied_weights_stay() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            tie_word_embeddings=True,
        )
    )
    selection = quantize_(model, "int8", all_layers=True)
    assert selection.skipped == {"lm_head": "tied to another parameter"}
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_subclasses_with_a_forward_of_their_own_are_not_touched() -> None:
    class Odd(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    model = nn.Sequential(Odd(32, 32), nn.Linear(32, 32))
    assert set(select_layers(model, build_quant_config("int8")).quantized) == {"1"}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "bound"),
    [
        ({"method": "fp8", "weight_block_size": [32, 32]}, 0.0264),
        ({"method": "fp8", "weight_block_size": [256, 256]}, 0.0264),
        *((({"method": "bitsandbytes", "block_size": size}), 0.0920) for size in (32, 64, 128, 256)),
        ("int8", 0.0083),
        ("mxfp8", 0.0294),
        ("mxfp4", 0.1151),
        ({"method": "mxfp4_dualscale", "num_bf16_fallback_layers": 0}, 0.1115),
    ],
)
def test_widths_that_no_group_divides(spec: Any, bound: float) -> None:
    """FLUX of width 120: every layer is quantized, and its last columns are as good as the others; or it is listed."""
    model = made("flux-odd").transformer
    dense = {path: m.weight.detach().clone() for path, m in model.named_modules() if isinstance(m, nn.Linear)}
    selection = quantize_(model, build_quant_config(spec))
    assert set(selection.quantized) | set(selection.skipped) == set(dense)
    odd = [path for path in selection.quantized if dense[path].shape[1] % 32]
    for path in odd:
        layer = model.get_submodule(path)
        tail = dense[path].shape[1] % 32
        for part in (slice(None), slice(-tail, None)):
            wanted = dense[path][:, part]
            assert float((layer.dense_weight()[:, part] - wanted).norm() / wanted.norm()) < bound * 1.6, path
    assert odd or any("32" in why or "group" in why for why in selection.skipped.values())
