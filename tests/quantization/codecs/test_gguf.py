"""GGUF's types against the gguf package, which llama.cpp's authors publish: bits, not bounds."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omniloom.checkpoint.gguf import GGML_TYPES, TYPES_BY_NAME
from omniloom.errors import ConfigError
from omniloom.quantization.codecs import chunks as chunks_module
from omniloom.quantization.codecs import codec_names, get_codec
from omniloom.quantization.codecs.gguf import gguf_codec
from omniloom.quantization.kernels.decoders import _GGUF_STEPS, decode_into
from omniloom.quantization.kernels.tiles import row_spans, take
from tests.quantization.codecs.cases import gaussian, relative, round_trip

gguf: Any = pytest.importorskip("gguf")

# where the float16 numbers of a block lie
HALVES = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
    "NVFP4": (),
}
OTHER = {
    "IQ1_S": (0,),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
WRITTEN = {"Q8_0": 0.0054, "Q5_1": 0.0379, "Q5_0": 0.0427, "Q4_1": 0.0782, "Q4_0": 0.0859, "MXFP4": 0.1151}
EXTREME = np.array([0, -0.0, 6e-8, -6e-8, 3e-5, 65504, -65504, 0.01, -0.02, 1], dtype=np.float16)

each = pytest.mark.parametrize("name", HALVES)
written = pytest.mark.parametrize("name", WRITTEN)


def blocks(name: str, rows: int, per_row: int, seed: int = 0, extreme: bool = True) -> torch.Tensor:
    kind, rng = TYPES_BY_NAME[name], np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows * per_row, kind.size), dtype=np.uint8)
    for at in {**HALVES, **OTHER}[name]:
        d = rng.choice(EXTREME, len(raw)) if extreme else rng.uniform(-0.01, 0.01, len(raw)).astype(np.float16)
        raw[:, at : at + 2] = d.view(np.uint8).reshape(-1, 2)
    return torch.from_numpy(raw.reshape(rows, -1))


def theirs(name: str, packed: torch.Tensor) -> torch.Tensor:
    with np.errstate(all="ignore"):
        return torch.from_numpy(gguf.quants.dequantize(packed.numpy(), gguf.GGMLQuantizationType[name]))


def quantized(name: str, weight: torch.Tensor) -> torch.Tensor:
    with np.errstate(all="ignore"):
        raw = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[name])
    return torch.from_numpy(raw.view(np.uint8).reshape(weight.shape[0], -1))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool(a.view(torch.uint8).equal(b.view(torch.uint8)))


def test_every_type_has_a_codec() -> None:
    plain = {"F32", "F64", "I8", "I16", "I32", "I64"}
    names = {kind.name for kind in GGML_TYPES.values()} - plain
    assert names == {*HALVES, *OTHER, "IQ1_M", "F16", "BF16"}
    for name in names:
        codec = gguf_codec(name)
        assert codec.name == f"gguf_{name.lower()}" or (codec.name == "gguf_other" and name in {*OTHER, "IQ1_M"})
        assert codec.name in codec_names()
    with pytest.raises(ConfigError, match="Q4_K"):
        gguf_codec("Q4_KM")


@each
@settings(max_examples=12, deadline=None)
@given(rows=st.integers(1, 9), per_row=st.integers(1, 7), seed=st.integers(0, 10**6), extreme=st.booleans())
def test_decoding_is_theirs_bit_for_bit(name: str, rows: int, per_row: int, seed: int, extreme: bool) -> None:
    packed, codec = blocks(name, rows, per_row, seed, extreme), gguf_codec(name)
    shape = (rows, per_row * TYPES_BY_NAME[name].block)
    assert codec.specs(shape)["packed"].shape == tuple(packed.shape)
    want = theirs(name, packed)
    assert same_bits(codec.decode({"packed": packed}, shape), want)
    out = torch.empty(shape)
    decode_into(codec, {"packed": packed}, shape, out)
    assert same_bits(out, want)
    low = torch.empty(shape, dtype=torch.bfloat16)
    decode_into(codec, {"packed": packed}, shape, low)
    assert same_bits(low, want.bfloat16())
    assert same_bits(codec.decode({"packed": packed}, shape, torch.bfloat16), want.bfloat16())


@pytest.mark.parametrize(("name", "bytes_"), [("MXFP4", 1), ("NVFP4", 4)])
def test_every_scale_byte(name: str, bytes_: int) -> None:
    packed = torch.zeros(256, TYPES_BY_NAME[name].size, dtype=torch.uint8)
    packed[:, :bytes_] = torch.arange(256, dtype=torch.uint8).unsqueeze(1)
    packed[:, bytes_:] = torch.arange(TYPES_BY_NAME[name].size - bytes_, dtype=torch.uint8) * 37 + 16
    got = gguf_codec(name).decode({"packed": packed}, (256, TYPES_BY_NAME[name].block))
    assert same_bits(got, theirs(name, packed))


@pytest.mark.parametrize("name", OTHER)
def test_code_books(name: str) -> None:
    packed = blocks(name, 3, 2, extreme=False)
    assert same_bits(gguf_codec(name).decode({"packed": packed}, (3, 512)), theirs(name, packed))
    with pytest.raises(ConfigError, match=name):
        gguf_codec(name).encode(gaussian(2, 256))


def test_code_books_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"IQ3_S.*omniloom\[gguf\]"):
        gguf_codec("IQ3_S").decode({"packed": blocks("IQ3_S", 1, 1)}, (1, 256))


@written
@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 10**6), st.integers(-90, 12))
def test_encoding_is_theirs_byte_for_byte(name: str, rows: int, per_row: int, seed: int, power: int) -> None:
    weight = gaussian(rows, per_row * 32, seed) * 2.0**power
    weight[0, :32] = 0
    assert gguf_codec(name).encode(weight)["packed"].equal(quantized(name, weight))


@pytest.mark.parametrize("name", [*WRITTEN, "F16", "BF16"])
def test_ramps_ties_and_powers_of_two(name: str) -> None:
    ramp = torch.arange(2048).float().view(4, 512)
    halves = torch.arange(-256, 256).float().view(1, 512) / 2
    ties = torch.tensor([1.0, -1.0]).repeat(256).view(1, 512)
    exponents = torch.arange(-60, 15).float().exp2()
    near = torch.cat([exponents * (1 + k * 2.0**-24) for k in (-3, -2, -1, 0, 2, 4)]).unsqueeze(1)
    spread = near * torch.linspace(-1, 1, 512)
    for weight in (ramp, -ramp, halves, ties, -ties, spread, -spread):
        weight = weight.contiguous()
        assert gguf_codec(name).encode(weight)["packed"].equal(quantized(name, weight))
    packed = gguf_codec(name).encode(ramp)["packed"]
    want = theirs(name, packed).reshape(4, 512)
    assert same_bits(gguf_codec(name).decode({"packed": packed}, (4, 512)), want)


@written
def test_error_is_that_of_the_format(name: str) -> None:
    weight = gaussian()
    assert 0.7 * WRITTEN[name] <= relative(round_trip(gguf_codec(name), weight), weight) <= 1.2 * WRITTEN[name]


@written
@pytest.mark.parametrize("value", [1e-45, 3e-42, 1.2e-38, 1e-30, 1e30, 3.4e38])
def test_extremes_are_finite(name: str, value: float) -> None:
    weight = torch.full((3, 64), value)
    weight[1] = -value
    weight[2, ::2] = 0
    assert bool(round_trip(gguf_codec(name), weight).isfinite().all())


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "NVFP4"])
def test_types_that_only_files_have(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        gguf_codec(name).encode(gaussian(2, 256))


def test_width_must_be_whole_blocks() -> None:
    for name in ("Q8_0", "Q4_K"):
        codec = gguf_codec(name)
        assert codec.problem((4, 512)) is None and "300" in str(codec.problem((4, 300)))
    with pytest.raises(ConfigError, match="48"):
        gguf_codec("Q8_0").encode(gaussian(2, 48))


@pytest.mark.parametrize("name", [*HALVES, "F16", "BF16"])
def test_traces_without_graph_breaks(name: str) -> None:
    torch.compiler.reset()
    codec = gguf_codec(name)
    kind = codec.kind  # type: ignore[attr-defined]
    size = kind.size * (512 // kind.block)
    halves = name in ("F16", "BF16")
    packed = gaussian(4, 512).half().view(torch.uint8) if halves else blocks(name, 4, 512 // kind.block)
    assert packed.shape == (4, size)
    decode = torch.compile(codec.decode, fullgraph=True, backend="eager", dynamic=False)
    for dtype in (torch.float32, torch.bfloat16):
        want = codec.decode({"packed": packed}, (4, 512), dtype)
        assert same_bits(decode({"packed": packed}, (4, 512), dtype), want)
    if name in WRITTEN:
        encode = torch.compile(codec.encode, fullgraph=True, backend="eager", dynamic=False)
        weight = gaussian(4, 512)
        assert encode(weight)["packed"].equal(codec.encode(weight)["packed"])
    meta = codec.decode({"packed": torch.empty(4, size, dtype=torch.uint8, device="meta")}, (4, 512))
    assert meta.shape == (4, 512)


@each
def test_rows_can_be_taken_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row ranges, tiles of rows and steps of the fast path: the values are those of the whole."""
    packed, codec, shape = blocks(name, 300, 512 // TYPES_BY_NAME[name].block), gguf_codec(name), (300, 512)
    fields = {"packed": packed}
    whole = codec.decode(fields, shape)
    spans = row_spans(codec, shape, 128)
    assert spans is not None
    parts = [take(fields, span) for span in spans]
    assert same_bits(torch.cat([codec.decode(part, (part["packed"].shape[0], 512)) for part in parts]), whole)
    monkeypatch.setattr(chunks_module, "CELLS", 9 * 512)
    assert same_bits(codec.decode(fields, shape), whole)
    monkeypatch.setattr("omniloom.quantization.kernels.decoders._STEP_CELLS", 512 * 7)
    out = torch.empty(shape)
    decode_into(codec, fields, shape, out)
    assert same_bits(out, whole)
    sliced = packed[::2]
    decode_into(codec, {"packed": sliced}, (150, 512), out[:150])
    assert same_bits(out[:150], whole[::2].contiguous())


def test_fast_decoders_are_of_known_codecs() -> None:
    assert set(_GGUF_STEPS) == {f"gguf_{name}" for name in ("q8_0", "q4_0", "q4_k", "q6_k")}
    assert all(get_codec(name) == gguf_codec(name.removeprefix("gguf_").upper()) for name in _GGUF_STEPS)


@pytest.mark.parametrize("name", [*HALVES, "F16", "BF16"])
def test_every_bit_pattern_is_a_block(name: str) -> None:
    """Infinite and NaN scales, too: NaN where the package has NaN, its bits elsewhere."""
    kind, codec = TYPES_BY_NAME[name], gguf_codec(name)
    packed = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (64, 60 * kind.size), dtype=np.uint8))
    want, shape = theirs(name, packed), (64, 60 * kind.block)
    out = torch.empty(shape)
    decode_into(codec, {"packed": packed}, shape, out)
    for got in (codec.decode({"packed": packed}, shape), out):
        assert bool(((got.view(torch.int32) == want.view(torch.int32)) | (got.isnan() & want.isnan())).all())
