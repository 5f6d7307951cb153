"""Bounded reading of GGUF's header values: numbers, text and arrays."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import BinaryIO

_AHEAD = 1 << 20
_MAX_HEADER = 128 << 20  # a tokenizer's tables take a few MB
_MAX_TEXT = 16 << 20
_MAX_TEXTS = 1 << 21  # in all arrays of a file; the largest vocabularies have 300,000 and as many merges
LONG_ARRAY = 1024

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: dict[int, tuple[str, struct.Struct]] = {
    number: (name, struct.Struct("<" + code))
    for number, name, code in (
        (0, "u8", "B"),
        (1, "i8", "b"),
        (2, "u16", "H"),
        (3, "i16", "h"),
        (4, "u32", "I"),
        (5, "i32", "i"),
        (6, "f32", "f"),
        (7, "bool", "B"),
        (10, "u64", "Q"),
        (11, "i64", "q"),
        (12, "f64", "d"),
    )
}
_U32, _U64 = _SCALARS[4][1], _SCALARS[10][1]


class Damaged(Exception):
    """What is wrong with a file, without its path."""


@dataclass(frozen=True, slots=True)
class LongArray:
    """An array of more than ``LONG_ARRAY`` elements, which is checked but not kept. ``offset``: of its first byte."""

    element: str
    count: int
    offset: int


Scalar = int | float | bool | str
Value = Scalar | list[int | float | bool | str] | LongArray


class Cursor:
    """Reads a header front to back. Whatever the file says, no more than a bounded amount is read or kept."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._size = size
        self._buffer = b""
        self._at = 0  # in the buffer
        self._start = 0  # of the buffer, in the file
        self.texts = 0  # in arrays, so far

    @property
    def position(self) -> int:
        """The offset of the next byte in the file."""
        return self._start + self._at

    def peek(self, count: int) -> bytes:
        """Return up to ``count`` bytes from here on, without moving."""
        self._fill(count)
        return self._buffer[self._at : self._at + count]

    def _fill(self, count: int) -> None:
        if len(self._buffer) - self._at >= count:
            return
        self._file.seek(self.position)
        self._start, self._at = self.position, 0
        self._buffer = self._file.read(max(count, _AHEAD))

    def _check(self, count: int, what: str) -> None:
        end = self.position + count
        if end > self._size:
            raise Damaged(
                f"truncated inside the header, in {what}: at least {end} bytes expected, {self._size} found; "
                "fetch it again"
            )
        if end > _MAX_HEADER:
            raise Damaged(f"damaged header: {what} ends at byte {end}, a header has at most {_MAX_HEADER}")

    def take(self, count: int, what: str) -> bytes:
        """Return the next ``count`` bytes. Raises ``Damaged``, naming ``what``, if they are not there."""
        self._check(count, what)
        self._fill(count)
        part = self._buffer[self._at : self._at + count]
        if len(part) != count:
            raise Damaged(f"the file became shorter while its header was read, in {what}")
        self._at += count
        return part

    def skip(self, count: int, what: str) -> None:
        """Move on by ``count`` bytes."""
        self._check(count, what)
        if count <= len(self._buffer) - self._at:
            self._at += count
        else:
            self._start, self._at, self._buffer = self.position + count, 0, b""

    def u32(self, what: str) -> int:
        """Return the next unsigned 32-bit number."""
        value: int = _U32.unpack(self.take(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        """Return the next unsigned 64-bit number."""
        value: int = _U64.unpack(self.take(8, what))[0]
        return value

    def text(self, what: str) -> str:
        """Return the next text."""
        raw = self.take(self._length(what), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise Damaged(f"damaged header: {what} is not UTF-8: {raw[:60]!r}") from error

    def skip_texts(self, count: int, what: str) -> None:
        """Move behind ``count`` texts."""
        unpack = _U64.unpack_from
        while count:
            self._fill(8)
            buffer, at, last = self._buffer, self._at, len(self._buffer) - 8
            while count and at <= last:  # a text that ends behind the buffer ends this loop, too
                (length,) = unpack(buffer, at)
                if at + 8 + length > last + 8:
                    break
                at += 8 + length
                count -= 1
            self._at = at
            if count:
                self._check(0, what)
                self.skip(self._length(what), what)
                count -= 1
        self._check(0, what)

    def _length(self, what: str) -> int:
        length = self.u64(what)
        if length > _MAX_TEXT and self.position + length <= self._size:
            raise Damaged(f"damaged header: {what} has {length} bytes of text, at most {_MAX_TEXT} are read")
        return length


def read_value(cursor: Cursor, key: str) -> Value:
    """Return the value of ``key``: its type number, then its bytes. Raises ``Damaged``."""
    what = f"the value of {key!r:.200}"
    number = cursor.u32(what)
    return _array(cursor, what) if number == _ARRAY else _scalar(cursor, number, what)


def _scalar(cursor: Cursor, number: int, what: str) -> Scalar:
    if number == _STRING:
        return cursor.text(what)
    if number not in _SCALARS:
        raise Damaged(f"damaged header: {what} has the unknown type {number}")
    form = _SCALARS[number][1]
    value: int | float = form.unpack(cursor.take(form.size, what))[0]
    return _bool(value, what) if number == _BOOL else value


def _bool(value: float, what: str) -> bool:
    if value not in (0, 1):
        raise Damaged(f"damaged header: {what} is {value}, not a bool")
    return bool(value)


def _array(cursor: Cursor, what: str) -> Value:
    number, count = cursor.u32(what), cursor.u64(what)
    start = cursor.position
    if number == _STRING:
        cursor.texts += count
        if cursor.texts > _MAX_TEXTS:
            raise Damaged(f"damaged header: {what} has {count} texts, at most {_MAX_TEXTS} are read from a file")
        if count <= LONG_ARRAY:
            return [cursor.text(what) for _ in range(count)]
        cursor.skip_texts(count, what)
        return LongArray("string", count, start)
    if number not in _SCALARS:
        kind = "an array of arrays" if number == _ARRAY else f"an array of the unknown type {number}"
        raise Damaged(f"damaged header: {what} is {kind}")
    name, form = _SCALARS[number]
    if count > LONG_ARRAY:
        cursor.skip(count * form.size, what)
        return LongArray(name, count, start)
    raw = cursor.take(count * form.size, what)
    values: list[int | float | bool | str] = [value for (value,) in form.iter_unpack(raw)]
    return [_bool(float(value), what) for value in values] if number == _BOOL else values
