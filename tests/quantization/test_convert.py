"""Replacing layers of whole models: what models read of a Linear, memory, failures, shells, back again, adapters."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from omniloom.errors import ConfigError
from omniloom.quantization.convert import dequantize_, make_shells, missing, quantize_modules
from omniloom.quantization.linear import QuantizedLinear
from tests.quantization.schemes import SCHEMES, dense, error, same_bytes, tokens


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = dense(64, 32), dense(32, 64, bias=False), dense(32, 32)
        self.again = self.c

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.c(self.b(self.a(x).relu())))


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {path: module for path, module in model.named_modules() if type(module) is nn.Linear}


@pytest.mark.parametrize("name", ["int8", "fp8", "nf4", "mxfp8"])
def test_layers_are_replaced_biases_kept_and_dense_weights_gone(name: str) -> None:
    net = Net()
    x = tokens(8, 32)
    wanted = net(x)
    biases = {path: layer.bias for path, layer in linears(net).items()}
    weights = [weakref.ref(layer.weight) for layer in linears(net).values()]
    held = net.a
    quantize_modules(net, {path: SCHEMES[name] for path in ("a", "b", "c")})
    gc.collect()
    assert all(ref() is None for ref in weights) and held.weight is None
    assert net.again is net.c and isinstance(net.a, QuantizedLinear)
    assert all(net.get_submodule(path).bias is bias for path, bias in biases.items())
    got = net(x)
    assert 0.001 < error(got, wanted) < 0.2
    weight_only = {m: m.dense_weight() for m in net.modules() if isinstance(m, QuantizedLinear)}
    dequantize_(net)
    assert not any(isinstance(module, QuantizedLinear) for module in net.modules())
    assert net.again is net.c and set(linears(net)) == {"a", "b", "c"}
    assert all(any(same_bytes(layer.weight, w) for w in weight_only.values()) for layer in linears(net).values())
    assert all(net.get_submodule(path).bias is bias for path, bias in biases.items())


def test_nothing_changes_if_a_path_or_shape_is_wrong() -> None:
    net = Net()
    with pytest.raises(ConfigError, match="'aa'.*not there.*did you mean"):
        quantize_modules(net, {"a": SCHEMES["int8"], "aa": SCHEMES["int8"]})
    with pytest.raises(ConfigError, match="the model itself"):
        quantize_modules(dense(), {"": SCHEMES["int8"]})
    assert set(linears(net)) == {"a", "b", "c"}
    quantize_modules(net, {"a": SCHEMES["int8"]})
    with pytest.raises(ConfigError, match="QuantizedLinear"):
        quantize_modules(net, {"a": SCHEMES["int8"]})


def test_a_failing_layer_stays_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    real = QuantizedLinear.from_dense.__func__  # type: ignore[attr-defined]

    def fail(cls: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        if source is net.b:
            raise MemoryError
        return real(cls, source, *args, **kwargs)

    monkeypatch.setattr(QuantizedLinear, "from_dense", classmethod(fail))
    with pytest.raises(MemoryError):
        quantize_modules(net, {path: SCHEMES["int8"] for path in ("a", "b", "c")})
    assert isinstance(net.a, QuantizedLinear) and type(net.b) is nn.Linear
    assert torch.isfinite(net(tokens(2, 32))).all()


def test_shells_on_a_meta_model() -> None:
    with torch.device("meta"):
        net = Net()
    paths = make_shells(net, {path: SCHEMES["nf4"] for path in ("a", "b", "c")}, torch.bfloat16)
    assert paths == ["a", "b", "c"] and net.a.weight.dtype == torch.bfloat16 and net.a.weight.is_meta
    source = Net()
    quantize_modules(source, {path: SCHEMES["nf4"] for path in ("a", "b", "c")})
    for path in paths:
        net.get_submodule(path).set_fields(source.get_submodule(path).fields)
    assert missing(net) == []
    net.a.bias, net.c.bias = source.a.bias, source.c.bias
    assert net.again is net.c
    assert torch.equal(net.b(tokens(2, 64)), source.b(tokens(2, 64)))


def test_hooks_of_the_layer_stay() -> None:
    net = Net()
    seen: list[str] = []
    handle = net.a.register_forward_hook(lambda *_: seen.append("a"))
    quantize_modules(net, {"a": SCHEMES["int8"]})
    net(tokens(1, 32))
    dequantize_(net)
    net(tokens(1, 32))
    assert seen == ["a", "a"]
    handle.remove()
    net(tokens(1, 32))
    assert seen == ["a", "a"]


def quantize_all(model: nn.Module, name: str) -> None:
    scheme = SCHEMES[name]
    fitting = [p for p, m in linears(model).items() if not scheme.codec.problem((m.out_features, m.in_features))]
    quantize_modules(model, dict.fromkeys(fitting, scheme))


@pytest.mark.parametrize("name", ["int8", "fp8", "nf4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["t5", "umt5"])
def test_t5_asks_its_wo_for_a_dtype(name: str, dtype: torch.dtype, kind: str) -> None:
    from transformers import T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel

    sizes: dict[str, Any] = dict(vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2)
    sizes["feed_forward_proj"] = "gated-gelu"
    torch.manual_seed(0)
    model = (T5EncoderModel(T5Config(**sizes)) if kind == "t5" else UMT5EncoderModel(UMT5Config(**sizes))).eval()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        wanted = model(ids).last_hidden_state
        model.to(dtype)
        quantize_all(model, name)
        got = model(ids).last_hidden_state
    assert got.dtype == dtype and error(got, wanted) < 0.35


def wan() -> tuple[nn.Module, dict[str, Any]]:
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=32, freq_dim=32,
        ffn_dim=64, num_layers=1, rope_max_seq_len=32,
    )  # fmt: skip
    call = dict(
        hidden_states=tokens(1, 4, 1, 8, 8), timestep=torch.tensor([500]), encoder_hidden_states=tokens(1, 6, 32)
    )
    return model, call


@pytest.mark.parametrize("name", ["int8", "fp8", "nf4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wan_asks_its_time_embedder_for_a_parameter(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, call = wan()
    model.eval()
    with torch.no_grad():
        wanted = model(**call, return_dict=False)[0]
        model.to(dtype)
        quantize_all(model, name)
        call = {key: value if key == "timestep" else value.to(dtype) for key, value in call.items()}
        got = model(**call, return_dict=False)[0]
    assert got.dtype == dtype and error(got, wanted) < 0.4


@pytest.mark.parametrize("name", ["int8", "nf4"])
def test_z_image_asks_for_a_dtype(name: str) -> None:
    from diffusers import ZImageTransformer2DModel

    torch.manual_seed(0)
    model = ZImageTransformer2DModel(
        dim=64, n_layers=1, n_refiner_layers=1, n_heads=2, n_kv_heads=2, in_channels=4, cap_feat_dim=32,
        axes_dims=[8, 12, 12], axes_lens=[64, 32, 32],
    ).eval()  # fmt: skip
    call = ([tokens(4, 1, 8, 8)], torch.tensor([0.5]), [tokens(6, 32)])
    with torch.no_grad():
        wanted = model(*call, return_dict=False)[0][0]
        quantize_all(model, name)
        got = model(*call, return_dict=False)[0][0]
    assert torch.isfinite(got).all() and error(got, wanted) < 0.4


def test_adapters_can_be_injected() -> None:
    peft = pytest.importorskip("peft")
    net = nn.Sequential(dense(32, 32), dense(32, 32))
    quantize_modules(net, {"0": SCHEMES["nf4"], "1": SCHEMES["nf4"]})
    x = tokens(3, 32)
    wanted = net(x)
    config = peft.LoraConfig(r=4, target_modules=["0", "1"], init_lora_weights=True)
    adapted = peft.inject_adapter_in_model(config, net)
    torch.testing.assert_close(adapted(x), wanted)
    adapted(x).sum().backward()
    assert all(p.grad is not None for n, p in adapted.named_parameters() if "lora_B" in n)
