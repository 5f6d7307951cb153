"""Codecs against numpy programs written from the formats' definitions, cell by cell where it helps."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from omniloom.quantization.codecs import get_codec
from omniloom.quantization.codecs.mx import E2M1, to_e2m1
from omniloom.quantization.codecs.scales import power_of_two, shared_exponent
from tests.quantization.codecs.cases import gaussian

_E4M3 = np.array(
    [
        (1 if code < 128 else -1)
        * ((code & 7) / 8 * 2.0**-6 if code & 0x78 == 0 else (1 + (code & 7) / 8) * 2.0 ** ((code >> 3 & 15) - 7))
        for code in range(256)
    ]
)
_E4M3[[127, 255]] = np.nan


def e4m3(values: np.ndarray) -> np.ndarray:
    """Nearest code of each value, ties to even, saturating."""
    order = np.arange(127)  # positive codes rise with their bits
    size = np.minimum(np.abs(values.astype(np.float64)), 448)
    upper = np.searchsorted(_E4M3[order], size).clip(0, 126)
    lower = (upper - 1).clip(0)
    below, above = size - _E4M3[lower], _E4M3[upper] - size
    take_lower = (below < above) | ((below == above) & (lower % 2 == 0))
    return (np.where(take_lower, lower, upper) + 128 * np.signbit(values)).astype(np.uint8)


def spread(values: np.ndarray, size: int, columns: int) -> np.ndarray:
    return np.repeat(values, size, axis=1)[:, :columns]


def group_amax(weight: np.ndarray, size: int) -> np.ndarray:
    return np.stack([np.abs(weight[:, k : k + size]).max(1) for k in range(0, weight.shape[1], size)], 1)


def unpack(packed: torch.Tensor, columns: int) -> np.ndarray:
    data = packed.numpy()
    return np.stack((data & 15, data >> 4), -1).reshape(data.shape[0], -1)[:, :columns]


def test_e4m3_itself() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    np.testing.assert_array_equal(codes.view(torch.float8_e4m3fn).float().numpy(), _E4M3)


@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_channel", "fp8_block"])
def test_fp8(name: str) -> None:
    weight = gaussian(150, 331).bfloat16()
    array = weight.float().numpy()
    fields = get_codec(name).encode(weight)
    if name == "fp8_tensor":
        scale = np.float32(np.abs(array).max()) / np.float32(448)
        full = scale
    elif name == "fp8_channel":
        scale = np.abs(array).max(1, keepdims=True) / np.float32(448)
        full = scale
    else:
        rows = group_amax(array.T.copy(), 128).T
        scale = group_amax(rows, 128) / np.float32(448)
        full = np.repeat(np.repeat(scale, 128, 0)[:150], 128, 1)[:, :331]
    np.testing.assert_array_equal(fields["scale"].numpy(), scale)
    codes = fields["codes"].view(torch.uint8).numpy()
    np.testing.assert_array_equal(codes, e4m3(array / full))
    decoded = get_codec(name).decode(fields, (150, 331)).numpy()
    np.testing.assert_array_equal(decoded, _E4M3[codes].astype(np.float32) * full)


def test_int8() -> None:
    weight = gaussian(40, 257)
    weight[3] = 0
    array = weight.numpy()
    fields = get_codec("int8_channel").encode(weight)
    scale = np.abs(array).max(1, keepdims=True) / np.float32(127)
    scale[3] = 1
    np.testing.assert_array_equal(fields["scale"].numpy(), scale)
    np.testing.assert_array_equal(fields["codes"].numpy(), np.rint(array / scale).astype(np.int8))
    halves = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]])
    assert get_codec("int8_channel").encode(halves)["codes"].tolist() == [[127, 0, 2, 2, 0, -2, -2]]


@pytest.mark.parametrize(("rounding", "most"), [("floor", None), ("ceil", 448.0)])
def test_mxfp8(rounding: str, most: float | None) -> None:
    check_mx("mxfp8", rounding, most, 8)


@pytest.mark.parametrize(("rounding", "most"), [("floor", None), ("ceil", 6.0), ("uos", 7.25)])
def test_mxfp4(rounding: str, most: float | None) -> None:
    check_mx("mxfp4", rounding, most, 2)


def check_mx(name: str, rounding: str, most: float | None, emax: int) -> None:
    weight = gaussian(64, 333) * torch.logspace(-30, 30, 64).unsqueeze(1)
    weight[5, 32:64] = 0
    array = weight.numpy()
    exponents = np.empty((64, 11), np.int64)
    for (row, group), amax in np.ndenumerate(group_amax(array, 32)):
        if amax == 0:
            exponents[row, group] = -127
        elif most is None:
            exponents[row, group] = math.frexp(amax)[1] - 1 - emax
        else:  # the least power of two that brings amax to ``most`` or below
            power = math.frexp(float(amax) / most)[1] - 1
            exponents[row, group] = power if float(amax) <= most * 2.0**power else power + 1
    exponents = exponents.clip(-127, 127)
    codec = get_codec(name, rounding=rounding)
    fields = codec.encode(weight)
    np.testing.assert_array_equal(fields["exponents"].numpy(), exponents + 127)
    full = spread(2.0**exponents, 32, 333)
    if name == "mxfp8":
        codes = fields["codes"].view(torch.uint8).numpy()
        expected, values = e4m3(array / full), _E4M3
    else:
        codes, values = unpack(fields["packed"], 333), np.array(E2M1)
        expected = e2m1(array / full, away=False)
    np.testing.assert_array_equal(codes, expected)
    np.testing.assert_array_equal(codec.decode(fields, (64, 333)).numpy(), (values[codes] * full).astype(np.float32))


def e2m1(values: np.ndarray, away: bool) -> np.ndarray:
    out = np.empty(values.shape, np.uint8)
    for index, value in np.ndenumerate(values):
        distance = [abs(min(abs(float(value)), 6.0) - level) for level in E2M1[:8]]
        near = [code for code in range(8) if distance[code] == min(distance)]
        code = max(near) if away else next((code for code in near if len(near) == 1 or code % 2 == 0), near[0])
        out[index] = code + 8 * (value < 0)
    return out


def test_e2m1_halves_and_their_neighbours() -> None:
    halves = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    near = np.concatenate([halves, np.nextafter(halves, np.float32(0)), np.nextafter(halves, np.float32(9))])
    values = np.concatenate([near, -near, np.float32([0, 6, 7, 100, 1e-9, -1e-9, -6, -1e30])])
    for away in (False, True):
        np.testing.assert_array_equal(to_e2m1(torch.from_numpy(values), away).numpy(), e2m1(values, away))
    assert to_e2m1(torch.from_numpy(halves)).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert to_e2m1(torch.from_numpy(halves), away=True).tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_exponents_at_powers_of_two() -> None:
    """log2 in float32 calls the number below 2^p a power of two as well."""
    powers = np.float32(2.0) ** np.arange(-100, 120, dtype=np.float32)
    for amax, change in (
        (powers, 0),
        (np.nextafter(powers, np.float32(0)), -1),
        (np.nextafter(powers, np.float32(np.inf)), 0),
    ):
        expected = (np.arange(-100, 120) + change - 2 + 127).clip(0)
        np.testing.assert_array_equal(shared_exponent(torch.from_numpy(amax), 2).numpy(), expected)
    for most, emax in ((448.0, 8), (6.0, 2), (7.25, 2)):
        limit = most / 2**emax
        at = torch.tensor([most, np.nextafter(np.float32(most), np.float32(1e9)), most / 2], dtype=torch.float32)
        assert shared_exponent(at, emax, limit).tolist() == [127, 128, 126]


def test_power_of_two_bytes() -> None:
    values = power_of_two(torch.arange(256, dtype=torch.uint8)).double()
    assert values[:255].tolist() == [2.0 ** (byte - 127) for byte in range(255)] and bool(values[255].isnan())


def test_mxfp4_dual() -> None:
    weight = gaussian(12, 1111)
    weight[2, :512], weight[3, 40:70] = 0, 0
    array = weight.numpy()
    coarse = group_amax(array, 512) / np.float32(6)
    coarse[coarse == 0] = 1
    scaled = array / spread(coarse, 512, 1111)
    fine = np.floor(np.log2(group_amax(scaled, 32).astype(np.float64) * 8 / 7 + 9.6e-7)) - 2
    fields = get_codec("mxfp4_dual").encode(weight)
    np.testing.assert_array_equal(fields["coarse"].numpy(), coarse)
    np.testing.assert_array_equal(fields["exponents"].numpy(), fine + 127)
    full = spread(2.0**fine, 32, 1111)
    codes = unpack(fields["packed"], 1111)
    np.testing.assert_array_equal(codes, e2m1(scaled / full, away=True))
    decoded = get_codec("mxfp4_dual").decode(fields, (12, 1111)).numpy()
    np.testing.assert_array_equal(
        decoded, (np.array(E2M1)[codes] * full).astype(np.float32) * spread(coarse, 512, 1111)
    )


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("size", [32, 128, -1])
def test_int4(symmetric: bool, size: int) -> None:
    weight = gaussian(20, 300).bfloat16()
    array, wide = weight.float().numpy(), 300 if size == -1 else size
    codec = get_codec("int4_group", group_size=size, symmetric=symmetric)
    fields = codec.encode(weight)
    groups = [array[:, k : k + wide] for k in range(0, 300, wide)]
    low = np.stack([np.minimum(g.min(1), 0) for g in groups], 1)
    high = np.stack([np.maximum(g.max(1), 0) for g in groups], 1)
    if symmetric:
        scale = (np.where(-low > high, low, high) / np.float32(-8)).astype(np.float16)
        zero = np.full(scale.shape, 8)
        assert (scale < 0).any() and (scale > 0).any()
    else:
        scale = ((high - low) / np.float32(15)).astype(np.float16)
        zero = np.rint(-low / scale.astype(np.float32))
        np.testing.assert_array_equal(fields["zero"].numpy(), zero)
    np.testing.assert_array_equal(fields["scale"].numpy(), scale)
    full_scale, full_zero = (spread(x.astype(np.float32), wide, 300) for x in (scale, zero))
    codes = unpack(fields["packed"], 300)
    np.testing.assert_array_equal(codes, (np.rint(array / full_scale) + full_zero).clip(0, 15))
    np.testing.assert_array_equal(codec.decode(fields, (20, 300)).numpy(), (codes - full_zero) * full_scale)
