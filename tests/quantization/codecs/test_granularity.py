"""Errors that tell one scale per tensor from one per row, a swapped nibble from a right one, and how blocks matter."""

from __future__ import annotations

import pytest
import torch

from omniloom.quantization.codecs import get_codec
from omniloom.quantization.codecs.scales import positive_scale
from tests.quantization.codecs.cases import gaussian, relative, round_trip


def row_errors(result: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (result - weight).norm(dim=1) / weight.norm(dim=1)


@pytest.mark.parametrize("name", ["int8_channel", "int8_rowmax"])
def test_an_outlier_row_costs_only_itself(name: str) -> None:
    weight = gaussian()
    weight[17] *= 50
    assert 0.7 * 0.0082 < float(row_errors(round_trip(get_codec(name), weight), weight).median()) < 1.2 * 0.0082
    scale = positive_scale(weight.abs().amax(), 127.0)
    per_tensor = (weight / scale).round() * scale
    assert float(row_errors(per_tensor, weight).median()) > 0.3  # the test can tell the two apart


def test_fp8_rows_of_all_magnitudes() -> None:
    weight = gaussian() * torch.logspace(-4, 3, 256).unsqueeze(1)
    assert float(row_errors(round_trip(get_codec("fp8_channel"), weight), weight).max()) < 0.03
    per_tensor = row_errors(round_trip(get_codec("fp8_tensor"), weight), weight)
    assert 0.2 < float((per_tensor > 0.5).float().mean()) < 0.4


def test_fp8_blocks_of_all_magnitudes() -> None:
    magnitude = torch.logspace(-4, 3, 6).view(2, 3).repeat_interleave(128, 0).repeat_interleave(128, 1)
    weight = gaussian(200, 300) * magnitude[:200, :300]
    result = round_trip(get_codec("fp8_block"), weight)
    for rows in (slice(0, 128), slice(128, None)):
        for columns in (slice(0, 128), slice(128, 256), slice(256, None)):
            assert relative(result[rows, columns], weight[rows, columns]) < 0.03


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("mxfp4", {}), ("mxfp4_dual", {}), ("int4_group", {}), ("int4_group", {"symmetric": False}), ("bnb4", {})],
)
def test_swapped_nibbles_are_seen(name: str, parameters: dict[str, object]) -> None:
    codec, weight = get_codec(name, **parameters), gaussian()
    fields = codec.encode(weight)
    fields["packed"] = (fields["packed"] << 4) | (fields["packed"] >> 4)
    assert relative(codec.decode(fields, (256, 2048)), weight) > 1.3


def test_a_zero_point_off_by_one_is_seen() -> None:
    codec, weight = get_codec("int4_group", group_size=32, symmetric=False), gaussian()
    fields = codec.encode(weight)
    fields["zero"] += 1
    assert 0.25 < relative(codec.decode(fields, (256, 2048)), weight) < 0.4


def test_gptq_zero_of_sixteen_decodes() -> None:
    codec = get_codec("int4_group", group_size=32, symmetric=False)
    fields = codec.encode(gaussian(2, 64))
    fields["zero"].fill_(16)
    expected = (codec.reference_decode(fields, (2, 64)), codec.decode(fields, (2, 64)))
    assert torch.equal(*expected) and bool((expected[0] * fields["scale"].float().repeat_interleave(32, 1) <= 0).all())


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("double", [False, True])
def test_error_grows_smoothly_with_the_block(kind: str, double: bool) -> None:
    weight = gaussian()
    errors = [
        relative(
            round_trip(get_codec("bnb4", quant_type=kind, block_size=2**power, double_quant=double), weight), weight
        )
        for power in range(6, 13)
    ]
    for smaller, larger in zip(errors, errors[1:], strict=False):
        assert smaller < larger < smaller * 1.12


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "mxfp4_dual"])
def test_a_group_does_not_see_its_neighbour(name: str) -> None:
    codec, wide = get_codec(name), 512 if name == "mxfp4_dual" else 32
    weight = gaussian(4, 2 * wide)
    alone = round_trip(codec, weight)
    weight[:, wide:] *= 1e6
    assert torch.equal(round_trip(codec, weight)[:, :wide], alone[:, :wide])
