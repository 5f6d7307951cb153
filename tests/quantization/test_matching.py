"""The matching styles of lists of layers."""

from __future__ import annotations

import pytest

from omniloom.errors import ConfigError
from omniloom.quantization.matching import Matcher, check_shards, layer_names, matches, unmatched_everywhere
from omniloom.quantization.methods.base import IgnoreList

BLOCK = "transformer_blocks.3."


def match(style: str, entry: str, path: str, class_name: str = "Linear") -> bool:
    return matches(style, entry, layer_names(path, "transformer"), class_name)


@pytest.mark.parametrize(
    ("entry", "path", "expected"),
    [
        ("blocks.3.img_mlp.net.0", "blocks.3.img_mlp.net.0", True),
        ("img_mlp", "blocks.3.img_mlp.net.0", True),
        ("img_mlp", "blocks.3.img_mlp2.net.0", False),
        ("mlp", "blocks.3.img_mlp.net.0", False),
        ("3.img_mlp", "blocks.3.img_mlp.net.0", True),
        ("3.img_mlp", "blocks.13.img_mlp.net.0", False),
        ("blocks.3", "blocks.3.img_mlp.net.0", True),
        ("blocks.3", "blocks.30.img_mlp.net.0", False),
        ("blocks.3", "transformer_blocks.3.x", False),
        ("transformer.blocks.3.x", "blocks.3.x", True),
        ("transformer", "blocks.3.x", True),
        ("re:.*img_mlp", "blocks.3.img_mlp.net.0", True),
        ("re:img_mlp", "blocks.3.img_mlp.net.0", False),
        (r"re:blocks\.[0-3]\.", "blocks.3.x", True),
        (r"re:blocks\.[0-3]\.", "blocks.4.x", False),
        (r"re:transformer\.blocks\.3", "blocks.3.x", True),
        ("blocks.*.img_mlp*", "blocks.3.img_mlp.net.0", True),
        ("*img_mlp*", "blocks.3.img_mlp.net.0", True),
        ("*.img_mlp", "blocks.3.img_mlp.net.0", False),
        ("blocks.[0-2].*", "blocks.3.x", False),
        ("blocks.?.x", "blocks.3.x", True),
        ("transformer.blocks.*", "blocks.3.x", True),
    ],
)
def test_vllm_style(entry: str, path: str, expected: bool) -> None:
    assert match("vllm", entry, path) is expected


@pytest.mark.parametrize(
    ("entry", "path", "expected"),
    [
        ("proj_out", "single.0.proj_out", True),
        ("proj_out", "proj_out", True),
        ("proj_out", "single.0.proj_out.linear", True),
        ("proj_out", "single.0.my_proj_out", False),
        ("proj_out", "single.0.my_proj_out.linear", True),  # "proj_out." is in the path: so do the libraries
        ("blocks.3.x", "blocks.3.x", True),
        ("blocks.3", "blocks.3.x", True),
        ("*proj*", "blocks.0.proj", False),
    ],
)
def test_huggingface_style(entry: str, path: str, expected: bool) -> None:
    assert match("hf", entry, path) is expected


@pytest.mark.parametrize(
    ("entry", "path", "expected"),
    [
        ("proj_out*", "proj_out", True),
        ("proj_out*", "proj_out_2", True),
        ("proj_out*", "blocks.0.proj_out", False),
        ("*proj_out*", "blocks.0.proj_out", True),
        ("blocks.0.*", "blocks.0.x", True),
        ("blocks.0", "blocks.0.x", True),
        ("blocks.0", "blocks.01.x", False),
        ("x", "blocks.0.x", False),
        ("blocks.0.attn.to_out.0*", "blocks.0.attn.to_out.0", True),
        ("blocks.0.attn.to_out", "blocks.0.attn.to_out.0", True),
    ],
)
def test_modelopt_style(entry: str, path: str, expected: bool) -> None:
    assert match("modelopt", entry, path) is expected


@pytest.mark.parametrize(
    ("entry", "path", "expected"),
    [
        ("blocks.0.x", "blocks.0.x", True),
        ("blocks.0", "blocks.0.x", False),
        ("x", "blocks.0.x", False),
        ("re:.*x$", "blocks.0.x", True),
        ("re:x", "blocks.0.x", False),
        ("Linear", "blocks.0.x", True),
        ("Conv2d", "blocks.0.x", False),
    ],
)
def test_compressed_tensors_style(entry: str, path: str, expected: bool) -> None:
    assert match("compressed-tensors", entry, path) is expected


def test_substring_style() -> None:
    assert match("substring", "ocks.3.im", "blocks.3.img_mlp")
    assert not match("substring", "ocks.3.im", "blocks.13.img_mlp")


def test_names_of_other_runtimes() -> None:
    for shard in ("to_q", "to_k", "to_v"):
        assert match("vllm", "attn.to_qkv", f"{BLOCK}attn.{shard}")
        assert match("modelopt", f"{BLOCK}attn.to_qkv", f"{BLOCK}attn.{shard}")
    assert match("vllm", "add_kv_proj", f"{BLOCK}attn.add_q_proj")
    assert match("vllm", "feed_forward.w13", "layers.0.feed_forward.w3")
    assert not match("vllm", "feed_forward.w13", "layers.0.feed_forward.w2")
    assert match("vllm", "blocks.0.attn1.to_out", "blocks.0.attn1.to_out.0")
    assert match("compressed-tensors", "blocks.0.ffn.net_0.proj", "blocks.0.ffn.net.0.proj")
    assert match("compressed-tensors", "blocks.0.ffn.net_2", "blocks.0.ffn.net.2")
    assert not match("vllm", "to_qkv", f"{BLOCK}attn.to_out.0")


def test_names_of_the_checkpoint() -> None:
    names = layer_names("language_model.layers.0.x", "text_encoder", ["model.layers.0.x"])
    assert matches("compressed-tensors", "model.layers.0.x", names)
    assert matches("modelopt", "text_encoder.model.*", names)
    assert len(set(names)) == len(names)
    assert layer_names("to_q") == ("to_q", "to_qkv")


def test_a_matcher_remembers() -> None:
    lists = [
        IgnoreList("ignored_layers", "vllm", ("img_mlp", "never", "blocks.0.img_mlp")),
        IgnoreList("modules_to_not_convert", "hf", ("head", "never")),
    ]
    matcher = Matcher(lists)
    assert matcher.find(layer_names("blocks.0.img_mlp")) == ("ignored_layers", "img_mlp")
    assert matcher.find(layer_names("blocks.0.other")) is None
    assert matcher.find(layer_names("head")) == ("modules_to_not_convert", "head")
    assert matcher.unmatched() == ("ignored_layers: never", "modules_to_not_convert: never")
    assert Matcher([]).unmatched() == ()


def test_entries_that_match_in_no_component() -> None:
    both = [IgnoreList("ignored_layers", "vllm", ("a", "b", "c"))]
    other = [IgnoreList("ignored_layers", "vllm", ("only_there",))]
    a, b, c = (f"ignored_layers: {name}" for name in "abc")
    assert unmatched_everywhere([]) == ()
    assert unmatched_everywhere([(both, (a, b)), (both, (b, c))]) == (b,)
    assert unmatched_everywhere([(both, (a,)), (other, ("ignored_layers: only_there",))]) == (
        a,
        "ignored_layers: only_there",
    )


def test_parts_of_one_matrix() -> None:
    assert check_shards("to_qkv", {"to_q": True, "to_k": True})
    assert not check_shards("to_qkv", {"to_q": False, "to_k": False})
    assert not check_shards("to_out", {})
    with pytest.raises(ConfigError, match="^layer to_qkv is one matrix of 2 parts, .*: to_q but not to_k; list all"):
        check_shards("to_qkv", {"to_q": True, "to_k": False})


def test_bad_entries() -> None:
    with pytest.raises(ConfigError, match=r"^ignored_layers: 're:\(' is not a regular expression: missing \)"):
        Matcher([IgnoreList("ignored_layers", "vllm", ("re:(",))])
    with pytest.raises(ConfigError, match="^x: no matching rule 'odd'"):
        Matcher([IgnoreList("x", "odd", ("a",))])
