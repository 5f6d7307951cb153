from __future__ import annotations

import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from omniloom.checkpoint import read_header
from omniloom.checkpoint.foreign import kind_of
from omniloom.errors import CheckpointError

LFS = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (LFS, "git lfs pull"),
        (LFS[:30], "git lfs pull"),
        (b"GGUF\x03\x00\x00\x00" + bytes(100), "GGUF"),
        (b"<!DOCTYPE html>\n<html><head>", "HTML"),
        (b"\n  <html lang='en'>", "HTML"),
        (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "XML"),
        (b'{"error": "Repository not found"}', "JSON"),
        (pickle.dumps({"a": np.zeros(3)}), "pickle"),
        (b"\x1f\x8b\x08\x00" + bytes(60), "gzip"),
    ],
)
def test_foreign_files_are_named(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


def test_what_other_libraries_write(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    torch.save({"a": torch.zeros(3)}, path)
    with pytest.raises(CheckpointError, match="pickle"):
        read_header(path)
    torch.save({"a": torch.zeros(3)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="pickle"):
        read_header(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", "b")
    with pytest.raises(CheckpointError, match="zip"):
        read_header(path)
    with open(path, "wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(CheckpointError, match="numpy"):
        read_header(path)


def test_a_valid_file_may_start_like_another_kind(tmp_path: Path) -> None:
    """A header of 640 bytes starts with 80 02, as a pickle does."""
    path = tmp_path / "model.safetensors"
    path.write_bytes((640).to_bytes(8, "little") + b"{}".ljust(640))
    assert kind_of(path.read_bytes()[:64])
    assert read_header(path).tensors == {}


def test_unknown_bytes_have_no_kind() -> None:
    assert kind_of(b"") is None
    assert kind_of(bytes(64)) is None
