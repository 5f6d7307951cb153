"""The safetensors file format: an 8-byte little-endian header length, a JSON header, the tensors' bytes.

``read_header`` checks everything that can be checked without reading a tensor, so that both ways of reading one
(mapped or copied) see the same verdict. It does not import torch: listing a large folder costs milliseconds.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from omniloom.checkpoint.foreign import kind_of
from omniloom.errors import CheckpointError

if TYPE_CHECKING:
    import torch

MAX_HEADER_BYTES = 100_000_000  # the format's own limit

# code -> (bits per element, torch's name for it or None)
DTYPES: dict[str, tuple[int, str | None]] = {
    "BOOL": (8, "bool"),
    "U8": (8, "uint8"),
    "I8": (8, "int8"),
    "U16": (16, "uint16"),
    "I16": (16, "int16"),
    "U32": (32, "uint32"),
    "I32": (32, "int32"),
    "U64": (64, "uint64"),
    "I64": (64, "int64"),
    "F4": (4, "float4_e2m1fn_x2"),  # two elements per byte; the file's shape counts elements
    "F6_E2M3": (6, None),
    "F6_E3M2": (6, None),
    "F8_E4M3": (8, "float8_e4m3fn"),
    "F8_E4M3FNUZ": (8, "float8_e4m3fnuz"),
    "F8_E5M2": (8, "float8_e5m2"),
    "F8_E5M2FNUZ": (8, "float8_e5m2fnuz"),
    "F8_E8M0": (8, "float8_e8m0fnu"),
    "F16": (16, "float16"),
    "BF16": (16, "bfloat16"),
    "F32": (32, "float32"),
    "F64": (64, "float64"),
    "C64": (64, "complex64"),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies in its file and how its bytes are to be understood."""

    name: str
    dtype: str  # the format's code: "BF16", "F8_E4M3", ...
    shape: tuple[int, ...]  # as the file says it
    file: Path
    offset: int  # of the first byte, from the start of the file
    nbytes: int

    @property
    def itemsize(self) -> int:
        """Bytes per stored unit (1 for F4, whose unit is a pair of elements)."""
        return max(1, DTYPES[self.dtype][0] // 8)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype of the bytes; 1-byte and packed kinds that this torch lacks are raw ``torch.uint8``.

        Raises ``CheckpointError`` for a kind that torch has no name for.
        """
        import torch

        bits, name = DTYPES[self.dtype]
        dtype = getattr(torch, name, None) if name else None
        if dtype is None and name and bits <= 8:
            return torch.uint8
        if dtype is None:
            raise CheckpointError(
                f"{self.file}: tensor {self.name!r} is stored as {self.dtype}, which torch {torch.__version__} lacks; "
                "convert the file to another dtype"
            )
        return dtype

    @property
    def torch_shape(self) -> tuple[int, ...]:
        """The shape of the torch tensor: the file's, with the last dimension halved for F4."""
        return (*self.shape[:-1], self.shape[-1] // 2) if self.dtype == "F4" and self.shape else self.shape


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """The checked header of one file; ``tensors`` are in the order of their bytes."""

    path: Path
    size: int
    metadata: dict[str, str]
    tensors: dict[str, TensorInfo]


def read_header(path: str | Path) -> SafetensorsHeader:
    """Read and check the header of a safetensors file.

    Raises ``CheckpointError``, one line with the path, sizes and the likely cause, for a file that is missing,
    truncated, over-long, foreign or inconsistent.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(64)
            length = _header_length(path, head, size)
            file.seek(8)
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {_os_reason(path, error)}") from error
    if len(raw) != length:
        raise CheckpointError(f"{path}: the header has {length} bytes but only {len(raw)} could be read")
    entries = _parse_json(path, raw, head)
    metadata = _metadata(path, entries.pop("__metadata__", {}))
    start = 8 + length
    found = sorted((_tensor(path, name, entry, start) for name, entry in entries.items()), key=_span)
    if problem := layout_problem(found, start, size):
        raise CheckpointError(f"{path}: {problem}")
    return SafetensorsHeader(path, size, metadata, {info.name: info for info in found})


def _os_reason(path: Path, error: OSError) -> str:
    if path.is_symlink() and not path.exists():
        return f"it is a link to {os.readlink(path)}, which is not there; download the model again"
    if path.is_dir():
        return "it is a folder"
    return (error.strerror or str(error)).lower()


def _header_length(path: Path, head: bytes, size: int) -> int:
    if size == 0:
        raise CheckpointError(f"{path}: the file is empty (0 bytes): an unfinished download? fetch it again")
    length = int.from_bytes(head[:8], "little")
    if size >= 8 and 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        return length
    if kind := kind_of(head):
        raise CheckpointError(f"{path}: {kind} ({size} bytes), not safetensors")
    if size < 8:
        raise CheckpointError(f"{path}: truncated: {size} bytes, a safetensors file has at least 8; fetch it again")
    if length < 2:
        raise CheckpointError(
            f"{path}: the header length is {length} in a file of {size} bytes: an unfinished download? fetch it again"
        )
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path}: the header length {length} is above the format's limit of {MAX_HEADER_BYTES} "
            f"(file: {size} bytes): damaged, or not a safetensors file"
        )
    raise CheckpointError(
        f"{path}: truncated inside the header: at least {8 + length} bytes expected, {size} found; fetch it again"
    )


def _parse_json(path: Path, raw: bytes, head: bytes) -> dict[str, object]:
    try:
        entries = json.loads(raw.decode("utf-8"), object_pairs_hook=unique_keys)
        if not isinstance(entries, dict):
            raise ValueError("it is not a JSON object")
    except (ValueError, RecursionError) as error:
        if kind := kind_of(head):
            raise CheckpointError(f"{path}: {kind}, not safetensors") from error
        raise CheckpointError(f"{path}: the header of {len(raw)} bytes is damaged: {error}") from error
    return entries


def unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """``object_pairs_hook`` for ``json`` that raises ``ValueError`` for a key given twice."""
    entries = dict(pairs)
    if len(entries) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"key {twice!r:.200} appears twice")
    return entries


def _metadata(path: Path, value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise CheckpointError(f"{path}: damaged header: __metadata__ is not a map from text to text")
    return value


def _tensor(path: Path, name: str, entry: object, start: int) -> TensorInfo:
    def damaged(what: str) -> CheckpointError:
        return CheckpointError(f"{path}: damaged header: tensor {name!r:.200} {what}")

    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise damaged("needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise damaged(f"has the unknown dtype {dtype!r:.60}; known: {', '.join(DTYPES)}")
    if not _sizes(shape) or len(shape) > 64:  # torch's own limit on dimensions
        raise damaged(f"has the shape {shape!r:.60}")
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise damaged(f"has the offsets {offsets!r:.60}")
    begin, end = offsets
    bits = math.prod(shape) * DTYPES[dtype][0]
    if bits != 8 * (end - begin):
        raise damaged(f"spans {end - begin} bytes but {dtype} {shape!r:.60} needs {_in_bytes(bits)}")
    if dtype == "F4" and (not shape or shape[-1] % 2):
        raise damaged(f"is F4 with the shape {shape!r:.60}; the last dimension must be even")
    return TensorInfo(name, dtype, tuple(shape), path, start + begin, end - begin)


def _sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _in_bytes(bits: int) -> str:
    if bits >= 2**80:
        return "more than 2^77"
    return f"{bits / 8:g}" if bits % 8 else str(bits // 8)


def _span(info: TensorInfo) -> tuple[int, int]:
    return info.offset, info.nbytes


def layout_problem(tensors: Sequence[TensorInfo], start: int, size: int, alignment: int = 1) -> str | None:
    """Say what is wrong with where the tensors, in the order of their bytes, lie; ``None`` if nothing is.

    They must fill the file from ``start`` to its end without a gap, each at the next multiple of ``alignment``; the
    padding after the last one may be missing.
    """
    at = end = start
    for info in tensors:
        if info.offset != at:
            what = "overlaps the tensor before it" if info.offset < at else f"leaves a hole of {info.offset - at} bytes"
            return (
                f"damaged header: tensor {info.name!r:.200} ({info.dtype} {list(info.shape)}) at byte {info.offset} "
                f"{what} ({at} expected)"
            )
        end = at + info.nbytes
        at = -(-end // alignment) * alignment
    if size < end:
        cut = next((info.name for info in tensors if info.offset + info.nbytes > size), None)
        return (
            f"truncated: {end} bytes expected, {size} found ({end - size} missing, from tensor {cut!r:.200} on); "
            "an unfinished download or a full disk? fetch it again"
        )
    if size > at:
        return (
            f"{at} bytes expected, {size} found: {size - at} trailing bytes that no tensor owns; "
            "a damaged or overwritten file? fetch it again"
        )
    return None
