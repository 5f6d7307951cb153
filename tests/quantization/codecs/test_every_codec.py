"""What holds for each codec."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omniloom.errors import ConfigError
from omniloom.quantization.codecs import chunks as chunks_module
from omniloom.quantization.codecs import codec_names, get_codec
from tests.quantization.codecs.cases import CASES, Case, gaussian, relative, round_trip

each = pytest.mark.parametrize("case", CASES, ids=str)
FINITE = torch.finfo(torch.float32)


def raw(field: torch.Tensor) -> torch.Tensor:
    return field.flatten().view(torch.uint8)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(raw(a[name]), raw(b[name])) for name in a)


def test_every_registered_codec_is_here() -> None:
    ours = {"bnb4", "fp8_block", "fp8_channel", "fp8_tensor", "int4_group", "int8_channel", "int8_rowmax"}
    ours |= {"mxfp4", "mxfp4_dual", "mxfp8"}
    assert {case.name for case in CASES} == ours <= set(codec_names())


@each
def test_error_is_that_of_the_format(case: Case) -> None:
    weight = gaussian()
    assert 0.7 * case.error <= relative(round_trip(case.codec, weight), weight) <= 1.2 * case.error


@each
def test_specs_describe_the_fields(case: Case) -> None:
    for shape in ((256, 512), (3, 5), (1, 1), (130, 129), (2, 1000)):
        fields = case.codec.encode(gaussian(*shape))
        specs = case.codec.specs(shape)
        assert list(specs) == list(fields)
        for name, spec in specs.items():
            assert (tuple(fields[name].shape), fields[name].dtype) == (spec.shape, spec.dtype), name
            assert fields[name].is_contiguous()
        assert case.codec.nbytes(shape) == sum(field.nbytes for field in fields.values())
        assert case.codec.decode(fields, shape).shape == shape


@each
@settings(max_examples=15, deadline=None)
@given(st.integers(1, 140), st.integers(1, 700), st.integers(0, 10**6), st.integers(-18, 10), st.sampled_from("fbh"))
def test_any_shape_stays_within_the_bound(
    case: Case, rows: int, columns: int, seed: int, power: int, kind: str
) -> None:
    rows = min(rows, 8000 // columns + 1)
    weight = gaussian(rows, columns, seed) * 2.0**power
    weight = weight.to({"f": torch.float32, "b": torch.bfloat16, "h": torch.float16}[kind])
    error = (round_trip(case.codec, weight).double() - weight.double()).abs()
    bound = case.amax(weight) * case.bound
    parameters = dict(case.parameters)
    if parameters.get("double_quant"):
        bound += case.amax(weight) * 0.02 + weight.abs().max().double() * 0.02  # the scales' own error
    if case.name == "int4_group" and parameters.get("scale_dtype", "float16") == "float16":
        bound += 8 * 2.0**-24  # the step of float16's denormal scales
    assert bool((error <= bound).all())


@each
def test_the_end_of_a_row_is_a_group_of_its_own(case: Case) -> None:
    if isinstance(case.group, int) or case.group[1] in (0,):
        pytest.skip("no groups along the row")
    wide = case.group[1]
    weight = gaussian(2, 2 * wide + 5)
    ours = case.codec.decode(case.codec.encode(weight), (2, 2 * wide + 5))
    alone = round_trip(case.codec, weight[:, 2 * wide :].contiguous())
    if case.group[0] <= 2:
        assert torch.equal(ours[:, 2 * wide :], alone)


@each
@pytest.mark.parametrize(
    "value", [0.0, 1e-45, 3e-42, 1e-39, 1.2e-38, 1e-30, 1e30, 3.3895313892515355e38, FINITE.max], ids=str
)
def test_extremes_are_finite(case: Case, value: float) -> None:
    weight = torch.full((3, 150), value)
    weight[1] = -value
    weight[2, ::2] = 0
    mixed = gaussian(4, 150)
    mixed[1, 3], mixed[2, 77], mixed[3] = value, -value, 0
    for matrix in (weight, mixed):
        fields = case.codec.encode(matrix)
        for name, field in fields.items():
            assert bool(field.float().isfinite().all()), name
        result = case.codec.decode(fields, (matrix.shape[0], 150))
        assert bool(result.isfinite().all())
        lossy_scale = dict(case.parameters).get("scale_dtype", "float16") == "float16" and case.name == "int4_group"
        if not (lossy_scale and (value > 1e5 or value < 1e-5)):  # outside of float16
            assert float((result - matrix).abs().max()) <= max(float(matrix.abs().max()) * 0.54, 1e-36)


@each
def test_zero_rows_stay_zero(case: Case) -> None:
    weight = gaussian(4, 1024)
    weight[2] = 0
    result = round_trip(case.codec, weight)
    if dict(case.parameters).get("double_quant"):
        assert float(result[2].abs().max()) == 0.0  # NF4 and FP4 have an exact zero
    assert not bool(result[2].any()) and bool(result[1].any())
    assert not bool(round_trip(case.codec, torch.zeros(3, 300)).any())


@each
def test_dtypes(case: Case) -> None:
    weight = gaussian(64, 256)
    for dtype in (torch.bfloat16, torch.float16):
        low = weight.to(dtype)
        assert same(case.codec.encode(low), case.codec.encode(low.float()))
        fields = case.codec.encode(weight)
        assert torch.equal(case.codec.decode(fields, (64, 256), dtype), case.codec.decode(fields, (64, 256)).to(dtype))


@each
def test_memory_order_and_gradient_do_not_matter(case: Case) -> None:
    weight = gaussian(96, 320)
    turned = weight.t().contiguous().t()
    assert not turned.is_contiguous()
    fields = case.codec.encode(weight)
    assert same(case.codec.encode(turned), fields)
    of_parameter = case.codec.encode(torch.nn.Parameter(weight))
    assert same(of_parameter, fields) and not any(field.requires_grad for field in of_parameter.values())


@each
@pytest.mark.parametrize("rows", [300, 256])
def test_row_ranges_change_nothing(case: Case, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = gaussian(rows, 544)
    whole = case.codec.encode(weight)
    plain = case.codec.decode(whole, (rows, 544), torch.bfloat16)
    monkeypatch.setattr(chunks_module, "CELLS", 9 * 544)
    assert same(case.codec.encode(weight), whole)
    assert torch.equal(case.codec.decode(whole, (rows, 544), torch.bfloat16), plain)


@each
def test_fast_decode_equals_the_reference(case: Case) -> None:
    if not hasattr(case.codec, "reference_decode"):
        pytest.skip("decodes in one way")
    for shape in ((200, 2048), (7, 33), (5, 1055)):
        fields = case.codec.encode(gaussian(*shape))
        assert torch.equal(case.codec.decode(fields, shape), case.codec.reference_decode(fields, shape))


@each
def test_traces_without_graph_breaks(case: Case) -> None:
    codec, shape = case.codec, (6, 200)
    torch.compiler.reset()
    encode = torch.compile(codec.encode, fullgraph=True, backend="eager", dynamic=False)
    decode = torch.compile(codec.decode, fullgraph=True, backend="eager", dynamic=False)
    weight = gaussian(*shape)
    fields = codec.encode(weight)
    assert same(encode(weight), fields)
    assert torch.equal(decode(fields, shape, torch.bfloat16), codec.decode(fields, shape, torch.bfloat16))


@each
def test_encoding_twice_adds_nothing(case: Case) -> None:
    if dict(case.parameters).get("double_quant"):
        pytest.skip("the scales' offset moves")
    once = round_trip(case.codec, gaussian(64, 512))
    twice = round_trip(case.codec, once)
    exact = case.name in ("mxfp8", "mxfp4", "bnb4") or dict(case.parameters).get("symmetric", False)
    assert torch.equal(once, twice) if exact else relative(twice, once) < (0.02 if "int4" in case.name else 2e-3)


@each
def test_works_on_shapes_alone(case: Case) -> None:
    fields = case.codec.encode(torch.empty(700, 1030, device="meta"))
    for name, spec in case.codec.specs((700, 1030)).items():
        assert (tuple(fields[name].shape), fields[name].dtype) == (spec.shape, spec.dtype), name
    assert case.codec.decode(fields, (700, 1030), torch.bfloat16).shape == (700, 1030)


@pytest.mark.parametrize(
    ("name", "parameters", "says"),
    [
        ("mxfp8", {"rounding": "flor"}, "floor"),
        ("mxfp4", {"rounding": "even"}, "uos"),
        ("bnb4", {"quant_type": "nf3"}, "nf4"),
        ("bnb4", {"block_size": 48}, "power of two"),
        ("int4_group", {"group_size": 0}, "-1"),
        ("int4_group", {"scale_dtype": "float64"}, "float32"),
        ("fp8_block", {"rows": 0}, "at least 1"),
        ("fp8_chanel", {}, "fp8_channel"),
    ],
)
def test_wrong_parameters(name: str, parameters: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        get_codec(name, **parameters)


def test_codecs_are_values() -> None:
    assert get_codec("bnb4") == get_codec("bnb4", block_size=64) != get_codec("bnb4", block_size=128)
    assert len({get_codec("mxfp4"), get_codec("mxfp4", rounding="floor"), get_codec("mxfp8")}) == 2
