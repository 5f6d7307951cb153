"""Stacked experts: the module keeps its forward and computes what the dense eager one does with decoded weights."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from omniloom.errors import CheckpointError, ConfigError
from omniloom.quantization.convert import dequantize_, make_shells, missing, quantize_modules
from omniloom.quantization.expert_stack import ExpertStack
from omniloom.quantization.experts import expert_parameters
from tests.quantization.schemes import SCHEMES, error

SMALL: dict[str, Any] = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    num_experts_per_tok=2,
)


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralModel

    return MixtralModel(MixtralConfig(**SMALL, num_local_experts=4))


def omni() -> nn.Module:
    from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as modeling
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeTextConfig

    rope = {"rope_type": "default", "mrope_section": [2, 3, 3]}
    config = Qwen3OmniMoeTextConfig(**SMALL, num_experts=4, moe_intermediate_size=32, rope_parameters=rope)
    return modeling.Qwen3OmniMoeThinkerTextModel(config)


def gpt_oss() -> nn.Module:
    """Multiplies by (K, N) matrices, with biases and interleaved gates."""
    from transformers import GptOssConfig, GptOssModel

    return GptOssModel(GptOssConfig(**SMALL, num_local_experts=4))


def build(make: Any) -> nn.Module:
    torch.manual_seed(0)
    model = make().eval().requires_grad_(False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    return {path: module for path, module in model.named_modules() if expert_parameters(module)}


def run(model: nn.Module) -> torch.Tensor:
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).last_hidden_state


@pytest.mark.parametrize("make", [mixtral, omni, gpt_oss])
@pytest.mark.parametrize("name", ["int8_weights", "nf4", "fp8"])
def test_the_output_is_that_of_the_decoded_weights(make: Any, name: str) -> None:
    model = build(make)
    dense = run(model)
    paths = experts_of(model)
    assert len(paths) == 2
    kind = type(next(iter(paths.values())))
    oracle = copy.deepcopy(model)
    oracle.config._experts_implementation = "eager"
    quantize_modules(model, {path: SCHEMES[name] for path in paths})
    for path, module in experts_of(oracle).items():
        mine = model.get_submodule(path)
        assert isinstance(mine, kind) and type(mine) is not kind and not mine._parameters.get("gate_up_proj")
        for stack in ("gate_up_proj", "down_proj"):
            held, was = getattr(mine, stack), getattr(module, stack)
            assert held.shape == was.shape and held.dtype == was.dtype and held.device == was.device
            assert was.abs().sum() and 0 < error(held.dense_weight(), was) < 0.12
            was.data = held.dense_weight()
    got = run(model)
    assert torch.equal(got, run(oracle))
    assert 0.0005 < error(got, dense) < 0.3
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(twin), got)
    dequantize_(model)
    model.config._experts_implementation = "eager"
    assert type(model.get_submodule(path)) is kind and torch.equal(run(model), got)


@pytest.mark.parametrize("make", [mixtral, gpt_oss])
def test_activations_of_experts_are_quantized_too(make: Any) -> None:
    outputs = {}
    for name in ("int8", "int8_weights", "mxfp4"):
        model = build(make)
        dense = run(model)
        quantize_modules(model, {path: SCHEMES[name] for path in experts_of(model)})
        outputs[name] = run(model)
    assert not torch.equal(outputs["int8"], outputs["int8_weights"])
    assert error(outputs["int8"], dense) < 0.1 < error(outputs["mxfp4"], dense)


def test_fields_have_names_bytes_and_types_of_their_own() -> None:
    model = build(mixtral)
    path = "layers.0.mlp.experts"
    quantize_modules(model, {f"{path}.down_proj": SCHEMES["int8_weights"]})
    module = model.get_submodule(path)
    assert isinstance(module.down_proj, ExpertStack) and isinstance(module.gate_up_proj, nn.Parameter)
    state = model.state_dict()
    codes = state[f"{path}.down_proj.codes"]
    assert codes.shape == (4, 32, 48) and codes.dtype == torch.int8
    assert module.down_proj.nbytes() == 4 * (32 * 48 + 32 * 4)
    wanted = run(model)
    model.to(torch.bfloat16).to(torch.float32)
    assert state[f"{path}.down_proj.scale"].dtype == torch.float32
    assert module.down_proj.dtype == torch.float32 and error(run(model), wanted) < 0.05
    with pytest.raises(CheckpointError, match="codes"):
        module.down_proj.set_field("codes", torch.zeros(4, 48, 32, dtype=torch.int8))


def test_shells_take_their_fields_later() -> None:
    model = build(mixtral)
    quantize_modules(model, {path: SCHEMES["int8"] for path in experts_of(model)})
    wanted = run(model)
    shell = build(mixtral)
    paths = make_shells(shell, {path: SCHEMES["int8"] for path in experts_of(shell)}, torch.float32)
    assert len(paths) == 4 == len(missing(shell)) and paths[0].endswith("experts.gate_up_proj")
    for path in paths:
        source = model.get_submodule(path)
        shell.get_submodule(path).set_fields(dict(source.named_buffers()))
    assert not missing(shell) and torch.equal(run(shell), wanted)


def test_what_is_no_experts_module_is_refused() -> None:
    model = build(mixtral)
    with pytest.raises(ConfigError, match="MixtralSparseMoeBlock"):
        quantize_modules(model, {"layers.0.mlp": SCHEMES["int8"]})
    with pytest.raises(ConfigError, match="not there"):
        quantize_modules(model, {"layers.0.mlp.experts.gate_proj": SCHEMES["int8"]})
    assert expert_parameters(nn.Linear(2, 2)) == []
