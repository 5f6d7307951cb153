from __future__ import annotations

import math
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omniloom.checkpoint.gguf import GGML_TYPES, LongArray, read_gguf
from omniloom.checkpoint.gguf_source import GgufSource, open_gguf
from omniloom.errors import CheckpointError
from tests.checkpoint import gguf_writer as w

ARCH = w.pair("general.architecture", 8, w.text("flux"))
PAIRS = [
    ARCH,
    w.pair("a.u8", 0, b"\xff"),
    w.pair("a.i16", 3, struct.pack("<h", -5)),
    w.pair("a.f32", 6, struct.pack("<f", 0.5)),
    w.pair("a.bool", 7, b"\x01"),
    w.pair("a.i64", 11, struct.pack("<q", -(2**40))),
    w.pair("a.f64", 12, struct.pack("<d", 0.1)),
    w.pair("a.list", 9, struct.pack("<IQ3i", 5, 3, 7, 8, -9)),
    w.pair("a.texts", 9, struct.pack("<IQ", 8, 2) + w.text("x") + w.text("é")),
    w.pair("a.long", 9, struct.pack("<IQ", 0, 2000) + bytes(2000)),
    w.pair("a.many", 9, struct.pack("<IQ", 8, 1500) + w.text("ab") * 1500),
]
# F32 (2, 3): 24 bytes; Q8_0 (3, 64): 3 * 68 bytes; BF16 (5,): 10 bytes
ENTRIES = [w.entry("norm", [3, 2], 0, 0), w.entry("lin.weight", [64, 3], 8, 32), w.entry("pad", [5], 30, 256)]
NORM = struct.pack("<6f", *range(6))
ROWS = b"".join(struct.pack("<e", 0.5 + block) + bytes(range(32)) for block in range(6))
PAD = struct.pack("<5H", 0x3F80, 0x4000, 0xBF80, 0, 0x3F00)
DATA = NORM + bytes(8) + ROWS + bytes(20) + PAD


def good_file(path: Path) -> Path:
    return w.file(path, PAIRS, ENTRIES, DATA)


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return good_file(tmp_path / "good.gguf")


def refused(path: Path, *words: str) -> None:
    started = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        read_gguf(path)
    assert time.monotonic() - started < 2
    message = str(caught.value)
    assert "\n" not in message and len(message) < 1000
    for word in (str(path), *words):
        assert word in message, message


def make(path: Path, *entries: bytes, data: bytes = b"", pairs: tuple[bytes, ...] = (), **options: int) -> Path:
    return w.file(path, list(pairs), list(entries), data, **options)


# --- what is read ------------------------------------------------------------------------------------------------


def test_header(good: Path) -> None:
    header = read_gguf(good)
    assert (header.version, header.alignment, header.size) == (3, 32, good.stat().st_size)
    assert header.architecture == "flux"
    values = dict(header.metadata)
    long, many = values.pop("a.long"), values.pop("a.many")
    assert isinstance(long, LongArray) and (long.element, long.count) == ("u8", 2000)
    assert isinstance(many, LongArray) and (many.element, many.count) == ("string", 1500)
    assert values == {
        "general.architecture": "flux",
        "a.u8": 255,
        "a.i16": -5,
        "a.f32": 0.5,
        "a.bool": True,
        "a.i64": -(2**40),
        "a.f64": 0.1,
        "a.list": [7, 8, -9],
        "a.texts": ["x", "é"],
    }
    assert [(t.name, t.dtype, t.shape, t.nbytes) for t in header.tensors.values()] == [
        ("norm", "F32", (2, 3), 24),
        ("lin.weight", "Q8_0", (3, 64), 204),
        ("pad", "BF16", (5,), 10),
    ]
    info = header.tensors["lin.weight"]
    assert info.quantized and info.torch_shape == (3, 68) and info.torch_dtype == torch.uint8 and info.itemsize == 1
    assert good.read_bytes()[info.offset : info.offset + info.nbytes] == ROWS


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
def test_versions_and_alignments(tmp_path: Path, version: int, alignment: int) -> None:
    align = w.pair("general.alignment", 4, struct.pack("<I", alignment))
    at = -(-12 // alignment) * alignment
    entries = [w.entry("b", [4], 24, at), w.entry("a", [3], 0, 0)]
    data = bytes(at) + b"\x01\x02\x03\xff"
    path = w.file(tmp_path / "f", [align], entries, data, version=version, alignment=alignment)
    with open_gguf(path) as source:
        assert source.names() == ["a", "b"]
        for prefer in ("map", "read"):
            assert source.read("b", prefer=prefer).tolist() == [1, 2, 3, -1]


def test_source(good: Path) -> None:
    with open_gguf(good) as source:
        assert source.nbytes == 238 and len(source) == 3 and "pad" in source
        for prefer in ("map", "read"):
            assert source.read("norm", prefer=prefer).tolist() == [[0, 1, 2], [3, 4, 5]]
            pad = source.read("pad", prefer=prefer)
            assert pad.dtype == torch.bfloat16 and pad.tolist() == [1, 2, -1, 0, 0.5]
            raw = source.read("lin.weight", prefer=prefer, dtype=torch.float16)
            assert raw.dtype == torch.uint8 and raw.shape == (3, 68) and raw.numpy().tobytes() == ROWS
        scale = torch.arange(6).float().add(0.5).view(3, 2, 1)
        want = (scale * torch.arange(32).float()).view(3, 64)
        assert source.dense("lin.weight").equal(want)
        assert source.dense("lin.weight", dtype=torch.bfloat16).equal(want.bfloat16())
        turned = torch.empty(64, 3).t()
        assert source.dense("lin.weight", out=turned) is turned and turned.equal(want)
        assert source.dense("pad").dtype == torch.bfloat16
        for wrong in ({"dtype": torch.int8}, {"out": torch.empty(3, 68)}, {"out": torch.empty(3, 64).int()}):
            with pytest.raises(ValueError, match="lin.weight"):
                source.dense("lin.weight", **wrong)
        with pytest.raises(CheckpointError, match="did you mean 'norm'"):
            source.read("nrm")
        many = dict(source.load_many(source.names(), dtype_of=lambda name: torch.float16))
        assert many["lin.weight"].dtype == torch.uint8 and many["pad"].dtype == torch.float16
        source.expand(["lin.weight", "norm"])
        assert source.info("lin.weight").torch_shape == (3, 64) and source.map("lin.weight").equal(want)
        seen: list[int] = []
        many = dict(source.load_many(source.names(), dtype_of=lambda name: torch.float16, progress=seen.append))
        assert many["lin.weight"].equal(want.half()) and sum(seen) == source.nbytes
        other = source.read("norm")
    assert other.sum() == 15
    with pytest.raises(ValueError, match="closed"):
        source.dense("lin.weight")


def test_chunks_change_nothing(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with GgufSource(good) as source:
        whole = source.dense("lin.weight")
        monkeypatch.setattr("omniloom.checkpoint.gguf_source._CELLS", 64)
        assert source.dense("lin.weight").equal(whole)


def test_a_file_cut_after_its_header_was_read(good: Path) -> None:
    with GgufSource(good) as source:
        data = good.read_bytes()
        good.write_bytes(data[:-200])
        with pytest.raises(CheckpointError, match="became shorter"):
            source.dense("lin.weight")


def test_shapes(tmp_path: Path) -> None:
    """5-D kernels, kernels that were flattened, reversed dimensions, pad tokens without their leading 1."""
    kernel = torch.arange(2 * 3 * 4 * 5 * 7).half().view(2, 3, 4, 5, 7)
    raw, size = kernel.numpy().tobytes(), kernel.numel() * 2
    pad = bytes(-size % 32)
    orig = w.pair("comfy.gguf.orig_shape.d", 9, struct.pack("<IQ5i", 5, 5, 2, 3, 4, 5, 7))
    step = size + len(pad)
    dims = {"a": [7, 5, 4, 3, 2], "b": [7, 120], "c": [2, 3, 4, 5, 7], "d": [840]}
    entries = [w.entry(name, dim, 1, step * index) for index, (name, dim) in enumerate(dims.items())]
    entries.append(w.entry("token", [64], 8, step * 4))
    entries.append(w.entry("scalar", [], 0, step * 4 + 96))
    data = (raw + pad) * 4 + bytes(96) + struct.pack("<f", 2.5)
    with open_gguf(make(tmp_path / "f", *entries, data=data, pairs=(orig,))) as source:
        assert source.read("scalar").shape == () and source.read("scalar").item() == 2.5
        for name in "abcd":
            source.fit(name, (2, 3, 4, 5, 7))
            assert source.read(name).equal(kernel) and source.info(name).torch_shape == kernel.shape
        source.fit("token", (1, 64))
        source.expand(["token"])
        assert source.read("token").shape == (1, 64)
        for name, shape in (("a", (3, 2, 4, 5, 7)), ("token", (1, 68)), ("a", (2, 3, 4, 5, 8))):
            with pytest.raises(CheckpointError, match="model needs") as caught:
                source.fit(name, shape)
            assert name in str(caught.value) and str(list(shape)) in str(caught.value)


def test_orig_shape_of_blocks(tmp_path: Path) -> None:
    def orig(*shape: int) -> bytes:
        return w.pair("comfy.gguf.orig_shape.w", 9, struct.pack(f"<IQ{len(shape)}i", 5, len(shape), *shape))

    data = ROWS[:136]
    entries = (w.entry("w", [32, 4], 8, 0),)
    with open_gguf(make(tmp_path / "a", *entries, data=data, pairs=(orig(2, 64),))) as source:
        assert source.read("w").shape == (2, 68) and source.dense("w").shape == (2, 64)
    with open_gguf(make(tmp_path / "b", *entries, data=data, pairs=(orig(8, 2, 8),))) as source:
        assert source.read("w").shape == (4, 34) and source.dense("w").shape == (8, 2, 8)
    refused(make(tmp_path / "c", *entries, data=data, pairs=(orig(2, 65),)), "'w'", "[4, 32]", "[2, 65]")
    refused(make(tmp_path / "d", *entries, data=data, pairs=(w.pair("comfy.gguf.orig_shape.w", 0, b"1"),)), "shape")


def test_files_of_the_gguf_package(tmp_path: Path) -> None:
    gguf: Any = pytest.importorskip("gguf")
    rng = np.random.default_rng(0)
    path = tmp_path / "f.gguf"
    writer = gguf.GGUFWriter(path, arch="lumina2")
    writer.add_file_type(7)
    writer.add_array("some.texts", ["a"] * 3000)
    weight = rng.standard_normal((6, 512)).astype(np.float32)
    kernel = rng.standard_normal((3, 2, 5, 7)).astype(np.float16)
    want: dict[str, np.ndarray] = {}
    sizes = gguf.GGML_QUANT_SIZES
    for kind in gguf.GGMLQuantizationType:
        if kind not in GGML_TYPES or GGML_TYPES[kind].torch_name:
            continue
        try:
            packed = gguf.quants.quantize(weight, kind)
        except NotImplementedError:
            packed = rng.integers(0, 128, (6, 512 // sizes[kind][0] * sizes[kind][1])).astype(np.uint8)
            packed[:, 1::2] &= 0x3B  # no float16 of them is infinite
        writer.add_tensor(kind.name, packed, raw_dtype=kind)
        want[kind.name] = gguf.quants.dequantize(packed, kind)
    writer.add_tensor("bf16", gguf.quants.quantize(weight, gguf.GGMLQuantizationType.BF16), raw_dtype=30)
    writer.add_tensor("kernel", kernel)
    writer.add_tensor("f32", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_gguf(path) as source:
        assert source.header.architecture == "lumina2" and len(source) == len(want) + 3
        theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
        assert set(theirs) == set(source.names())
        for name, values in want.items():
            assert source.info(name).offset == theirs[name].data_offset
            assert source.read(name).numpy().tobytes() == theirs[name].data.tobytes()
            assert source.dense(name).numpy().tobytes() == values.tobytes(), name
        assert source.read("bf16").equal(torch.from_numpy(weight).bfloat16())
        assert source.read("kernel").equal(torch.from_numpy(kernel)) and source.read("f32").numpy().tolist() == (
            weight.tolist()
        )


def test_types_are_those_of_the_gguf_package() -> None:
    gguf: Any = pytest.importorskip("gguf")
    for number, kind in GGML_TYPES.items():
        theirs = gguf.GGMLQuantizationType(number)
        assert (theirs.name, *gguf.GGML_QUANT_SIZES[theirs]) == kind[:3]


def test_a_large_sparse_file_is_quick(tmp_path: Path) -> None:
    row = 2 << 30
    entries = [w.entry(f"blocks.{i}.weight", [32, row // 34], 8, i * (row // 34 * 34 + 31 & ~31)) for i in range(10)]
    entries += [w.entry(f"small.{i}", [8], 0, 10 * (row // 34 * 34 + 31 & ~31) + 32 * i) for i in range(3000)]
    texts = w.pair("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 150_000) + w.text("token") * 150_000)
    path = make(tmp_path / "big", *entries, pairs=(texts,))
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size + 10 * (row // 34 * 34 + 31 & ~31) + 32 * 3000)
    assert path.stat().st_size > 20e9
    took = []
    for _ in range(2):
        started = time.perf_counter()
        assert len(read_gguf(path).tensors) == 3010
        took.append(time.perf_counter() - started)
    assert min(took) < 0.3


def test_a_header_needs_no_torch(good: Path) -> None:
    code = f"import sys; from omniloom.checkpoint.gguf import read_gguf; read_gguf({str(good)!r}); "
    code += "sys.exit(sum(name in sys.modules for name in ('torch', 'gguf', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [0, 1, 4, 8, 23, 24, 60])
def test_cut_in_the_header(good: Path, cut: int) -> None:
    good.write_bytes(good.read_bytes()[:cut])
    refused(good, str(cut), "fetch it again")


@pytest.mark.parametrize("missing", [1, 10, 11, 100, 260])
def test_cut_in_the_tensors(good: Path, missing: int) -> None:
    data = good.read_bytes()
    good.write_bytes(data[:-missing])
    refused(good, "truncated", f"{len(data)} bytes expected", f"{len(data) - missing} found")


def test_the_last_padding_may_be_there_or_not(good: Path) -> None:
    data = good.read_bytes()
    good.write_bytes(data + bytes(-len(data) % 32))
    assert len(read_gguf(good).tensors) == 3
    good.write_bytes(data + bytes(64))
    refused(good, "trailing")


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid", "git lfs pull"),
        (struct.pack("<Q", 300) + b'{"a":{}}', "safetensors"),
        (b"PK\x03\x04" + bytes(60), "pickle"),
        (b"<!DOCTYPE html><html>", "HTML"),
        (b"ggml" + bytes(60), "not GGUF"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), "version 4"),
        (b"GGUF" + struct.pack("<IQQ", 0, 0, 0), "version 0"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), str(2**60)),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**64 - 1), str(2**64 - 1)),
    ],
)
def test_foreign_files(tmp_path: Path, head: bytes, says: str) -> None:
    path = tmp_path / "f.gguf"
    path.write_bytes(head)
    refused(path, says)


def test_not_a_file(tmp_path: Path) -> None:
    refused(tmp_path, "folder")
    refused(tmp_path / "none", "no such file")
    with pytest.raises(CheckpointError, match="no tensor"):
        open_gguf(make(tmp_path / "f", pairs=(ARCH,)))


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ([w.entry("w", [4], 0, 0), w.entry("w", [4], 0, 32)], ("'w'", "twice")),
        ([w.entry("v", [16], 0, 0), w.entry("w", [4], 0, 32)], ("'w'", "overlaps")),
        ([w.entry("v", [4], 0, 0), w.entry("w", [4], 0, 64)], ("'w'", "hole of 32")),
        ([w.entry("w", [4], 0, 16)], ("'w'", "hole of 16")),
        ([w.entry("w", [4], 0, 2**63)], ("'w'", "hole")),
        ([w.entry("w", [2**50, 2], 0, 0)], ("'w'", "shape")),
        ([w.entry("w", [2**40, 2**40], 0, 0)], ("'w'", "shape")),
        ([w.entry("w", [0, 2**63], 0, 0)], ("'w'", "shape")),
        ([w.entry("w", [400], 0, 0)], ("truncated", "'w'")),
        ([w.entry("w", [48], 8, 0)], ("'w'", "Q8_0", "48")),
        ([w.entry("w", [128], 12, 0)], ("'w'", "Q4_K", "256", "128")),
        ([w.entry("w", [], 12, 0)], ("'w'", "Q4_K")),
        ([w.entry("w", [32], 9, 0)], ("'w'", "Q8_1")),
        ([w.entry("w", [32], 4, 0)], ("'w'", "removed")),
        ([w.entry("w", [32], 99, 0)], ("'w'", "type 99", "Q4_K")),
        ([w.entry("w", [1] * 9, 0, 0)], ("'w'", "9 dimensions")),
        ([w.entry(b"\xff\xfe", [4], 0, 0)], ("UTF-8",)),
    ],
)
def test_wrong_tensors(tmp_path: Path, entries: list[bytes], says: tuple[str, ...]) -> None:
    refused(make(tmp_path / "f", *entries, data=bytes(160)), *says)


@pytest.mark.parametrize(
    ("pairs", "says"),
    [
        ((ARCH, ARCH), ("general.architecture", "twice")),
        ((w.pair("k", 13, b""),), ("'k'", "type 13")),
        ((w.pair("k", 7, b"\x02"),), ("'k'", "bool")),
        ((w.pair("k", 9, struct.pack("<IQ", 9, 1)),), ("'k'", "array of arrays")),
        ((w.pair("k", 9, struct.pack("<IQ", 77, 1)),), ("'k'", "type 77")),
        ((w.pair("k", 9, struct.pack("<IQ", 4, 2**62)),), ("'k'", "truncated")),
        ((w.pair("k", 9, struct.pack("<IQ", 8, 2**40)),), ("'k'", "texts")),
        ((w.pair("k", 8, struct.pack("<Q", 2**63)),), ("'k'", "truncated")),
        ((w.pair("general.alignment", 4, struct.pack("<I", 24)),), ("alignment", "24")),
        ((w.pair("general.alignment", 4, struct.pack("<I", 0)),), ("alignment",)),
        ((w.pair("general.alignment", 8, w.text("32")),), ("alignment",)),
        ((w.pair("split.count", 2, struct.pack("<H", 3)),), ("3 parts",)),
    ],
)
def test_wrong_metadata(tmp_path: Path, pairs: tuple[bytes, ...], says: tuple[str, ...]) -> None:
    refused(make(tmp_path / "f", pairs=pairs), *says)


@pytest.mark.parametrize("sizes", [(5,) * 150_000, (0,) * 1100, (300_000,) * 10, (7, 1 << 20, (1 << 20) - 8, 3) * 300])
def test_long_arrays_of_texts(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    """They are skipped at the right place, wherever the pieces end in which the file is read."""
    texts = [*sizes, *[9] * 1100]
    if sum(texts) > 100 << 20:
        texts = texts[:60] + [1] * 1000
    raw = struct.pack("<IQ", 8, len(texts)) + b"".join(w.text(bytes(size)) for size in texts)
    pairs = (w.pair("a", 9, raw), w.pair("b", 0, b"\x07"))
    header = read_gguf(make(tmp_path / "f", pairs=pairs))
    assert isinstance(header.metadata["a"], LongArray) and header.metadata["a"].count == len(texts)
    assert header.metadata["b"] == 7
    data = (tmp_path / "f").read_bytes()
    (tmp_path / "f").write_bytes(data[: len(data) // 2])
    refused(tmp_path / "f", "'a'", "truncated")


def test_absurd_text_in_a_sparse_file(tmp_path: Path) -> None:
    path = make(tmp_path / "f", pairs=(w.pair("k", 8, struct.pack("<Q", 2**34)),))
    with open(path, "r+b") as file:
        file.truncate(20 << 30)
    refused(path, "'k'", str(2**34))
    make(path, pairs=(w.pair("k", 9, struct.pack("<IQ", 8, 2**21)),))
    with open(path, "r+b") as file:
        file.truncate(20 << 30)
    refused(path)


HEADER_BYTES = len(w.header(PAIRS, ENTRIES))


def judged(path: Path) -> bool:
    """Reading gives a header whose tensors lie in the file, or a ``CheckpointError``, and nothing else."""
    try:
        source = GgufSource(path)
    except CheckpointError as error:
        assert str(path) in str(error) and "\n" not in str(error)
        return False
    for name in source.names():
        assert math.prod(source.dense(name).shape) == math.prod(source.info(name).shape)
    return True


fuzz = settings(max_examples=250, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])


@fuzz
@given(st.lists(st.tuples(st.integers(0, HEADER_BYTES - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_bytes(tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    data = bytearray(w.header(PAIRS, ENTRIES) + DATA)
    for at, value in changes:
        data[at] = value
    (tmp_path / "f").write_bytes(data)
    judged(tmp_path / "f")


@fuzz
@given(st.integers(0, len(PAIRS) + len(ENTRIES) - 1), st.integers(0, 80), st.sampled_from([1, 4, 8]), st.data())
def test_changed_numbers(tmp_path: Path, which: int, at: int, width: int, data: st.DataObject) -> None:
    parts = [*PAIRS, *ENTRIES]
    part = bytearray(parts[which])
    at %= len(part) - width + 1
    part[at : at + width] = data.draw(st.integers(0, 2 ** (8 * width) - 1)).to_bytes(width, "little")
    parts[which] = bytes(part)
    w.file(tmp_path / "f", parts[: len(PAIRS)], parts[len(PAIRS) :], DATA)
    judged(tmp_path / "f")


@fuzz
@given(st.integers(0, HEADER_BYTES + len(DATA) - 1))
def test_every_cut_is_refused(tmp_path: Path, cut: int) -> None:
    (tmp_path / "f").write_bytes((w.header(PAIRS, ENTRIES) + DATA)[:cut])
    assert not judged(tmp_path / "f")


@fuzz
@given(st.binary(max_size=200))
def test_noise_is_refused(tmp_path: Path, noise: bytes) -> None:
    for head in (b"", b"GGUF", b"GGUF" + struct.pack("<IQQ", 3, 1, 1)):
        (tmp_path / "f").write_bytes(head + noise)
        judged(tmp_path / "f")
