"""Which files of a component folder hold its weights, and which tensor lies in which of them.

With an index, exactly what the index lists is used and everything else in the folder is ignored (stale shards of an
earlier save, other variants); every contradiction between the index and the shards is an error.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from omniloom.checkpoint.names import WeightFiles, choose, kind_of_folder, scan
from omniloom.checkpoint.safetensors import SafetensorsHeader, TensorInfo, read_header, unique_keys
from omniloom.errors import CheckpointError, ModelError, shorten


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of one component, in the order of their bytes, and the files they lie in."""

    files: list[Path]
    tensors: dict[str, TensorInfo]
    metadata: dict[Path, dict[str, str]] = field(default_factory=dict)  # each file's own __metadata__

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.tensors.values())


def single_file(path: str | Path) -> Weights:
    """The weights of one .safetensors file. Raises ``CheckpointError`` if it is missing, damaged or foreign."""
    path = Path(path).expanduser()
    header = read_header(path)
    return Weights([path], header.tensors, {path: header.metadata})


def find_weights(folder: str | Path, variant: str | None = None) -> Weights:
    """Find and check the weights of the component in ``folder``; ``variant`` ("fp16") only if it is asked for.

    Raises ``ModelError`` if the folder holds nothing that can be loaded or the variant is not there, and
    ``CheckpointError`` naming file and tensor if a file is damaged or contradicts its index.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder")
    found = choose(folder, scan(folder), variant, kind_of_folder(folder))
    if found.index:
        return _indexed(folder, folder / found.index)
    if found.single:
        return single_file(folder / found.single)
    raise _no_index(folder, found)


def _no_index(folder: Path, found: WeightFiles) -> CheckpointError:
    name = f"{found.base}.safetensors.index{'.' + found.variant if found.variant else ''}.json"
    return CheckpointError(
        f"{folder}: {len(found.shards)} shards ({shorten(found.shards, 3)}) but their index {name} is missing; "
        "download it too"
    )


def _indexed(folder: Path, index: Path) -> Weights:
    weight_map = _read_index(index)
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        key = next(key for key, shard in weight_map.items() if shard == missing[0])
        why = " (a broken link)" if (folder / missing[0]).is_symlink() else ""
        raise CheckpointError(
            f"{folder}: {shorten(missing, 4)} missing{why}: {index.name} lists it, e.g. for tensor {key!r}; "
            f"{len(missing)} of {len(shards)} shards are missing, download the model again"
        )
    headers = dict(zip(shards, _read_headers([folder / shard for shard in shards]), strict=True))
    _check_keys(index, weight_map, headers)
    return Weights(
        files=[folder / shard for shard in shards],
        tensors={name: info for header in headers.values() for name, info in header.tensors.items()},
        metadata={header.path: header.metadata for header in headers.values()},
    )


def _read_headers(paths: Sequence[Path]) -> list[SafetensorsHeader]:
    if len(paths) == 1:
        return [read_header(paths[0])]
    with ThreadPoolExecutor(min(8, len(paths))) as pool:
        return list(pool.map(read_header, paths))


def _check_keys(index: Path, weight_map: dict[str, str], headers: dict[str, SafetensorsHeader]) -> None:
    """Index and shards must list the same tensors in the same places."""
    absent = [key for key, shard in weight_map.items() if key not in headers[shard].tensors]
    if absent:
        raise CheckpointError(
            f"{headers[weight_map[absent[0]]].path}: has no tensor {absent[0]!r}, which {index.name} says it holds"
            + _and_more(absent)
        )
    for shard, header in headers.items():
        extra = [key for key in header.tensors if weight_map.get(key) != shard]
        if extra:
            home = weight_map.get(extra[0])
            what = f"belongs to {home} by {index.name}" if home else f"is not listed in {index.name}"
            raise CheckpointError(
                f"{header.path}: holds tensor {extra[0]!r}, which {what}{_and_more(extra)}; "
                "files of different saves were mixed? download the model again"
            )


def _and_more(keys: list[str]) -> str:
    return f" (also {shorten(map(repr, keys[1:]), 9)})" if len(keys) > 1 else ""


def _read_index(index: Path) -> dict[str, str]:
    try:
        data = json.loads(index.read_bytes().decode("utf-8"), object_pairs_hook=unique_keys)
    except OSError as error:
        raise CheckpointError(f"{index}: cannot be read: {error.strerror}; download it again") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{index}: not a valid index: {error}; download it again") from error
    weight_map = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: not a valid index: it has no weight_map with at least one tensor")
    for key, shard in weight_map.items():
        if not isinstance(shard, str) or not _inside(shard):
            raise CheckpointError(f"{index}: tensor {key!r} is in {shard!r:.200}, which is no file of this folder")
        if not shard.endswith(".safetensors"):
            raise ModelError(f"{index}: tensor {key!r} is in {shard!r:.200}: only .safetensors files are loaded")
    return weight_map


def _inside(shard: str) -> bool:
    path = PurePosixPath(shard)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and not set(shard) & set("\\:\0")
