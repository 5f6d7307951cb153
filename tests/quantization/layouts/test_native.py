"""The tensors that each codec's fields are stored as."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from omniloom.errors import CheckpointError
from omniloom.quantization import build_quant_config, config_from_disk
from omniloom.quantization.codecs import get_codec
from omniloom.quantization.expert_stack import ExpertStack
from omniloom.quantization.layouts import names, native
from omniloom.quantization.methods import online_methods
from omniloom.quantization.scheme import LayerScheme
from tests.quantization.schemes import dense, same_bytes

CODECS: dict[str, Any] = {
    **{name: get_codec(name) for name in names.SUFFIXES},
    "bnb4 fp4": get_codec("bnb4", quant_type="fp4", double_quant=False),
}


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("shape", [(96, 64), (48, 120)])
def test_there_and_back(name: str, shape: tuple[int, int]) -> None:
    codec = CODECS[name]
    if codec.problem(shape):
        pytest.skip(codec.problem(shape))
    fields = codec.encode(dense(*shape).weight.detach())
    tensors = native.to_tensors(codec, shape, fields, torch.bfloat16)
    specs = native.stored_specs(codec, shape)
    assert {suffix: (t.dtype, tuple(t.shape)) for suffix, t in tensors.items()} == specs
    assert set(tensors) <= names.known_suffixes() | {""} and "" in tensors
    assert native.stored_codec(codec, shape, {s: tuple(t.shape) for s, t in tensors.items()}, "x.weight") == codec
    back = native.from_tensors(codec, tensors)
    assert set(back) == set(fields)
    for field, tensor in fields.items():
        assert same_bytes(back[field].reshape(tensor.shape), tensor), field


@pytest.mark.parametrize("name", CODECS)
def test_stacks_there_and_back(name: str) -> None:
    """Every name that a stack is stored under is looked for when it is loaded."""
    codec, shape, experts = CODECS[name], (96, 64), 3
    stack = torch.stack([dense(*shape).weight.detach() * (n + 1) for n in range(experts)])
    made = ExpertStack.from_dense(stack, LayerScheme(codec))
    tensors = native.to_tensors(codec, shape, made.fields, torch.bfloat16, stack=True)
    specs = native.stored_specs(codec, shape, experts)
    assert {suffix: (t.dtype, tuple(t.shape)) for suffix, t in tensors.items()} == specs
    assert set(tensors) <= names.known_suffixes() | {""} and "" in tensors
    found = {suffix: tuple(t.shape) for suffix, t in tensors.items()}
    assert native.stored_codec(codec, shape, found, "x.down_proj", experts) == codec
    back = native.from_tensors(codec, tensors, stack=True)
    assert set(back) == set(made.fields)
    assert all(same_bytes(back[field], tensor) for field, tensor in made.fields.items())
    found.pop(next(suffix for suffix in found if suffix))
    with pytest.raises(CheckpointError, match="is missing: 'x.down_proj' is stored as"):
        native.stored_codec(codec, shape, found, "x.down_proj", experts)


def test_what_is_missing_or_of_another_shape_is_named() -> None:
    codec = CODECS["int8_channel"]
    with pytest.raises(CheckpointError, match=r"^'x.weight_scale' is missing: 'x.weight' is stored as int8_channel"):
        native.stored_codec(codec, (96, 64), {"": (96, 64)}, "x.weight")
    with pytest.raises(CheckpointError, match=r"^'x.weight_scale' has shape \[95, 1\], int8_channel of a \[96, 64\]"):
        native.stored_codec(codec, (96, 64), {"": (96, 64), "_scale": (95, 1)}, "x.weight")


@pytest.mark.parametrize(("scales", "expected"), [((), "fp8_tensor"), ((1,), "fp8_tensor"), ((96, 1), "fp8_channel")])
def test_fp8_scales_say_what_they_are_for(scales: tuple[int, ...], expected: str) -> None:
    found = native.stored_codec(CODECS["fp8_channel"], (96, 64), {"": (96, 64), "_scale": scales}, "x.weight")
    assert found.name == expected


def test_other_orders_of_llm_int8_are_refused() -> None:
    codec = CODECS["int8_rowmax"]
    tensors = native.to_tensors(codec, (96, 64), codec.encode(dense().weight.detach()), torch.float32)
    [format_key] = [suffix for suffix in tensors if "weight_format" in suffix]
    tensors[format_key] = torch.ones((), dtype=torch.uint8)
    with pytest.raises(CheckpointError, match="weight_format is 1: only 0"):
        native.from_tensors(codec, tensors)


@pytest.mark.parametrize("method", online_methods())
def test_the_config_of_a_saved_component(method: str) -> None:
    config: Any = build_quant_config(method)
    disk = native.disk_config(config, ["proj_out", "a.b"])
    again = config_from_disk(disk)
    assert again is not None and again.method == method and again.serialized
    assert {e for part in again.ignore_lists() for e in part.entries} == {"a.b", "proj_out"}
    for key in again.layout_keys:
        assert getattr(again, key) == getattr(config, key), key
