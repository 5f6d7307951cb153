"""``omniloom methods``: the quantization methods and what each one runs with."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from omniloom.quantization.kernels.base import DeviceFacts


def methods(
    every: Annotated[
        bool, typer.Option("--all", metavar="", help="For kinds of devices in general, not for this machine's.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON object.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", metavar="", help="Print Markdown tables.")] = False,
    debug: Annotated[bool, typer.Option("--debug", metavar="", help="Show a traceback if something fails.")] = False,
) -> None:
    """List the quantization methods: what they store, and what they run with on this machine.

    Example: [bold]omniloom generate -p "a fox" --quantization int8[/bold]
    """
    from omniloom.cli.noise import hushed

    with hushed(debug):
        from omniloom.platform import detect
        from omniloom.quantization.catalog import as_markdown, known_devices, machine_devices

        devices = known_devices() if every else machine_devices(detect(devices=True))
        if markdown:
            text = as_markdown(devices)
        elif as_json:
            text = json.dumps(_plain(devices), indent=2) + "\n"
        else:
            text = ""
    if text:
        print(text, end="")
    else:
        _show(devices)


def _plain(devices: Mapping[str, DeviceFacts]) -> dict[str, object]:
    from omniloom.quantization.catalog import PLANNED, method_matrix

    return {"methods": [row.to_dict() for row in method_matrix(devices)], "planned": dict(PLANNED)}


def _show(devices: Mapping[str, DeviceFacts]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from omniloom.quantization.catalog import LATER, PLANNED, method_matrix, reasons

    rows = method_matrix(devices)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    narrow = console.width < 26 * (len(devices) + 1)  # then there is no room for the kernels' names
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("method", style="bold", overflow="fold")
    wide = len(devices) > 2  # then there is no room for what the weights are
    if not wide:
        table.add_column("weights", overflow="fold")
    table.add_column("bits", justify="right", no_wrap=True)
    for name in devices:
        table.add_column(name, overflow="fold", min_width=11 if console.width > 105 else None)
    for row in rows:
        cells = (
            f"{cell.status}: {cell.kernel}" if cell.kernel and not narrow else cell.status
            for cell in row.cells.values()
        )
        what = [] if wide else [row.method.weights]
        table.add_row(row.method.label, *what, f"{row.bits:.2f}", *cells)
    console.print(table)
    for labels, where, reason in reasons(rows):
        place = "" if len(devices) == 1 else f" {where}"
        console.print(f"{labels}{place}: {reason}", markup=False, soft_wrap=True)
    console.print()
    console.print("bits: stored per weight, scales included. emulated: the format's rounding, float32 products.")
    console.print(f"Not yet ({LATER}): {', '.join(PLANNED)}.", soft_wrap=True)
    console.print("Details: docs/quantization/overview.md")
