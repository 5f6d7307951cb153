"""Recognise what a file that is not safetensors is, by its first bytes, to say so instead of "invalid header"."""

from __future__ import annotations

_PICKLE = "a pickle, which omniloom refuses because loading one can run code; convert it to safetensors"

_KINDS: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs", "this is a Git-LFS pointer, the file itself was not fetched: run `git lfs pull`"),
    (b"GGUF", "this is a GGUF file"),
    (b"PK\x03\x04", f"this is a zip archive, probably {_PICKLE}"),
    (b"\x1f\x8b", "this is a gzip archive"),
    (b"\x28\xb5\x2f\xfd", "this is a zstd archive"),
    (b"\x93NUMPY", "this is a numpy file"),
    (b"\x89HDF", "this is an HDF5 file"),
    (b"<!doctype html", "this is an HTML page, probably a login or error page saved by a download; fetch it again"),
    (b"<html", "this is an HTML page, probably a login or error page saved by a download; fetch it again"),
    (b"<?xml", "this is an XML text, probably an error page saved by a download; fetch it again"),
    (b"{", "this is a JSON text"),
)


def kind_of(head: bytes) -> str | None:
    """Name the kind of file that starts with ``head`` (32 bytes or more are enough), or None if it is unknown.

    A safetensors file may by chance start like one of these, so ask only after its header was found to be wrong.
    """
    text = head.lstrip().lower()
    for magic, kind in _KINDS:
        if head.startswith(magic) or (magic.startswith(b"<") and text.startswith(magic)):
            return kind
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return f"this is {_PICKLE}"
    return None
