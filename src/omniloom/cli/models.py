"""``omniloom models``: the families of models and what is proven about each."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer


def models(
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON array.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", metavar="", help="Print a Markdown table.")] = False,
    debug: Annotated[bool, typer.Option("--debug", metavar="", help="Show a traceback if something fails.")] = False,
) -> None:
    """List the model families: pipelines, tasks that are proven exact, blocks, sizes and frame counts."""
    from omniloom.pipelines.catalog import as_markdown, catalog

    if as_json:
        print(json.dumps([row.to_dict() for row in catalog()], indent=2))
    elif markdown:
        print(as_markdown(), end="")
    else:
        _show()


def _show() -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from omniloom.pipelines.catalog import catalog

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("family", style="bold", no_wrap=True)
    table.add_column("pipeline", overflow="fold")
    table.add_column("proven equal to diffusers")
    table.add_column("frames")
    for row in catalog():
        for number, pipeline in enumerate(row.pipelines):
            tasks = ", ".join(row.proven.get(pipeline, [])) or "[dim]not yet[/dim]"
            table.add_row(row.family if number == 0 else "", pipeline, tasks, row.frames if number == 0 else "")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    console.print(table)
    console.print("Other diffusers pipelines of the common protocol run too. Details: docs/models.md")
