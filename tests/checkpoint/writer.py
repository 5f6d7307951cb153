"""An independent safetensors writer that can also write wrong files, and folders made with the official library."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def raw_file(path: Path, header: Any, data: bytes, length: int | None = None) -> Path:
    """Write ``header`` (JSON value, text or bytes) and ``data``; ``length`` overrides the true header length."""
    if isinstance(header, dict):
        header = json.dumps(header)
    if isinstance(header, str):
        header = header.encode()
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)
    return path


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def save_shards(
    folder: Path, shards: list[dict[str, torch.Tensor]], base: str = "model", variant: str | None = None
) -> dict[str, str]:
    """Write shards as transformers does, with their index; return the weight map."""
    folder.mkdir(parents=True, exist_ok=True)
    mark = f".{variant}" if variant else ""
    weight_map = {}
    for number, tensors in enumerate(shards, 1):
        name = f"{base}{mark}-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    write_index(folder / f"{base}.safetensors.index{mark}.json", weight_map)
    return weight_map


def write_index(path: Path, weight_map: dict[str, str]) -> None:
    path.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal in dtype, shape and every bit, NaNs included."""

    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().view(-1).view(torch.uint8)

    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(bits(left), bits(right))
