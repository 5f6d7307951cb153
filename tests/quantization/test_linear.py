"""The quantized Linear: looks like a Linear, keeps its fields whatever happens to it, computes what its scheme says."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from omniloom.diffusion.hooks.state import calling
from omniloom.errors import CheckpointError, EngineError
from omniloom.quantization.codecs import get_codec
from omniloom.quantization.kernels.handles import live_handles
from omniloom.quantization.linear import QuantizedLinear, prepare_kernels
from omniloom.quantization.scheme import Activation, LayerScheme
from tests.quantization.schemes import FP8, INT8, SCHEMES, STEPS, dense, error, same_bytes, tokens

BOUNDS = {"mxfp4": 0.20, "mxfp4_dual": 0.20, "nf4": 0.12, "int4": 0.13, "mxfp8": 0.05, "fp8": 0.04, "int8": 0.025}


class Step:
    request, component, branch = "r", "transformer", "cond"

    def __init__(self, step: int) -> None:
        self.step = step


def make(name: str, **kwargs: Any) -> tuple[nn.Linear, QuantizedLinear]:
    source = dense()
    return source, QuantizedLinear.from_dense(source, SCHEMES[name], **kwargs)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_computes_about_what_the_dense_layer_does(name: str, dtype: torch.dtype) -> None:
    source, layer = make(name)
    x = tokens(2, 40, 64).to(dtype)
    y = layer(x)
    assert y.dtype == dtype and y.shape == (2, 40, 96)
    product, wanted = y.float() - source.bias, source(x.float()) - source.bias
    bound = next(value for key, value in BOUNDS.items() if name.startswith(key))
    assert 0.001 < error(product, wanted) < bound * 1.2


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16])
def test_biases_are_kept_bit_for_bit_and_are_the_output_at_zero(name: str, bias_dtype: torch.dtype) -> None:
    source = dense()
    source.bias = nn.Parameter(source.bias.to(bias_dtype), requires_grad=False)
    layer = QuantizedLinear.from_dense(source, SCHEMES[name])
    assert layer.bias is source.bias and isinstance(layer.bias, nn.Parameter)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(layer(torch.zeros(3, 64, dtype=dtype)), source.bias.to(dtype).expand(3, -1))
    without = QuantizedLinear.from_dense(dense(bias=False), SCHEMES[name])
    assert without.bias is None and not without(torch.zeros(1, 64)).any()


def test_the_weight_describes_the_matrix_without_memory_and_cannot_be_set() -> None:
    _, layer = make("nf4", compute_dtype=torch.bfloat16)
    weight = layer.weight
    assert isinstance(layer, nn.Linear) and weight.shape == (96, 64) and weight.stride() == (0, 0)
    assert weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and bool(weight.isnan().all())
    assert "weight" not in layer.state_dict() and [name for name, _ in layer.named_parameters()] == ["bias"]
    for value in (nn.Parameter(torch.zeros(96, 64)), torch.zeros(96, 64)):
        with pytest.raises(AttributeError, match="set_field"):
            layer.weight = value
    with pytest.raises(RuntimeError):
        layer.weight.data += torch.zeros(96, 64)  # a merge by another library must not vanish


@pytest.mark.parametrize("name", ["int8", "fp8", "nf4", "mxfp4"])
def test_casts_leave_fields_alone(name: str) -> None:
    _, layer = make(name)
    before = {key: tensor.clone() for key, tensor in layer.fields.items()}
    holder = nn.Sequential(layer)
    for cast in (lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.double(), lambda m: m.to("cpu")):
        cast(holder)
        assert all(same_bytes(layer.fields[k], v) for k, v in before.items())
        assert layer.bias.dtype == layer.compute_dtype == layer.weight.dtype
    assert layer.compute_dtype == torch.float64
    layer.to(torch.bfloat16)
    assert layer.dense_weight().dtype == torch.bfloat16


def test_strides_survive_moves() -> None:
    codes = torch.randint(-127, 128, (64, 96), dtype=torch.int8).t()
    gaps = torch.rand(96, 3)[:, :1]
    layer = QuantizedLinear(64, 96, SCHEMES["int8_weights"], {"codes": codes, "scale": gaps})
    assert layer.codes.data_ptr() == codes.data_ptr()
    layer.to(torch.bfloat16).to("cpu")
    assert layer.codes.stride() == codes.stride() and layer.scale.stride() == (3, 1)
    layer._apply(lambda t: t.clone(memory_format=torch.contiguous_format))  # what another device's copy may do
    assert layer.codes.stride() == codes.stride() and layer.scale.stride() == (3, 1)
    assert torch.equal(layer.codes, codes) and torch.equal(layer.scale, gaps)
    assert layer.to("meta").codes.stride() == codes.stride()


@pytest.mark.parametrize("name", SCHEMES)
def test_copies_and_files_give_the_same_layer(name: str) -> None:
    _, layer = make(name)
    x = tokens(5, 64)
    y = layer(x)  # may have replaced fields by a packed operand
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), copy.copy(layer)):
        assert torch.equal(twin(x), y) and int(twin._handle) != int(layer._handle)
    state = layer.state_dict()
    assert set(state) == {*layer.scheme.codec.specs(layer.shape), "bias"}
    other = QuantizedLinear.from_dense(dense(seed=5), SCHEMES[name])
    other(x)
    other.load_state_dict(state)
    assert torch.equal(other(x), y)
    shell = QuantizedLinear(64, 96, SCHEMES[name], None, nn.Parameter(torch.empty(96, device="meta")))
    assert shell.missing_fields and shell(torch.empty(2, 64, device="meta")).shape == (2, 96)
    shell.load_state_dict(state, assign=True)
    assert not shell.missing_fields and torch.equal(shell(x), y)


def test_fields_are_checked() -> None:
    _, layer = make("int8")
    fields = {name: tensor.clone() for name, tensor in layer.fields.items()}
    with pytest.raises(CheckpointError, match="float32"):
        layer.set_field("codes", fields["codes"].float())
    with pytest.raises(CheckpointError, match=r"\(96, 64\)"):
        layer.set_fields({"scale": fields["scale"], "codes": fields["codes"].t()})
    with pytest.raises(CheckpointError, match="no field"):
        layer.set_field("absmax", fields["scale"])
    with pytest.raises(CheckpointError, match="the format has"):
        QuantizedLinear(64, 96, SCHEMES["int8"], {"codes": fields["codes"]})
    with pytest.raises(RuntimeError, match="scale.*must be float32"):
        layer.load_state_dict({**layer.state_dict(), "scale": fields["scale"].bfloat16()})
    with pytest.raises(CheckpointError, match="positive"):
        layer.set_extras(pre_scale=torch.zeros(64))
    with pytest.raises(CheckpointError, match="low-rank"):
        layer.set_extras(low_rank=(torch.zeros(4, 64), torch.zeros(4, 96)))
    shell = QuantizedLinear(64, 96, SCHEMES["int8"])
    shell.set_fields(fields)
    assert torch.equal(shell.decode(), layer.decode())


@pytest.mark.parametrize("scaled", [True, False])
def test_smooth_factors_and_a_low_rank_branch(scaled: bool) -> None:
    source = dense()
    factors = tokens(64).abs() + 0.5
    branch = (tokens(8, 64, seed=3) / 8, tokens(96, 8, seed=4) / 8)
    plain = QuantizedLinear.from_dense(source, SCHEMES["int8_weights"], pre_scale=factors)
    x = tokens(9, 64)
    assert error(plain(x), source(x)) < 0.02 and error(plain.dense_weight(), source.weight) < 0.02
    layer = QuantizedLinear(
        64, 96, plain.scheme, plain.fields, plain.bias, pre_scale=factors, low_rank=branch, low_rank_scaled=scaled
    )
    seen = x * factors if scaled else x
    torch.testing.assert_close(layer(x), plain(x) + seen @ branch[0].t() @ branch[1].t())
    torch.testing.assert_close(F.linear(x, layer.dense_weight(), layer.bias), layer(x))
    layer.half()
    assert layer.low_rank_up.dtype == layer.pre_scale.dtype == torch.float32
    assert torch.isfinite(layer(x.half())).all()


def test_static_activations_use_the_stored_scale() -> None:
    scheme = LayerScheme(get_codec("fp8_tensor"), Activation(get_codec("fp8_tensor"), static=True))
    layer = QuantizedLinear.from_dense(dense(), scheme, input_scale=torch.tensor(0.01))
    x = tokens(4, 64)
    rounded = (x / 0.01).clamp(-448, 448).to(torch.float8_e4m3fn).float() * 0.01
    torch.testing.assert_close(layer(x), F.linear(rounded, layer.dense_weight(), layer.bias))


def test_the_denoising_step_decides_and_must_be_known() -> None:
    layer = QuantizedLinear.from_dense(dense(), STEPS)
    x = tokens(4, 64)
    with pytest.raises(EngineError, match="names none"):
        layer(x)
    with calling(Step(0)):
        wide = layer(x)
    with calling(Step(1)):
        narrow = layer(x)
    exact = F.linear(x, layer.dense_weight(), layer.bias)
    assert error(wide, exact) < 0.04 < error(narrow, exact)


@pytest.mark.parametrize("name", ["int8", "fp8_emulated", "mxfp8", "int8_rowmax"])
def test_an_outlier_token_leaves_the_others_alone(name: str) -> None:
    source, layer = make(name)
    x = tokens(64, 64)
    x[7] *= 1000
    y, wanted = layer(x) - source.bias, source(x) - source.bias
    assert error(y, wanted) <= 0.05
    assert all(error(y[row], wanted[row]) <= 0.08 for row in range(64))


@pytest.mark.parametrize("name", SCHEMES)
def test_a_token_does_not_depend_on_its_neighbours(name: str) -> None:
    _, layer = make(name)
    x = tokens(64, 64)
    whole = layer(x)
    for rows in (slice(0, 1), slice(3, 20)):
        torch.testing.assert_close(layer(x[rows]), whole[rows], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SCHEMES)
def test_products_beyond_half_precision_stay_finite(name: str) -> None:
    source = dense(bias=False)
    source.weight.data[:] = tokens(96, 64).abs() * 1e-3 + 1e-3
    layer = QuantizedLinear.from_dense(source, SCHEMES[name], compute_dtype=torch.float16)
    x = (tokens(4, 64).abs() * 2000 + 30000).half()  # codes times codes sum to far more than 65504
    y = layer(x)
    assert torch.isfinite(y).all() and error(y, source(x.float())) < 0.1


def test_not_finite_tokens_show_and_spoil_nothing_else() -> None:
    _, layer = make("int8")
    x = tokens(8, 64)
    wanted = layer(x)
    x[2, 5], x[3, 0] = float("nan"), float("inf")
    y = layer(x)
    rest = [0, 1, 4, 5, 6, 7]
    assert torch.equal(y[rest], wanted[rest])


@pytest.mark.parametrize("name", ["int8", "fp8", "nf4", "mxfp4"])
def test_gradients_of_x_flow_and_the_result_is_the_same(name: str) -> None:
    _, layer = make(name)
    x = tokens(2, 3, 64)
    wanted = layer(x)
    x.requires_grad_()
    y = layer(x)
    assert torch.equal(y, wanted)
    y.sum().backward()
    torch.testing.assert_close(x.grad, layer.dense_weight().sum(0).expand(2, 3, -1))


def test_bytes_and_handles_are_accounted_for() -> None:
    gc.collect()
    before = live_handles()
    layers = nn.ModuleList(QuantizedLinear.from_dense(dense(), SCHEMES["int8"]) for _ in range(3))
    assert live_handles() == before + 3
    assert layers[0].nbytes() == 96 * 64 + 96 * 4 + 96 * 4 + 8
    prepare_kernels(layers)
    assert layers[0].nbytes() <= 96 * 64 + 96 * 4 + 96 * 4 + 8 + 96 * 8
    twin = copy.deepcopy(layers)
    assert live_handles() == before + 6
    del layers, twin
    gc.collect()
    assert live_handles() == before


class Counting:
    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, example: Any) -> Any:
        self.graphs += 1
        return graph.forward


class Block(nn.Module):
    def __init__(self, scheme: LayerScheme, seed: int) -> None:
        super().__init__()
        self.up = QuantizedLinear.from_dense(dense(96, 64, seed=seed), scheme)
        self.down = QuantizedLinear.from_dense(dense(64, 96, seed=seed + 1), scheme)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(x.to(self.up.weight.dtype))))


@pytest.mark.parametrize("name", [*SCHEMES, "steps"])
def test_equal_blocks_share_one_graph_without_breaks(name: str) -> None:
    torch._dynamo.reset()
    scheme = STEPS if name == "steps" else SCHEMES[name]
    blocks = [Block(scheme, seed) for seed in range(0, 6, 2)]
    x = tokens(4, 64)
    counting = Counting()
    compiled = torch.compile(Block.forward, fullgraph=True, backend=counting)
    with calling(Step(1)), torch.no_grad():
        for block in blocks:
            assert torch.equal(compiled(block, x), block(x))
    assert counting.graphs == 1
    if name == "steps":
        with calling(Step(3)), torch.no_grad():
            assert torch.equal(compiled(blocks[0], x), blocks[0](x))
        assert counting.graphs == 1


def test_it_traces_without_the_operator_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where Inductor fuses the decoding."""
    torch._dynamo.reset()
    monkeypatch.setattr(QuantizedLinear, "_is_opaque", lambda self, x: False)
    counting = Counting()
    compiled = torch.compile(Block.forward, fullgraph=True, backend=counting)
    for scheme in (LayerScheme(FP8), LayerScheme(INT8)):
        blocks = [Block(scheme, seed) for seed in (0, 2)]
        for block in blocks:
            for layer in (block.up, block.down):
                layer.prepare_kernel(name="reference")
        before = counting.graphs
        with torch.no_grad():
            for block in blocks:
                torch.testing.assert_close(compiled(block, tokens(4, 64)), block(tokens(4, 64)))
        assert counting.graphs == before + 1


@pytest.mark.slow
def test_inductor_takes_it() -> None:
    torch._dynamo.reset()
    block = Block(SCHEMES["int8"], 0)
    with torch.no_grad():
        got, wanted = torch.compile(block, fullgraph=True)(tokens(4, 64)), block(tokens(4, 64))
    assert error(got, wanted) < 0.01  # a fused silu may differ in the last bit and tip an activation's code
