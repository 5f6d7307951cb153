"""Kernels agree with the reference, prepared operands give fields back bit for bit, devices get what fits them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from omniloom.errors import ConfigError
from omniloom.quantization.codecs import get_codec
from omniloom.quantization.kernels import packed
from omniloom.quantization.kernels.base import DeviceFacts, cpu_facts
from omniloom.quantization.kernels.cpu_int8 import IntMatmulKernel, PackedInt8Kernel
from omniloom.quantization.kernels.cuda import CudaFp8Kernel, CudaInt8Kernel
from omniloom.quantization.kernels.reference import TiledKernel
from omniloom.quantization.kernels.registry import REFERENCE, kernel_matrix
from omniloom.quantization.kernels.tiles import row_spans, take
from omniloom.quantization.linear import QuantizedLinear, prepare_kernels, release_kernels, set_streamed
from omniloom.quantization.prepared import MatrixView
from omniloom.quantization.scheme import WEIGHT_ONLY, Activation, LayerScheme
from tests.quantization.schemes import FP8, INT8, SCHEMES, dense, error, same_bytes, tokens

AVX2 = DeviceFacts("cpu", None, frozenset(("avx", "avx2", "fma")))
VNNI = DeviceFacts("cpu", None, frozenset(("avx2", "avx512_vnni")))
HOPPER, ADA, AMPERE, TURING = (DeviceFacts("cuda", cc) for cc in ((9, 0), (8, 9), (8, 6), (7, 5)))
CODECS = {name: scheme.codec for name, scheme in SCHEMES.items()}


def view(scheme: LayerScheme, n: int = 96, k: int = 64, bias: bool = True, seed: int = 0) -> MatrixView:
    source = dense(n, k, bias, seed)
    return MatrixView(scheme, (n, k), scheme.codec.encode(source.weight), source.bias)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("shape", [(384, 64), (300, 96), (257, 512)])
def test_tiles_of_rows_decode_to_the_rows(name: str, shape: tuple[int, int]) -> None:
    codec = CODECS[name]
    fields = codec.encode(tokens(*shape))
    tiles = row_spans(codec, shape, 128)
    whole = codec.decode(fields, shape)
    if tiles is None:
        assert name == "nf4"  # its scales' scales may span tiles
        return
    for index, spans in enumerate(tiles):
        rows = slice(index * 128, min(shape[0], (index + 1) * 128))
        part = codec.decode(take(fields, spans), (rows.stop - rows.start, shape[1]))
        assert torch.equal(part, whole[rows])


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_multiply_as_the_whole(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omniloom.quantization.kernels.tiles._TILE_ELEMENTS", 64 * 128)
    layer = view(SCHEMES[name], 384)
    kernel = TiledKernel()
    if kernel.supports(layer.scheme, AVX2, layer.shape):
        return
    x = tokens(3, 5, 64).to(dtype)
    activation = layer.scheme.activation
    tolerance = {} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(kernel(x, layer, activation), REFERENCE(x, layer, activation), **tolerance)


def test_int_matmul_is_the_exact_arithmetic() -> None:
    for name in ("int8", "int8_rowmax"):
        layer = view(SCHEMES[name])
        x = tokens(7, 64)
        torch.testing.assert_close(
            IntMatmulKernel()(x, layer, Activation(INT8)), REFERENCE(x, layer, Activation(INT8)), rtol=1e-5, atol=1e-5
        )


@pytest.mark.skipif(packed.problem() is not None, reason="this torch has no packed int8 linear")
def test_the_packed_linear_rounds_by_token_and_gives_its_codes_back() -> None:
    layer = view(SCHEMES["int8"], bias=False)
    kernel = PackedInt8Kernel()
    layer.prepared = kernel.prepare(layer.fields, layer.scheme, layer.shape)
    assert layer.prepared.replaces == ("codes",) and not layer.prepared.streamable
    assert torch.equal(kernel.recover(layer.prepared)["codes"], layer.fields["codes"])
    x = tokens(33, 64) * torch.logspace(-4, 3, 33)[:, None]
    scale = x.abs().amax(1, keepdim=True)
    weight = layer.scheme.codec.decode(layer.fields, layer.shape)
    for top, reduce_range in ((63.0, True), (127.0, False)):
        wanted = F.linear((x / scale * top).round() / top * scale, weight)
        got = packed.multiply(x, layer.prepared.operand, reduce_range)
        tie = 1.5 / top / 8  # a value on the edge of two codes may go either way
        assert all(error(got[row], wanted[row]) < tie for row in range(33))
        assert error(got, wanted) < 1e-3
        assert torch.equal(packed.multiply(x[4:5], layer.prepared.operand, reduce_range), got[4:5])


@pytest.mark.skipif(packed.problem() is not None, reason="this torch has no packed int8 linear")
def test_the_packed_linear_does_not_saturate_on_extreme_data() -> None:
    codes = torch.full((32, 256), 127, dtype=torch.int8)
    operand = packed.pack(codes, torch.ones(32))
    x = torch.full((4, 256), 3.0)
    got = packed.multiply(x, operand, reduce_range=not cpu_facts().native_int8)
    torch.testing.assert_close(got, torch.full((4, 32), 3.0 * 127 * 256), rtol=1e-3, atol=0)


def force_packed(layer: QuantizedLinear) -> QuantizedLinear:
    layer.prepare_kernel(name="cpu_packed_int8")
    return layer


@pytest.mark.skipif(packed.problem() is not None, reason="this torch has no packed int8 linear")
def test_a_packed_layer_saves_copies_and_moves_as_if_it_were_not() -> None:
    import copy
    import pickle

    layer = QuantizedLinear.from_dense(dense(), SCHEMES["int8"])
    codes = layer.codes.clone()
    force_packed(layer)
    assert layer.codes is None and layer.device.type == "cpu" and layer.weight.shape == (96, 64)
    x = tokens(5, 64)
    y = layer(x)
    assert error(y, dense()(x)) < 0.03 and torch.equal(layer.fields["codes"], codes)
    assert torch.equal(layer.state_dict()["codes"], codes)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin.codes, codes) and twin.prepared is None
        assert torch.equal(force_packed(twin)(x), y)
    layer.to(torch.bfloat16)
    assert torch.equal(layer.codes, codes) and layer.prepared is None
    torch._dynamo.reset()
    seen = []
    compiled = torch.compile(QuantizedLinear.forward, fullgraph=True, backend=lambda g, e: seen.append(1) or g.forward)
    for twin in (force_packed(layer), force_packed(copy.deepcopy(layer))):
        assert (
            torch.equal(compiled(twin, x), y - layer.bias.float() + layer.bias.float())
            or error(compiled(twin, x), y) < 0.01
        )
    assert len(seen) == 1
    release_kernels(layer)
    assert torch.equal(layer.codes, codes)


@pytest.mark.skipif(packed.problem() is not None, reason="this torch has no packed int8 linear")
def test_threads_pack_a_layer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omniloom.quantization.kernels.registry._KERNELS", [PackedInt8Kernel(), REFERENCE])
    packs: list[int] = []
    pack = packed.pack
    monkeypatch.setattr(packed, "pack", lambda *args: packs.append(1) or pack(*args))
    layer = QuantizedLinear.from_dense(dense(), SCHEMES["int8"])
    results: list[torch.Tensor] = []
    x = tokens(5, 64)
    threads = [threading.Thread(target=lambda: results.append(layer(x))) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(results) == 8 and len(packs) == 1 and all(torch.equal(results[0], y) for y in results)
    set_streamed(layer)
    assert layer.codes is not None
    layer(x)
    assert layer.codes is not None and len(packs) == 1


def test_kernels_are_chosen_by_what_a_device_can_do() -> None:
    def picked(facts: DeviceFacts, **schemes: LayerScheme) -> dict[str, tuple[str, str | None]]:
        return {row.scheme: (row.status, row.kernel) for row in kernel_matrix(facts, schemes or SCHEMES)}

    if packed.problem() is None:
        assert picked(AVX2)["int8"] == ("native", "cpu_packed_int8")
    assert picked(VNNI)["int8"] == ("native", "cpu_int_mm")
    assert picked(AVX2)["fp8"] == ("weight-only", "cpu_tiled")
    assert picked(AVX2)["fp8_emulated"] == ("emulated", "cpu_tiled")
    assert picked(AVX2)["fp8_block"] == ("weight-only", "cpu_tiled")
    assert picked(HOPPER)["fp8"] == picked(ADA)["fp8"] == ("native", "cuda_fp8")
    assert picked(AMPERE)["fp8"] == ("weight-only", "reference")
    assert picked(AMPERE)["int8"] == ("native", "cuda_int8")
    assert picked(TURING)["int8"] == ("emulated", "reference")
    assert picked(DeviceFacts("xpu"))["mxfp8"] == ("emulated", "reference")
    static = LayerScheme(INT8, Activation(INT8, static=True))
    assert picked(AVX2, s=static)["s"] == ("emulated", "cpu_tiled")
    odd = kernel_matrix(HOPPER, {"fp8": SCHEMES["fp8"]}, (100, 72))[0]
    assert odd.status == "weight-only" and "16" in odd.reason
    assert all(row.reason or row.status == "native" for row in kernel_matrix([AVX2, VNNI, HOPPER], SCHEMES))


def test_the_fastest_can_be_asked_for_and_names_are_checked() -> None:
    layer = QuantizedLinear.from_dense(dense(), SCHEMES["int8"])
    assert prepare_kernels(layer, measure_rows=8).popitem()[1] == 1
    assert error(layer(tokens(5, 64)), dense()(tokens(5, 64))) < 0.03
    with pytest.raises(ConfigError, match="did you mean"):
        layer.prepare_kernel(name="cpu_tile")


def fake_scaled_mm(a: torch.Tensor, b: torch.Tensor, *, scale_a: Any, scale_b: Any, out_dtype: Any) -> torch.Tensor:
    assert a.is_contiguous() and b.t().is_contiguous() and a.dtype == b.dtype == torch.float8_e4m3fn
    if scale_a.dim() == 2:
        assert scale_a.shape == (a.shape[0], 1) and scale_b.shape == (1, b.shape[1])
        assert scale_a.is_contiguous() and scale_b.is_contiguous()
    return ((a.float() @ b.float()) * scale_a * scale_b).to(out_dtype)


@pytest.mark.parametrize("rowwise", [True, False])
@pytest.mark.parametrize("weight", ["fp8_tensor", "fp8_channel"])
@pytest.mark.parametrize("static", [True, False])
def test_the_arithmetic_around_an_fp8_product(rowwise: bool, weight: str, static: bool) -> None:
    activation = Activation(get_codec("fp8_tensor") if static else FP8, static=static)
    layer = view(LayerScheme(get_codec(weight), activation))
    layer.input_scale = torch.tensor(0.02) if static else None
    x = tokens(2, 9, 64)
    got = CudaFp8Kernel(fake_scaled_mm, rowwise)(x, layer, activation)
    assert error(got, REFERENCE(x, layer, activation)) < (4e-3 if rowwise else 1e-6)  # the product is rounded to bf16
    assert CudaFp8Kernel(fake_scaled_mm, rowwise)(x[:, :0], layer, activation).shape == (2, 0, 96)


@pytest.mark.parametrize("rows", [1, 16, 17, 40])
def test_the_arithmetic_around_an_int8_product(rows: int) -> None:
    def fake(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        assert a.shape[0] > 16 and b.t().is_contiguous()
        return torch._int_mm(a, b)

    layer = view(SCHEMES["int8"])
    x = tokens(rows, 64)
    got = CudaInt8Kernel(fake)(x, layer, Activation(INT8))
    torch.testing.assert_close(got, REFERENCE(x, layer, Activation(INT8)), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("rows", [1, 40])
def test_on_a_gpu_every_scheme_is_near_the_reference(name: str, rows: int) -> None:
    layer = QuantizedLinear.from_dense(dense(), SCHEMES[name], compute_dtype=torch.bfloat16).to("cuda")
    x = tokens(rows, 64).to("cuda", torch.bfloat16)
    wanted = REFERENCE(x.float(), layer, layer.kernel_for(x)[1])
    assert error(layer(x), wanted) < 0.01
    cpu = QuantizedLinear.from_dense(dense(), SCHEMES[name])
    assert all(same_bytes(cpu.fields[k], v) for k, v in layer.fields.items())


def test_half_precision_is_multiplied_in_float32_where_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omniloom.quantization.kernels.reference.device_facts", lambda device: AVX2)
    layer = view(SCHEMES["int8_weights"])
    x = tokens(5, 64).bfloat16()
    wanted = F.linear(x.float(), layer.scheme.codec.decode(layer.fields, layer.shape)) + layer.bias
    for kernel in (REFERENCE, TiledKernel()):
        assert torch.equal(kernel(x, layer, WEIGHT_ONLY), wanted.bfloat16())
