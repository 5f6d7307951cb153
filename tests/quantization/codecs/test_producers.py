"""Codecs against the programs that write the files: bitsandbytes, torchao and ModelOpt, where they are installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from omniloom.quantization.codecs import bnb4, get_codec
from omniloom.quantization.codecs.nibbles import unpack_low_first
from tests.quantization.codecs.cases import gaussian, round_trip

BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)


def functional() -> Any:
    pytest.importorskip("bitsandbytes")
    import bitsandbytes.functional

    return bitsandbytes.functional


def test_maps_equal_bitsandbytes() -> None:
    bnb = functional()
    assert torch.equal(torch.tensor(bnb4.DYNAMIC_MAP), bnb.create_dynamic_map())
    for kind, values in bnb4.CODE_MAPS.items():
        assert torch.equal(torch.tensor(values), bnb.get_4bit_type(kind, device="cpu"))


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("double", [False, True])
def test_bnb4_equals_bitsandbytes(kind: str, block: int, double: bool) -> None:
    bnb = functional()
    codec = bnb4.Bnb4(kind, block, double)
    for rows, columns, dtype in ((24, 4096, torch.float32), (33, 4098, torch.bfloat16), (9, 4100, torch.float16)):
        weight = gaussian(rows, columns, block).to(dtype)
        weight[2], weight[3, 7] = 0, 30
        packed, state = bnb.quantize_4bit(weight, blocksize=block, quant_type=kind, compress_statistics=double)
        fields = codec.encode(weight)
        assert torch.equal(fields["packed"], packed)
        assert torch.equal(fields["code_map"], state.code)
        if double:
            assert torch.equal(fields["absmax_codes"], state.absmax)
            assert torch.equal(fields["nested_absmax"], state.state2.absmax)
            assert torch.equal(fields["nested_offset"], state.offset)
            assert torch.equal(fields["nested_map"], state.state2.code)
        else:
            assert torch.equal(fields["absmax"], state.absmax)
        # columns ≥ block: with less, the AVX-512 kernel of bitsandbytes 0.50 reads the scales of other blocks
        with torch.compiler.set_stance("force_eager"):  # its fallback compiles itself, which takes seconds
            theirs = bnb.dequantize_4bit(packed, state)
        assert torch.equal(codec.decode(fields, (rows, columns), dtype), theirs)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bnb4_halves_and_odd_sizes(kind: str) -> None:
    bnb = functional()
    values = torch.tensor(sorted(bnb4.CODE_MAPS[kind]))
    halves = (values[:-1] + values[1:]) / 2
    block = torch.cat((halves, -halves, torch.ones(2))).repeat(3).view(3, 32)
    for weight in (block, gaussian(3, 21), gaussian(1, 1), torch.full((5, 7), 1e-39), torch.zeros(3, 33)):
        packed, state = bnb.quantize_4bit(weight, blocksize=32, quant_type=kind)
        fields = bnb4.Bnb4(kind, 32, False).encode(weight)
        assert torch.equal(fields["packed"], packed) and torch.equal(fields["absmax"], state.absmax)


def test_bnb4_decodes_by_the_stored_map() -> None:
    codec, weight = get_codec("bnb4"), gaussian(8, 64)
    fields = codec.encode(weight)
    plain = codec.decode(fields, (8, 64))
    assert torch.equal(codec.decode({**fields, "code_map": fields["code_map"] * 2}, (8, 64)), plain * 2)
    moved = codec.decode({**fields, "nested_map": fields["nested_map"] * 0}, (8, 64))
    assert torch.equal(moved.abs().amax(), fields["nested_offset"])


def test_int8_rowmax_equals_bitsandbytes() -> None:
    bnb = functional()
    weight = gaussian(64, 512).half()
    codes, row_absmax, _ = bnb.int8_vectorwise_quant(weight)
    fields = get_codec("int8_rowmax").encode(weight)
    assert torch.equal(fields["codes"], codes) and torch.equal(fields["row_absmax"], row_absmax)
    theirs = bnb.int8_vectorwise_dequant(codes, row_absmax)
    torch.testing.assert_close(get_codec("int8_rowmax").decode(fields, (64, 512)), theirs, rtol=3e-7, atol=0)


@pytest.mark.parametrize(
    ("name", "rounding", "mode"),
    [("mxfp8", "floor", "FLOOR"), ("mxfp8", "ceil", "RCEIL"), ("mxfp4", "floor", "FLOOR"), ("mxfp4", "ceil", "RCEIL")],
)
def test_mx_equals_torchao(name: str, rounding: str, mode: str) -> None:
    module = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    weight = (gaussian(64, 512) * torch.logspace(-20, 20, 64).unsqueeze(1)).bfloat16()
    weight[3, :32] = 0
    element = torch.float8_e4m3fn if name == "mxfp8" else torch.float4_e2m1fn_x2
    scale, data = module.to_mx(weight, element, 32, module.ScaleCalculationMode[mode])
    fields = get_codec(name, rounding=rounding).encode(weight)
    assert torch.equal(fields["exponents"], scale.view(torch.uint8))
    assert torch.equal(fields["codes" if name == "mxfp8" else "packed"].view(torch.uint8), data.view(torch.uint8))


def test_rows_equal_torchao() -> None:
    primitives = pytest.importorskip("torchao.quantization.quant_primitives")
    weight, block = gaussian(64, 512), (1, 512)
    symmetric = primitives.MappingType.SYMMETRIC
    scale, zero = primitives.choose_qparams_affine(weight, symmetric, block, torch.int8, -127, 127, eps=1e-12)
    codes = primitives.quantize_affine(weight, block, scale, zero, torch.int8, -127, 127)
    fields = get_codec("int8_channel").encode(weight)
    torch.testing.assert_close(fields["scale"].flatten(), scale.flatten(), rtol=1.3e-7, atol=0)
    different = (fields["codes"].int() - codes.int()).abs()  # torchao multiplies by 1/scale
    assert int(different.max()) <= 1 and float((different > 0).float().mean()) < 1e-3
    scale = primitives._choose_scale_float8(weight, block, torch.float8_e4m3fn)
    codes = primitives._quantize_affine_float8(weight, scale, torch.float8_e4m3fn)
    fields = get_codec("fp8_channel").encode(weight)
    torch.testing.assert_close(fields["scale"].flatten(), scale.flatten().float(), rtol=1.3e-7, atol=0)
    assert float((fields["codes"].float() != codes.float()).float().mean()) < 1e-3


def qtensor() -> Any:
    return pytest.importorskip("modelopt.torch.quantization.qtensor", exc_type=ImportError)


def test_fp8_equals_modelopt() -> None:
    make = qtensor().FP8QTensor
    weight = gaussian(256, 384)
    for name, how in (
        ("fp8_tensor", {}),
        ("fp8_channel", {"axis": 0}),
        ("fp8_block", {"block_sizes": {-1: 128, -2: 128}}),
    ):
        quantized, scale = make.quantize(weight, **how)
        fields = get_codec(name).encode(weight)
        assert torch.equal(fields["scale"].flatten(), scale.flatten().float()), name
        assert torch.equal(fields["codes"].view(torch.uint8), quantized._quantized_data.view(torch.uint8)), name


def test_mxfp8_equals_modelopt() -> None:
    weight = gaussian(64, 512) * torch.logspace(-20, 20, 64).unsqueeze(1)
    quantized, scale = qtensor().MXFP8QTensor.quantize(weight)
    codec = get_codec("mxfp8", rounding="ceil")
    fields = codec.encode(weight)
    assert torch.equal(fields["exponents"], scale)
    assert torch.equal(fields["codes"].view(torch.uint8), quantized._quantized_data.view(torch.uint8))
    assert torch.equal(codec.decode(fields, (64, 512)), quantized.dequantize(torch.float32, scale=scale))


def test_mxfp4_equals_modelopt() -> None:
    weight = gaussian(64, 512)
    quantized, scale = qtensor().MXFP4QTensor.quantize(weight, 32)
    codec = get_codec("mxfp4", rounding="ceil")
    fields = codec.encode(weight)
    assert torch.equal(fields["exponents"].flatten(), scale.flatten())
    assert torch.equal(unpack_low_first(fields["packed"], 512), unpack_low_first(quantized._quantized_data, 512))
    theirs = quantized.dequantize(torch.float32, scale=scale, block_sizes={-1: 32})
    assert torch.equal(round_trip(codec, weight), theirs)
