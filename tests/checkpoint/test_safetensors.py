from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from omniloom.checkpoint import TensorSource, read_header, single_file
from omniloom.errors import CheckpointError
from tests.checkpoint.writer import entry, raw_file

TENSORS = {
    "blocks.0.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "blocks.0.bias": torch.ones(5, dtype=torch.bfloat16),
    "step": torch.tensor(7),
}


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt", "who": "test"})
    return path


def refused(path: Path, *words: str) -> str:
    """Both ways of reading refuse ``path`` with the same one line, within the time a user would wait."""
    started = time.monotonic()
    messages = []
    for prefer in ("map", "read"):
        with pytest.raises(CheckpointError) as caught, TensorSource(single_file(path)) as source:
            for name in source.names():
                source.read(name, prefer=prefer)
        messages.append(str(caught.value))
    assert time.monotonic() - started < 2
    assert messages[0] == messages[1]
    assert "\n" not in messages[0]
    for word in (str(path), *words):
        assert word in messages[0]
    return messages[0]


def test_header_of_a_file_by_the_official_library(good: Path) -> None:
    header = read_header(good)
    assert header.size == good.stat().st_size
    assert header.metadata == {"format": "pt", "who": "test"}
    assert header.tensors.keys() == TENSORS.keys()
    data = good.read_bytes()
    for name, tensor in TENSORS.items():
        info = header.tensors[name]
        assert (info.name, info.file, info.shape) == (name, good, tuple(tensor.shape))
        assert info.torch_dtype == tensor.dtype
        assert info.itemsize == tensor.element_size()
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert data[info.offset : info.offset + info.nbytes] == raw


def test_names_are_in_the_order_of_their_bytes(good: Path) -> None:
    offsets = [info.offset for info in read_header(good).tensors.values()]
    assert offsets == sorted(offsets)


def test_a_file_without_tensors_and_one_with_empty_tensors(tmp_path: Path) -> None:
    assert read_header(raw_file(tmp_path / "none", "{}", b"")).tensors == {}
    header = {"a": entry("F32", [0, 3], 0, 0), "b": entry("U8", [2], 0, 2), "c": entry("F16", [0], 2, 2)}
    assert list(read_header(raw_file(tmp_path / "empty", header, b"ab")).tensors) == ["a", "b", "c"]


def test_padding_of_the_header_is_allowed(tmp_path: Path) -> None:
    path = raw_file(tmp_path / "padded", '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}      ', b"x")
    assert read_header(path).tensors["a"].nbytes == 1


# --- cut or over-long files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [0, 1, 4, 7])
def test_cut_before_the_header(good: Path, cut: int) -> None:
    good.write_bytes(good.read_bytes()[:cut])
    refused(good, f"{cut} bytes", "fetch it again")


@pytest.mark.parametrize("cut", [8, 9, -1])
def test_cut_inside_the_header(good: Path, cut: int) -> None:
    data = good.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    at = cut if cut > 0 else end + cut
    good.write_bytes(data[:at])
    refused(good, "truncated inside the header", f"{end} bytes expected", f"{at} found")


@pytest.mark.parametrize("missing", [1, 10, 40, 66])
def test_cut_inside_the_tensors(good: Path, missing: int) -> None:
    data = good.read_bytes()
    good.write_bytes(data[:-missing])
    refused(good, "truncated", f"{len(data)} bytes expected", f"{len(data) - missing} found")


@pytest.mark.parametrize("extra", [1, 64, 5000])
def test_trailing_bytes(good: Path, extra: int) -> None:
    size = good.stat().st_size
    with open(good, "ab") as file:
        file.write(bytes(extra))
    refused(good, f"{size} bytes expected", f"{size + extra} found", "trailing")


@pytest.mark.parametrize("length", [2**60, 2**64 - 1, 100_000_001, 0, 1])
def test_absurd_header_length(good: Path, length: int) -> None:
    data = good.read_bytes()
    good.write_bytes(length.to_bytes(8, "little") + data[8:])
    refused(good, str(length), f"{len(data)} bytes")


def test_all_zeros_is_an_unfinished_download(tmp_path: Path) -> None:
    path = tmp_path / "zeros.safetensors"
    path.write_bytes(bytes(4096))
    refused(path, "unfinished download", "4096")


# --- damaged headers ---------------------------------------------------------------------------------------------

A = entry("F32", [2], 0, 8)
DAMAGED = {
    "hole": ({"a": A, "b": entry("F32", [1], 12, 16)}, 16, ["'b'", "hole of 4"]),
    "hole_at_start": ({"a": entry("F32", [2], 4, 12)}, 12, ["'a'", "hole of 4"]),
    "overlap": ({"a": A, "b": entry("F32", [2], 4, 12)}, 12, ["'b'", "overlaps"]),
    "same_place": ({"a": A, "b": A}, 8, ["'b'", "overlaps"]),
    "shape_too_large": ({"a": entry("F32", [3], 0, 8)}, 8, ["'a'", "spans 8", "needs 12"]),
    "shape_huge": ({"a": entry("F32", [2**62] * 8, 0, 8)}, 8, ["'a'", "more than"]),
    "too_many_dimensions": ({"a": entry("U8", [1] * 65, 0, 1)}, 1, ["'a'", "shape"]),
    "negative_shape": ({"a": entry("F32", [-2, -1], 0, 8)}, 8, ["'a'", "shape"]),
    "bool_shape": ({"a": entry("F32", [True, 2], 0, 8)}, 8, ["'a'", "shape"]),
    "float_shape": ({"a": entry("F32", [2.0], 0, 8)}, 8, ["'a'", "shape"]),
    "offsets_reversed": ({"a": entry("F32", [2], 8, 0)}, 8, ["'a'", "offsets"]),
    "offsets_three": ({"a": {**A, "data_offsets": [0, 8, 8]}}, 8, ["'a'", "offsets"]),
    "offset_huge": ({"a": entry("U8", [1], 2**70, 2**70 + 1)}, 8, ["'a'", "offsets"]),
    "unknown_dtype": ({"a": {**A, "dtype": "F31"}}, 8, ["'a'", "'F31'", "BF16"]),
    "dtype_no_text": ({"a": {**A, "dtype": ["F32"]}}, 8, ["'a'", "dtype"]),
    "missing_field": ({"a": {"dtype": "F32", "shape": [2]}}, 8, ["'a'", "data_offsets"]),
    "unknown_field": ({"a": {**A, "strides": [1]}}, 8, ["'a'", "exactly"]),
    "entry_no_map": ({"a": 5}, 8, ["'a'"]),
    "metadata_no_text": ({"__metadata__": {"n": 5}, "a": A}, 8, ["__metadata__"]),
    "metadata_no_map": ({"__metadata__": [], "a": A}, 8, ["__metadata__"]),
    "half_a_byte": ({"a": entry("F4", [3], 0, 2)}, 2, ["'a'", "needs 1.5"]),
    "list": ("[1, 2]", 0, ["damaged"]),
    "no_json": ("this is not JSON at all", 0, ["damaged"]),
    "no_utf8": (b'{"\xff\xfe": 1}', 0, ["damaged"]),
    "deep": ("[" * 100_000, 0, ["damaged"]),
    "long_number": ('{"a": ' + "9" * 10_000 + "}", 0, ["damaged"]),
    "nan": ('{"a": {"dtype": "U8", "shape": [NaN], "data_offsets": [0, 1]}}', 1, ["'a'", "shape"]),
    "twice": (
        '{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},'
        ' "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}',
        1,
        ["'a'", "twice"],
    ),
    "field_twice": ('{"a": {"dtype": "U8", "dtype": "I8", "shape": [1], "data_offsets": [0, 1]}}', 1, ["twice"]),
    "lone_surrogate": ('{"\\ud800": 5}', 0, ["\\ud800"]),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_header(tmp_path: Path, name: str) -> None:
    header, size, words = DAMAGED[name]
    path = raw_file(tmp_path / "damaged.safetensors", header, bytes(size))
    refused(path, *words).encode()  # printable: no lone surrogate reaches the terminal


def test_missing_file_folder_and_broken_link(tmp_path: Path) -> None:
    refused(tmp_path / "absent.safetensors", "no such file")
    refused(tmp_path, "folder")
    link = tmp_path / "link.safetensors"
    link.symlink_to(tmp_path / "blobs" / "abc")
    refused(link, "blobs/abc", "download the model again")


# --- properties --------------------------------------------------------------------------------------------------

on_disk = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@on_disk
@given(data=st.data())
def test_any_truncation_or_extension_is_refused(good: Path, data: st.DataObject) -> None:
    whole = good.read_bytes()
    size = data.draw(st.integers(0, len(whole) + 200).filter(lambda n: n != len(whole)))
    changed = good.parent / "changed.safetensors"
    changed.write_bytes((whole + bytes(200))[:size])
    with pytest.raises(CheckpointError, match=str(size)):
        read_header(changed)


@on_disk
@given(data=st.data())
def test_a_corrupted_header_never_crashes_and_never_passes_what_the_library_refuses(
    good: Path, data: st.DataObject
) -> None:
    whole = bytearray(good.read_bytes())
    end = 8 + int.from_bytes(whole[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    changed = good.parent / "changed.safetensors"
    changed.write_bytes(bytes(whole))
    try:
        names = set(read_header(changed).tensors)
    except CheckpointError as error:
        assert "\n" not in str(error)
        return
    try:
        with safe_open(changed, "pt") as official:
            assert set(official.keys()) == names
    except SafetensorError as error:
        pytest.fail(f"accepted what the official library refuses: {error}")


@on_disk
@given(st.binary(max_size=300))
def test_any_bytes_are_refused_with_a_checkpoint_error(tmp_path: Path, junk: bytes) -> None:
    path = tmp_path / "junk.safetensors"
    path.write_bytes(junk)
    with pytest.raises(CheckpointError):
        read_header(path)


# --- cost --------------------------------------------------------------------------------------------------------


def test_listing_20_gb_needs_neither_torch_nor_a_second(tmp_path: Path) -> None:
    step = 2**23  # 800 tensors of 25 MB, in a sparse file
    header = {f"blocks.{n}.w": entry("BF16", [3, step // 2], 3 * n * step, 3 * (n + 1) * step) for n in range(800)}
    path = raw_file(tmp_path / "model.safetensors", header, b"")
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size + 800 * 3 * step)
    code = (
        "import sys; from omniloom.checkpoint import find_weights\n"
        f"weights = find_weights({str(tmp_path)!r}); assert len(weights.tensors) == 800\n"
        "assert weights.nbytes > 20e9 and 'torch' not in sys.modules and 'huggingface_hub' not in sys.modules"
    )
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True)
    assert time.monotonic() - started < 1.0
