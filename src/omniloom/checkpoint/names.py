"""The file names that diffusers and transformers give to weights, and the choice among several in one folder.

<base>[.<variant>].safetensors
<base>[.<variant>]-00001-of-00002.safetensors    or  <base>-00001-of-00002.<variant>.safetensors
<base>.safetensors.index[.<variant>].json        or  <base>.<variant>.safetensors.index.json
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from omniloom.errors import CheckpointError, ModelError, shorten, suggest

DIFFUSERS_BASE = "diffusion_pytorch_model"
TRANSFORMERS_BASE = "model"
BASES = (DIFFUSERS_BASE, TRANSFORMERS_BASE, "pytorch_model")

_NAME = re.compile(
    rf"(?P<base>{'|'.join(BASES)})(\.(?P<before>\w+))?("
    r"(?P<shard>-\d{5}-of-\d{5})(\.(?P<after>\w+))?\.safetensors|"
    r"\.safetensors(?P<index>\.index(\.(?P<last>\w+))?\.json)?)"
)
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

Library = Literal["diffusers", "transformers"]


@dataclass
class WeightFiles:
    """The file names of one (base, variant) in a folder; variant None is the plain one."""

    base: str
    variant: str | None
    index: str | None = None
    single: str | None = None
    shards: list[str] = field(default_factory=list)


def scan(folder: Path) -> list[WeightFiles]:
    """Group the names in ``folder`` that follow the known patterns."""
    found: dict[tuple[str, str | None], WeightFiles] = {}
    for name in _listing(folder):
        match = _NAME.fullmatch(name)
        if not match:
            continue
        variant = match["before"] or match["after"] or match["last"]
        files = found.setdefault((match["base"], variant), WeightFiles(match["base"], variant))
        if match["index"]:
            if files.index:
                raise CheckpointError(f"{folder}: two indices for one model: {files.index} and {name}; remove one")
            files.index = name
        elif match["shard"]:
            files.shards.append(name)
        else:
            files.single = name
    return list(found.values())


def _listing(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise ModelError(f"{folder}: cannot be listed: {(error.strerror or str(error)).lower()}") from error


def choose(folder: Path, found: list[WeightFiles], variant: str | None, kind: Library | None) -> WeightFiles:
    """Choose the files of ``variant``, and among base names the one that the folder's library uses.

    Raises ``ModelError`` if there is none, naming what is there instead.
    """
    if not found:
        raise ModelError(_nothing(folder))
    fitting = [files for files in found if files.variant == variant]
    if not fitting:
        raise ModelError(_other_variants(folder, [files.variant for files in found], variant))
    if len(fitting) == 1:
        return fitting[0]
    wanted = {"diffusers": DIFFUSERS_BASE, "transformers": TRANSFORMERS_BASE, None: ""}[kind]
    for files in fitting:
        if files.base == wanted:
            return files
    raise ModelError(
        f"{folder}: weights under several names ({', '.join(files.base for files in fitting)}) "
        "and no config.json that says which library they are for; remove the ones that are not meant"
    )


def kind_of_folder(folder: Path) -> Library | None:
    """The library that a component folder is for, by its config.json, or None if that does not say."""
    try:
        config = json.loads((folder / "config.json").read_bytes().decode("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(config, dict):
        return None
    if "_class_name" in config:
        return "diffusers"
    return "transformers" if "architectures" in config or "model_type" in config else None


def _other_variants(folder: Path, there: Iterable[str | None], asked: str | None) -> str:
    names = sorted({name for name in there if name})
    listed = f"there are the variants {', '.join(names)}" if names else "there are no variants"
    if asked is None:
        return f"{folder}: no plain weights; {listed}: ask for one of them (variant={names[0]!r})"
    plain = " and plain weights" if None in there else ""
    return f"{folder}: no weights of variant {asked!r}{suggest(asked, names)}; {listed}{plain}"


def _nothing(folder: Path) -> str:
    names = _listing(folder)
    others = [name for name in names if name.endswith((".safetensors", ".gguf"))]
    if others:
        return (
            f"{folder}: no weights under a known name ({', '.join(BASES)}.safetensors) but {shorten(others, 4)}; "
            "give the path of the file itself"
        )
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        return (
            f"{folder}: only pickled weights ({shorten(pickles, 4)}), which are refused because loading a pickle can "
            "run code; convert them: load with the library they are from and call "
            "save_pretrained(..., safe_serialization=True)"
        )
    return f"{folder}: no weights here (nothing like {', '.join(BASES)}.safetensors)"
