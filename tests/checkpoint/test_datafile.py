from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from omniloom.checkpoint import datafile
from omniloom.checkpoint.datafile import DataFile
from omniloom.errors import CheckpointError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(bytes(range(256)) * 100)
    return path


@pytest.fixture(params=["preadv", "without preadv"])
def file(path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> DataFile:
    monkeypatch.setattr(datafile, "_HAS_PREADV", request.param == "preadv")
    return DataFile(path)


def test_read_into(file: DataFile) -> None:
    buffer = bytearray(1000)
    file.read_into(memoryview(buffer), 300)
    assert buffer == (bytes(range(256)) * 100)[300:1300]
    file.read_into(memoryview(bytearray()), 0)


def test_short_reads_are_continued(file: DataFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datafile, "_MAX_READ", 7)
    buffer = bytearray(1000)
    file.read_into(memoryview(buffer), 300)
    assert buffer == (bytes(range(256)) * 100)[300:1300]


def test_end_of_file(file: DataFile, path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{path}: ends at byte 25600, 25700 expected"):
        file.read_into(memoryview(bytearray(200)), 25500)
    with pytest.raises(CheckpointError, match="25601 bytes expected, 25600 found"):
        file.mapping(25601)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        DataFile(tmp_path / "absent")


def test_one_mapping_while_it_is_used_and_none_after(file: DataFile) -> None:
    mapped = file.mapping(10)
    assert file.mapping(20) is mapped
    mapped[0] = 99  # private: the file keeps its byte
    assert file.path.read_bytes()[0] == 0
    gc.collect()  # what other tests left behind must not count
    before = len(os.listdir("/proc/self/fd"))
    del mapped
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before - 1
    assert file.mapping(10)[0] == 0


def test_the_last_reference_closes_the_descriptor(path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    file = DataFile(path)
    opened = set(os.listdir("/proc/self/fd")) - before
    assert len(opened) == 1
    del file
    gc.collect()
    assert not opened & set(os.listdir("/proc/self/fd"))
