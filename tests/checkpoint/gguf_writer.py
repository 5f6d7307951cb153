"""A GGUF writer that shares nothing with the reader: headers byte by byte, as the format is published."""

from __future__ import annotations

import struct
from pathlib import Path


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def entry(name: str | bytes, dims: list[int], kind: int, offset: int) -> bytes:
    """``dims`` as the file has them: innermost first."""
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def header(pairs: list[bytes], entries: list[bytes], version: int = 3, alignment: int = 32) -> bytes:
    raw = b"GGUF" + struct.pack("<IQQ", version, len(entries), len(pairs)) + b"".join(pairs) + b"".join(entries)
    return raw + bytes(-len(raw) % alignment)


def file(path: Path, pairs: list[bytes], entries: list[bytes], data: bytes, **options: int) -> Path:
    path.write_bytes(header(pairs, entries, **options) + data)
    return path
