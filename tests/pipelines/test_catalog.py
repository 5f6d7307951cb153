"""The table of families agrees with the data, with diffusers and with what the suite proves."""

from __future__ import annotations

import json
from pathlib import Path

import diffusers
import pytest

from omniloom.pipelines.catalog import as_markdown, catalog
from omniloom.pipelines.families import FAMILIES as FACTS
from tests.fixtures.reference import load
from tests.fixtures.tiny import FAMILIES
from tests.proven import FILE, proven

DOCS = Path(__file__).parents[2] / "docs" / "models.md"


def test_proven_is_what_the_suite_proves() -> None:
    assert json.loads(FILE.read_text()) == proven(), "run: python -m tests.proven"


def test_the_docs_page_has_the_table() -> None:
    assert as_markdown() in DOCS.read_text(), "run: omniloom models --markdown, and put the table into docs/models.md"


def test_every_pipeline_exists_and_every_row_has_something_proven() -> None:
    for row in catalog():
        assert all(hasattr(diffusers, name) for name in row.pipelines)
        assert row.proven


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("flux-wide", "flux-256", "flux-odd")])
def test_blocks_are_where_the_data_says(tiny_folder, family: str) -> None:
    pipe = load(tiny_folder(family))
    facts = next(f for f in FACTS if type(pipe).__name__ in f.pipelines)
    for denoiser in facts.denoisers:
        module = getattr(pipe, denoiser, None)
        if module is None:
            assert denoiser != "transformer"
            continue
        for attribute, class_name in facts.blocks.items():
            blocks = getattr(module, attribute)
            assert len(blocks) > 0
            assert {type(block).__name__ for block in blocks} == {class_name}
        assert set(facts.blocks.values()) <= set(module._repeated_blocks or module._no_split_modules)
