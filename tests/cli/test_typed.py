from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniloom.cli.typed import parse_integer, parse_number, parse_settings, parse_size
from omniloom.engine.params import MAX_PIXELS, MAX_SIDE
from omniloom.errors import ConfigError, RequestError


@given(number=st.integers(-(10**25), 10**25))
def test_integers(number: int) -> None:
    assert parse_integer(f" {number}") == number


@pytest.mark.parametrize("text", ["", "1.5", "1e3", "true", "1_000", "４", "0x10", "9" * 40])
def test_what_is_no_integer(text: str) -> None:
    with pytest.raises(ValueError, match="is not a whole number"):
        parse_integer(text)


def test_numbers() -> None:
    assert (parse_number("3.5"), parse_number("-1"), parse_number("1e-3")) == (3.5, -1.0, 0.001)
    with pytest.raises(ValueError, match="'three' is not a number"):
        parse_number("three")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1024x768", (1024, 768)),
        ("64X64", (64, 64)),
        (" 64 x 64 ", (64, 64)),
        ("64×64", (64, 64)),
        ("65x65", (65, 65)),  # well formed; whether a model can make it is the model's answer
        ("1x1", (1, 1)),
        ("7680x4320", (7680, 4320)),
    ],
)
def test_sizes(text: str, expected: tuple[int, int]) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "64",
        "1024x",
        "x64",
        "64x64x64",
        "1e3x64",
        "-64x64",
        "64.0x64",
        "auto",
        "null",
        "６４x64",
        "64*64",
        "64,64",
        "a×b",
    ],
)
def test_malformed_sizes(text: str) -> None:
    with pytest.raises(RequestError, match="must be WIDTHxHEIGHT in pixels, for example 1024x768"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0x64", "from 1 to"),
        ("64x0", "from 1 to"),
        ("100000x10000", "from 1 to"),
        ("10000x10000", "pixels are too many"),
        ("999999999x999999999", "from 1 to"),
        ("9" * 5000 + "x64", "must be WIDTHxHEIGHT"),
    ],
)
def test_sizes_out_of_range(text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        parse_size(text)


@given(width=st.integers(0, 10**7), height=st.integers(0, 10**7))
def test_a_size_is_read_or_refused(width: int, height: int) -> None:
    try:
        assert parse_size(f"{width}x{height}") == (width, height)
        fits = True
    except RequestError:
        fits = False
    assert fits == (1 <= width <= MAX_SIDE and 1 <= height <= MAX_SIDE and width * height <= MAX_PIXELS)


@given(text=st.text(max_size=20))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        parse_size(text)
    except RequestError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([], {}),
        (["vae.tiling=true", "vae.slicing=false"], {"vae": {"tiling": True, "slicing": False}}),
        (["dtype=float32"], {"dtype": "float32"}),
        (["base=a=b"], {"base": "a=b"}),
        (["engine.workers=2"], {"engine": {"workers": 2}}),
        (["base="], {"base": None}),
        (["base=null"], {"base": None}),
        (["scheduler={name: euler, shift: 3.0}"], {"scheduler": {"name": "euler", "shift": 3.0}}),
    ],
)
def test_settings(items: list[str], expected: dict[str, Any]) -> None:
    assert parse_settings(items) == expected


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["vae"], "must be key=value"),
        (["=3"], "must be key=value"),
        (["vae..tiling=1"], "must be key=value"),
        (["a b=1"], "must be key=value"),
        (["vae=[1"], "not valid YAML"),
        (["vae.tiling=1", "vae.tiling=0"], "given twice"),
        (["vae=1", "vae.tiling=0"], "a value of its own"),
        (["vae.tiling=1", "vae=2"], "given twice"),
    ],
)
def test_malformed_settings(items: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_settings(items)
    assert "\n" not in str(caught.value)
