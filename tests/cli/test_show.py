from __future__ import annotations

import io

import pytest

from omniloom.cli.show import show_bytes, show_count, show_rate, show_rows, styled


@pytest.mark.parametrize(
    ("count", "expected"),
    [(None, "?"), (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**30, "1.0 GiB"), (5 * 2**40, "5.0 TiB")],
)
def test_bytes(count: int | None, expected: str) -> None:
    assert show_bytes(count) == expected


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0"),
        (999, "999"),
        (41_888, "41.9 k"),
        (860_000_000, "860 M"),
        (11_900_000_000, "11.9 B"),
        (2 * 10**12, "2000 B"),
    ],
)
def test_counts(count: int, expected: str) -> None:
    assert show_count(count) == expected


@pytest.mark.parametrize(("rate", "expected"), [(6.43, "6.4 steps/s"), (0.5, "2.0 s/step"), (0.0, "")])
def test_rates(rate: float, expected: str) -> None:
    assert show_rate(rate) == expected


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_rows_line_up() -> None:
    assert list(show_rows([("a", "word " * 40), ("long", "x")], io.StringIO())) == ["a     " + "word " * 40, "long  x"]


def test_rows_wrap_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "33")
    monkeypatch.setenv("NO_COLOR", "1")
    assert list(show_rows([("a", "word " * 8)], Terminal())) == ["a  word word word word word word", "   word word"]


def test_colours_only_where_they_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert styled("x", "31", io.StringIO()) == "x"
    assert styled("x", "31", Terminal()) == "\x1b[31mx\x1b[0m"
    assert styled("", "31", Terminal()) == ""
    monkeypatch.setenv("NO_COLOR", "")
    assert styled("x", "31", Terminal()) == "x"
