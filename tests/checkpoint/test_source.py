from __future__ import annotations

import gc
import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from omniloom.checkpoint import TensorSource, single_file
from omniloom.checkpoint import source as source_module
from omniloom.errors import CheckpointError
from tests.checkpoint.writer import entry, raw_file, same_bits

PLAIN = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
EIGHT_BIT = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu]
DTYPES = [*PLAIN, *UNSIGNED, *FLOATS, *EIGHT_BIT, torch.complex64]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A tensor of any dtype whose bytes are random: NaNs, infinities and subnormals included."""
    count = int(np.prod(shape, dtype=np.int64)) * torch.empty((), dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def make(tmp_path: Path, tensors: dict[str, torch.Tensor], name: str = "m.safetensors") -> TensorSource:
    save_file(tensors, tmp_path / name)
    return TensorSource(single_file(tmp_path / name))


@pytest.fixture
def source(tmp_path: Path) -> TensorSource:
    return make(tmp_path, {"w": torch.arange(6.0).reshape(2, 3), "b": torch.arange(3, dtype=torch.int64)})


# --- what is read ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefer", ["map", "read"])
def test_every_dtype_shape_and_bit(tmp_path: Path, prefer: str) -> None:
    shapes = [(), (1,), (0,), (3, 0, 2), (5,), (2, 3, 4)]
    tensors = {
        f"{dtype}.{shape}": random_bits(shape, dtype, seed=len(shape))
        for dtype, shape in itertools.product(DTYPES, shapes)
    }
    source = make(tmp_path, tensors)
    oracle = load_file(tmp_path / "m.safetensors")
    assert sorted(source.names()) == sorted(oracle)
    assert source.nbytes == sum(tensor.nbytes for tensor in oracle.values())
    for name, expected in oracle.items():
        assert same_bits(source.read(name, prefer=prefer), expected), name


def test_against_numpy(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((7, 5)).astype("<f4")
    path = raw_file(tmp_path / "m", {"w": entry("F32", [7, 5], 0, 140)}, values.tobytes())
    with TensorSource(single_file(path)) as source:
        for prefer in ("map", "read"):
            assert np.array_equal(source.read("w", prefer=prefer).numpy(), values)


def test_packed_f4(tmp_path: Path) -> None:
    path = raw_file(tmp_path / "m", {"w": entry("F4", [2, 8], 0, 8)}, bytes(range(8)))
    with TensorSource(single_file(path)) as source:
        for prefer in ("map", "read"):
            tensor = source.read("w", dtype=torch.float32, prefer=prefer)
            assert tensor.shape == (2, 4)
            assert same_bits(tensor, load_file(path)["w"])


def test_a_dtype_that_this_torch_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = {"a": entry("F8_E8M0", [4], 0, 4), "b": entry("F6_E2M3", [4], 4, 7)}
    path = raw_file(tmp_path / "m", header, bytes(range(7)))
    with TensorSource(single_file(path)) as source:
        monkeypatch.delattr(torch, "float8_e8m0fnu")
        assert torch.equal(source.read("a"), torch.arange(4, dtype=torch.uint8))
        with pytest.raises(CheckpointError, match="'b' is stored as F6_E2M3"):
            source.read("b")


def test_unaligned_tensors_are_copied(tmp_path: Path) -> None:
    data = np.array([1.5, -2.0, 3.0], dtype="<f4").tobytes()
    text = (
        '{"pad":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"w":{"dtype":"F32","shape":[3],"data_offsets":[1,13]}}'
    )
    path = raw_file(tmp_path / "m", text.ljust(-(-len(text) // 8) * 8), b"\x07" + data)
    assert single_file(path).tensors["w"].offset % 4 == 1
    source = TensorSource(single_file(path))
    for tensor in (source.map("w"), source.read("w"), source.read("w", prefer="read")):
        assert tensor.tolist() == [1.5, -2.0, 3.0]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=1, max_size=5),
    shape=st.lists(st.integers(0, 9), max_size=4),
    seed=st.integers(0, 2**31),
    prefer=st.sampled_from(["map", "read"]),
)
def test_round_trip(tmp_path: Path, dtypes: list[torch.dtype], shape: list[int], seed: int, prefer: str) -> None:
    tensors = {f"t{n}": random_bits(tuple(shape), dtype, seed + n) for n, dtype in enumerate(dtypes)}
    with make(tmp_path, tensors, f"{seed}.safetensors") as source:
        for name, tensor in source.load_many(source.names(), prefer=prefer, workers=2):
            assert same_bits(tensor, tensors[name])


# --- conversion --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("stored", [*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2])
def test_conversion_is_what_to_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: torch.dtype, target: torch.dtype
) -> None:
    monkeypatch.setattr(source_module, "CHUNK_BYTES", 4096)
    tensors = {"w": random_bits((61, 97), stored), "s": random_bits((), stored)}
    source = make(tmp_path, tensors)
    for name, tensor in tensors.items():
        assert same_bits(source.read(name, dtype=target), tensor.to(target))


def test_conversion_across_the_real_chunk_size(tmp_path: Path) -> None:
    tensor = random_bits((9_000_001,), torch.bfloat16)  # 18 MB: two chunks
    assert same_bits(make(tmp_path, {"w": tensor}).read("w", dtype=torch.float32), tensor.float())


@pytest.mark.parametrize("dtype", [*PLAIN, *UNSIGNED, torch.complex64])
def test_a_float_request_leaves_other_kinds_alone(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = random_bits((4, 2), dtype)
    source = make(tmp_path, {"w": tensor})
    for prefer in ("map", "read"):
        assert same_bits(source.read("w", dtype=torch.bfloat16, prefer=prefer), tensor)


def test_other_conversions_are_refused(source: TensorSource) -> None:
    with pytest.raises(ValueError, match="'w' is F32: only floating-point"):
        source.read("w", dtype=torch.int8)
    with pytest.raises(ValueError, match="'b' is I64: only floating-point"):
        source.read("b", dtype=torch.int32)
    with pytest.raises(ValueError, match="'w' is F32: only floating-point"):
        source.load_many(["w"], dtype_of=lambda name: torch.int8)
    assert source.read("b", dtype=torch.int64).tolist() == [0, 1, 2]


def test_out_is_written_in_place(source: TensorSource) -> None:
    expected = torch.arange(6.0).reshape(2, 3)
    for out in (
        torch.empty(2, 3),
        torch.empty(2, 3, dtype=torch.bfloat16),
        torch.empty(3, 2).t(),
        torch.empty(4, 3)[1:3],
        torch.nn.Parameter(torch.empty(2, 3)),
    ):
        assert source.read("w", out=out) is out
        assert torch.equal(out.float(), expected)
    with pytest.raises(ValueError, match="out="):
        source.read("w", out=torch.empty(3, 2))
    with pytest.raises(ValueError, match="out="):
        source.read("w", out=torch.empty(2, 3), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="out="):
        source.read("b", out=torch.empty(3))
    with pytest.raises(ValueError, match="only floating-point"):
        source.read("w", out=torch.empty(2, 3, dtype=torch.int32))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_cuda_device(tmp_path: Path) -> None:
    tensor = random_bits((9_000_001,), torch.bfloat16).nan_to_num()
    source = make(tmp_path, {"w": tensor, "s": torch.tensor(3)})
    assert same_bits(source.read("w", device="cuda").cpu(), tensor)
    assert same_bits(source.read("w", device="cuda", dtype=torch.float32).cpu(), tensor.float())
    out = torch.empty(9_000_001, device="cuda")
    assert same_bits(source.read("w", out=out).cpu(), tensor.float())
    assert source.read("s", device="cuda").item() == 3


# --- names, life and death ---------------------------------------------------------------------------------------


def test_names(source: TensorSource) -> None:
    assert "w" in source
    assert "x" not in source
    assert len(source) == 2
    assert source.info("w").shape == (2, 3)
    for call in (source.info, source.read, source.map, lambda name: source.load_many([name])):
        with pytest.raises(CheckpointError, match="no tensor 'ww' in m.safetensors; did you mean 'w'"):
            call("ww")
    with pytest.raises(ValueError, match="prefer='copy'"):
        source.read("w", prefer="copy")


def test_a_mapped_tensor_is_private_and_outlives_source_and_file(tmp_path: Path) -> None:
    tensor = random_bits((1000, 1000), torch.float32).nan_to_num()
    source = make(tmp_path, {"w": tensor, "x": tensor + 1})
    path = tmp_path / "m.safetensors"
    mapped, twin = source.read("w"), source.map("w")
    assert twin.data_ptr() == mapped.data_ptr()  # no second copy
    before = path.read_bytes()
    mapped[0, 0] = 42.0
    assert path.read_bytes() == before
    assert source.read("w", prefer="read")[0, 0] == tensor[0, 0]
    view = mapped[1:].t()
    source.close()
    del source, mapped, twin
    path.unlink()
    assert torch.equal(view, tensor[1:].t())


def test_a_closed_source(source: TensorSource) -> None:
    kept = source.map("w")
    with source:
        pass
    for call in (source.read, source.map, lambda name: list(source.load_many([name], prefer="read"))):
        with pytest.raises(ValueError, match="closed"):
            call("w")
    assert kept.sum() == 15.0
    source.close()


def test_a_file_that_shrinks_after_its_header_was_read(tmp_path: Path) -> None:
    source = make(tmp_path, {"w": torch.zeros(100_000)})
    path = tmp_path / "m.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    for prefer in ("map", "read"):
        with pytest.raises(CheckpointError, match="became shorter"):
            source.read("w", prefer=prefer)
    with pytest.raises(CheckpointError, match="became shorter"):
        list(source.load_many(["w"]))


def test_descriptors_are_few_and_given_back(tmp_path: Path) -> None:
    def count() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before = count()
    source = make(tmp_path, {f"t{n}": torch.zeros(10) for n in range(500)})
    tensors = [source.map(name) for name in source.names()] + [
        source.read(name, prefer="read") for name in source.names()
    ]
    assert count() - before <= 2  # the file and its mapping
    source.close()
    del tensors
    assert count() == before


# --- in parallel -------------------------------------------------------------------------------------------------


def many(tmp_path: Path) -> tuple[TensorSource, dict[str, torch.Tensor]]:
    tensors = {f"blocks.{n}.w": random_bits((200 + n, 301), torch.bfloat16, n) for n in range(40)}
    tensors |= {f"blocks.{n}.i": random_bits((n,), torch.int64, n) for n in range(40)}
    return make(tmp_path, tensors), tensors


def test_eight_threads_read_what_one_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "CHUNK_BYTES", 8192)
    source, tensors = many(tmp_path)
    start = threading.Barrier(8)

    def job(number: int) -> None:
        start.wait()
        names = source.names()[number:] + source.names()[:number]
        for name in names:
            for prefer in ("map", "read"):
                assert same_bits(source.read(name, prefer=prefer), tensors[name])
            if name.endswith("w"):
                assert same_bits(source.read(name, dtype=torch.float32), tensors[name].float())

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(job, range(8)))


@pytest.mark.parametrize("workers", [1, 8])
@pytest.mark.parametrize("prefer", ["map", "read"])
def test_load_many(tmp_path: Path, workers: int, prefer: str) -> None:
    source, tensors = many(tmp_path)
    names = sorted(tensors, reverse=True)
    seen: list[int] = []
    main = threading.get_ident()

    def progress(nbytes: int) -> None:
        assert threading.get_ident() == main
        seen.append(nbytes)

    def dtype_of(name: str) -> torch.dtype | None:
        return torch.float32 if ".1" in name else None

    options = {"workers": workers, "prefer": prefer, "progress": progress, "in_flight": 500_000}
    loaded = list(source.load_many(iter(names), dtype_of=dtype_of, **options))
    assert [name for name, _ in loaded] == names
    assert sum(seen) == source.nbytes
    for name, tensor in loaded:
        wanted = tensors[name].float() if ".1" in name and name.endswith("w") else tensors[name]
        assert same_bits(tensor, wanted)
        assert not tensor.requires_grad


def spy(monkeypatch: pytest.MonkeyPatch, before: Callable[[str], None]) -> None:
    original = TensorSource.read

    def read(self: TensorSource, name: str, **options: object) -> torch.Tensor:
        before(name)
        return original(self, name, **options)

    monkeypatch.setattr(TensorSource, "read", read)


def test_no_more_than_the_budget_is_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make(tmp_path, {f"t{n}": torch.zeros(1000) for n in range(30)} | {"u": torch.zeros(50_000)})
    started: list[str] = []
    spy(monkeypatch, started.append)
    taken = 0
    for _ in source.load_many(source.names(), workers=4, in_flight=12_000, prefer="read"):
        taken += 1
        time.sleep(0.002)
        assert len(started) - taken <= 2  # two of 4000 bytes beside the one that was handed over
    assert taken == 31


def test_closing_the_iterator_cancels_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make(tmp_path, {f"t{n}": torch.zeros(1000) for n in range(100)})
    started: list[str] = []
    spy(monkeypatch, lambda name: (started.append(name), time.sleep(0.005)))
    threads = threading.active_count()
    loading = source.load_many(source.names(), workers=2, prefer="read")
    next(loading)
    loading.close()
    assert len(started) < 20
    assert threading.active_count() == threads


def test_a_failure_surfaces_at_its_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make(tmp_path, {f"t{n:02}": torch.zeros(1000) for n in range(20)})

    def fail(name: str) -> None:
        if name == "t05":
            raise CheckpointError("t05 is bad")

    spy(monkeypatch, fail)
    names = []
    with pytest.raises(CheckpointError, match="t05 is bad"):
        for name, _ in source.load_many(sorted(source.names()), workers=3, prefer="read"):
            names.append(name)
    assert names == ["t00", "t01", "t02", "t03", "t04"]


def test_closing_the_source_breaks_no_read_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The descriptor stays open until the read is done, even if the source is closed and other files are opened."""
    tensor = random_bits((100_000,), torch.float32)
    source = make(tmp_path, {"w": tensor})
    original = source_module.DataFile.read_into
    inside, go_on = threading.Event(), threading.Event()

    def read_into(self: source_module.DataFile, buffer: memoryview, offset: int) -> None:
        inside.set()
        assert go_on.wait(10)
        original(self, buffer, offset)

    monkeypatch.setattr(source_module.DataFile, "read_into", read_into)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(source.read, "w", prefer="read")
        assert inside.wait(10)
        source.close()
        others = [open("/dev/zero", "rb") for _ in range(20)]  # noqa: SIM115
        go_on.set()
        assert same_bits(future.result(), tensor)
    for other in others:
        other.close()


def test_mapping_asks_for_no_commit_charge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a file larger than the memory could not be mapped at all."""
    flags = []
    original = mmap.mmap

    def spy_mmap(fd: int, size: int, **options: int) -> mmap.mmap:
        flags.append(options["flags"])
        return original(fd, size, **options)

    monkeypatch.setattr("omniloom.checkpoint.datafile.mmap.mmap", spy_mmap)
    make(tmp_path, {"w": torch.zeros(10)}).map("w")
    assert flags == [mmap.MAP_PRIVATE | 0x4000]
