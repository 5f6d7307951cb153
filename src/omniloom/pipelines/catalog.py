"""The table of families: what each one is and what the test suite proves about it. No torch is imported.

``proven.json`` is written from the test suite (``python -m tests.proven``) and a test holds the two together.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from omniloom.config import to_plain
from omniloom.pipelines.families import FAMILIES
from omniloom.pipelines.family import Family


@dataclasses.dataclass(frozen=True)
class CatalogRow:
    """One family. ``proven``: pipeline class -> tasks whose eager output equals diffusers' bit for bit."""

    family: str
    pipelines: tuple[str, ...]
    denoisers: tuple[str, ...]
    blocks: dict[str, str]
    size: str
    frames: str
    branches: str
    proven: dict[str, list[str]]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return to_plain(self)


def catalog() -> list[CatalogRow]:
    """Return one row per family, by name."""
    proven = json.loads(Path(__file__).with_name("proven.json").read_text(encoding="utf-8"))
    return [_row(family, proven) for family in FAMILIES]


def as_markdown() -> str:
    """Return the catalog as the table of ``docs/models.md``."""
    lines = [
        "| family | pipeline | proven tasks | blocks | sizes | frames |",
        "|---|---|---|---|---|---|",
    ]
    for row in catalog():
        blocks = ", ".join(f"`{name}`" for name in row.blocks)
        for number, pipeline in enumerate(row.pipelines):
            tasks = ", ".join(row.proven.get(pipeline, [])) or "not yet"
            facts = (blocks, row.size, row.frames) if number == 0 else ("", "", "")
            lines.append(f"| {row.family if number == 0 else ''} | `{pipeline}` | {tasks} | {' | '.join(facts)} |")
    return "\n".join(lines) + "\n"


def _row(family: Family, proven: dict[str, list[str]]) -> CatalogRow:
    stride = " × ".join(str(factor).replace("_", " ") for factor in family.size_stride)
    frames = f"k × {str(family.frames.stride).replace('_', ' ')} + 1" if family.frames else ""
    names = " / ".join(family.branches.names)
    return CatalogRow(
        family=family.name,
        pipelines=family.pipelines,
        denoisers=family.denoisers,
        blocks=dict(family.blocks),
        size=f"multiples of {stride}",
        frames=frames,
        branches=f"{names} ({family.branches.rule.value})",
        proven={pipeline: proven[pipeline] for pipeline in family.pipelines if pipeline in proven},
    )
