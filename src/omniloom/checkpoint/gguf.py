"""The GGUF file format, versions 2 and 3: metadata, a table of tensors, their bytes; all little-endian.

Layout as published in ggml's ``docs/gguf.md``: magic ``GGUF``, u32 version, u64 tensor count, u64 metadata count; the
metadata (key, u32 type, value); per tensor its name, u32 rank, u64 sizes (innermost first), u32 type, u64 offset; then
padding to ``general.alignment`` and the data. Text is a u64 length and UTF-8. ``read_gguf`` checks everything that can
be checked without reading a tensor and imports neither torch nor the ``gguf`` package.
"""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from omniloom.checkpoint.foreign import kind_of
from omniloom.checkpoint.gguf_values import Cursor, Damaged, LongArray, Value, read_value
from omniloom.checkpoint.safetensors import TensorInfo, layout_problem
from omniloom.errors import CheckpointError

if TYPE_CHECKING:
    import torch

__all__ = ["GGML_TYPES", "GgmlType", "GgufHeader", "GgufTensor", "LongArray", "read_gguf"]

MAX_DIMS = 8  # ggml stops at 4; video models have 5-D kernels
DEFAULT_ALIGNMENT = 32
ORIG_SHAPE = "comfy.gguf.orig_shape."


class GgmlType(NamedTuple):
    """``block`` elements in ``size`` bytes; ``torch_name`` where the bytes are a torch dtype as they are."""

    name: str
    block: int
    size: int
    torch_name: str | None = None


# fmt: off
_ENTRIES: dict[int, Any] = {
    0: ("F32", 1, 4, "float32"), 1: ("F16", 1, 2, "float16"), 30: ("BF16", 1, 2, "bfloat16"),
    24: ("I8", 1, 1, "int8"), 25: ("I16", 1, 2, "int16"), 26: ("I32", 1, 4, "int32"), 27: ("I64", 1, 8, "int64"),
    28: ("F64", 1, 8, "float64"),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
}
_REFUSED = {
    9: "Q8_1, which ggml uses while it computes only", 15: "Q8_K, which ggml uses while it computes only",
    4: "Q4_2, which ggml removed", 5: "Q4_3, which ggml removed", 41: "Q1_0, which omniloom cannot decode",
    31: "Q4_0_4_4, which ggml removed", 32: "Q4_0_4_8, which ggml removed", 33: "Q4_0_8_8, which ggml removed",
    36: "IQ4_NL_4_4, which ggml removed", 37: "IQ4_NL_4_8, which ggml removed", 38: "IQ4_NL_8_8, which ggml removed",
}
# fmt: on
GGML_TYPES = {number: GgmlType(*entry) for number, entry in _ENTRIES.items()}
TYPES_BY_NAME = {kind.name: kind for kind in GGML_TYPES.values()}


@dataclass(frozen=True, slots=True)
class GgufTensor(TensorInfo):
    """One tensor: ``dtype`` is ggml's type name ("Q4_K"), ``shape`` the logical shape in torch's order.

    ``stored_shape`` is that of the file; it differs from ``shape`` only where ``comfy.gguf.orig_shape`` names another.
    ``dense`` marks a quantized tensor that its source decodes: then ``torch_dtype`` is float32.
    """

    stored_shape: tuple[int, ...]
    dense: bool = False

    @property
    def kind(self) -> GgmlType:
        """Name, block length and block bytes of the type."""
        return TYPES_BY_NAME[self.dtype]

    @property
    def quantized(self) -> bool:
        """Whether the bytes are blocks, not plain numbers."""
        return self.kind.torch_name is None

    @property
    def itemsize(self) -> int:
        """Bytes of a number as stored; 1 for blocks."""
        return 1 if self.quantized else self.kind.size

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype that reading gives: ``torch.uint8`` for blocks, float32 for decoded ones."""
        import torch

        name = self.kind.torch_name or ("float32" if self.dense else "uint8")
        dtype = getattr(torch, name)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def torch_shape(self) -> tuple[int, ...]:
        """The shape that reading gives: for blocks the last dimension counts bytes.

        Blocks run along the flat sequence of elements; a logical row that does not end with a block keeps the file's
        rows.
        """
        if not self.quantized or self.dense:
            return self.shape
        shape = self.shape if self.shape and self.shape[-1] % self.kind.block == 0 else self.stored_shape
        return (*shape[:-1], shape[-1] // self.kind.block * self.kind.size)

    def fitted(self, shape: tuple[int, ...]) -> GgufTensor:
        """Return this tensor with the logical ``shape`` of the model.

        Taken over: the same shape; the same number of elements with another rank (flattened kernels, pad tokens without
        their leading 1, squeezed embeddings); and dimensions written in torch's order, for three and more of them.
        Raises ``CheckpointError`` for every other shape.
        """
        if shape == self.shape:
            return self
        same = math.prod(shape) == math.prod(self.shape)
        if same and (len(shape) != len(self.shape) or (len(shape) > 2 and shape == self.shape[::-1])):
            return dataclasses.replace(self, shape=shape)
        raise CheckpointError(
            f"{self.file}: tensor {self.name!r} ({self.dtype}) has the shape {list(self.shape)}, "
            f"the model needs {list(shape)}"
        )


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The checked header of one file; ``tensors`` are in the order of their bytes."""

    path: Path
    size: int
    version: int
    alignment: int
    metadata: dict[str, Value]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str | None:
        """``general.architecture``, where the file says it."""
        value = self.metadata.get("general.architecture")
        return value if isinstance(value, str) else None


def read_gguf(path: str | Path) -> GgufHeader:
    """Read and check the header of a GGUF file.

    Raises ``CheckpointError``, one line with the path and what was found, for a file that is missing, truncated,
    over-long, foreign, big-endian, of another version or inconsistent.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            cursor = Cursor(file, size)
            return _read(path, size, cursor)
    except OSError as error:
        reason = "it is a folder" if path.is_dir() else (error.strerror or str(error)).lower()
        raise CheckpointError(f"{path}: cannot be read: {reason}") from error
    except Damaged as error:
        raise CheckpointError(f"{path}: {error}") from error


def _read(path: Path, size: int, cursor: Cursor) -> GgufHeader:
    version = _version(path, size, cursor)
    tensor_count, value_count = cursor.u64("the tensor count"), cursor.u64("the metadata count")
    for count, least, what in ((tensor_count, 24, "tensors"), (value_count, 13, "metadata entries")):
        if count * least > size:
            raise Damaged(f"damaged header: {count} {what} do not fit into a file of {size} bytes: cut? fetch it again")
    metadata: dict[str, Value] = {}
    for index in range(value_count):
        key = cursor.text(f"key {index} of {value_count}")
        if key in metadata:
            raise Damaged(f"damaged header: the key {key!r:.200} appears twice")
        metadata[key] = read_value(cursor, key)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise Damaged(f"damaged header: general.alignment is {alignment!r:.60}; it must be a power of two")
    if type(parts := metadata.get("split.count", 1)) is int and parts > 1:
        raise Damaged(f"it is one of {parts} parts of a split file; join them (llama-gguf-split --merge)")
    raw = [_entry(cursor, index, tensor_count) for index in range(tensor_count)]
    start = -(-cursor.position // alignment) * alignment
    found: dict[str, GgufTensor] = {}
    for name, dims, number, offset in raw:
        if name in found:
            raise Damaged(f"damaged header: the tensor {name!r:.200} appears twice")
        found[name] = _tensor(path, name, dims, number, start + offset, metadata)
    ordered = sorted(found.values(), key=lambda info: (info.offset, info.nbytes))
    if problem := layout_problem(ordered, start, size, alignment):
        raise Damaged(problem)
    return GgufHeader(path, size, version, alignment, metadata, {info.name: info for info in ordered})


def _version(path: Path, size: int, cursor: Cursor) -> int:
    if size == 0:
        raise Damaged("the file is empty (0 bytes): an unfinished download? fetch it again")
    head = cursor.peek(64)
    if not head.startswith(b"GGUF"):
        if b"GGUF".startswith(head):
            raise Damaged(f"truncated: {size} bytes, a GGUF file has at least 24; fetch it again")
        kind = kind_of(head) or ("this looks like a safetensors file" if head[8:9] == b"{" else None)
        raise Damaged(f"{kind or f'it starts with {head[:4]!r}'} ({size} bytes), not GGUF")
    cursor.take(4, "the magic")
    version = cursor.u32("the version")
    if version in (2, 3):
        return version
    if version and version & 0xFFFF == 0:
        raise Damaged("a big-endian GGUF file; only little-endian ones are read: convert it")
    if version == 1:
        raise Damaged("GGUF version 1, which was given up in 2023; convert it again, to version 3")
    raise Damaged(f"GGUF version {version}; 2 and 3 are known")


def _entry(cursor: Cursor, index: int, count: int) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.text(f"the name of tensor {index} of {count}")
    rank = cursor.u32(f"the rank of tensor {name!r:.200}")
    if rank > MAX_DIMS:
        raise Damaged(f"damaged header: tensor {name!r:.200} has {rank} dimensions; at most {MAX_DIMS} are read")
    what = f"the entry of tensor {name!r:.200}"
    dims = tuple(cursor.u64(what) for _ in range(rank))
    return name, dims[::-1], cursor.u32(what), cursor.u64(what)


def _tensor(
    path: Path, name: str, shape: tuple[int, ...], number: int, offset: int, metadata: dict[str, Value]
) -> GgufTensor:
    kind = GGML_TYPES.get(number)
    if kind is None:
        what = _REFUSED.get(number, f"unknown; known: {', '.join(TYPES_BY_NAME)}")
        raise Damaged(f"tensor {name!r:.200} has the type {number}: {what}")
    count = math.prod(shape)
    if any(length >= 2**48 for length in shape) or count >= 2**56:
        raise Damaged(f"damaged header: tensor {name!r:.200} has the shape {list(shape)}")
    row = shape[-1] if shape else 1
    if row % kind.block:
        raise Damaged(
            f"damaged header: tensor {name!r:.200} is {kind.name} in blocks of {kind.block}, "
            f"but its rows have {row} elements"
        )
    logical = _orig_shape(name, shape, count, metadata.get(ORIG_SHAPE + name))
    return GgufTensor(name, kind.name, logical, path, offset, count // kind.block * kind.size, shape)


def _orig_shape(name: str, shape: tuple[int, ...], count: int, value: Value | None) -> tuple[int, ...]:
    if value is None:
        return shape
    if not isinstance(value, list) or len(value) > MAX_DIMS or not all(type(n) is int and n >= 0 for n in value):
        raise Damaged(f"damaged header: {ORIG_SHAPE}{name} is {value!r:.60}, not a shape")
    logical = tuple(n for n in value if isinstance(n, int))
    if math.prod(logical) != count:
        raise Damaged(f"damaged header: tensor {name!r:.200} has the shape {list(shape)}, its orig_shape is {value}")
    return logical
