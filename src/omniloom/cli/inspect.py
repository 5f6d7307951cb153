"""``omniloom inspect``: what a model consists of, without loading it."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omniloom.cli.show import show_bytes, show_count

if TYPE_CHECKING:
    from omniloom.pipelines.inspect import ComponentSummary, ModelSummary


def inspect(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="Pipeline folder, component folder, .safetensors file, or demo.")
    ],
    variant: Annotated[str | None, typer.Option(help="File variant to look at, for instance fp16.")] = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON object.")] = False,
    debug: Annotated[bool, typer.Option("--debug", metavar="", help="Show a traceback if something fails.")] = False,
) -> None:
    """List a model's components, classes, parameters, dtypes and bytes, from its headers alone."""
    from omniloom.pipelines.inspect import inspect_model

    summary = inspect_model(path, variant)
    stored = {part.name: _stored(part) for part in summary.components}
    if as_json:
        plain = summary.to_dict()
        for name, component in plain["components"].items():
            component["stored_quantization"] = stored[name]
        print(json.dumps(plain, indent=2))
    else:
        _show(summary, {name: found for name, found in stored.items() if found})


def _stored(component: ComponentSummary) -> dict[str, Any] | None:
    """Return what the component's headers say of quantized layers; ``None`` if it is dense."""
    found = component.stored_quantization
    return None if found is None else {"method": _method(component), **dataclasses.asdict(found)}


def _method(component: ComponentSummary) -> str | None:
    given = component.quantization or {}
    return given.get("quant_method") or given.get("method")


def _show(summary: ModelSummary, stored: dict[str, dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_footer=len(summary.components) > 1, pad_edge=False)
    table.add_column("component", "total", style="bold", no_wrap=True)
    table.add_column("class", overflow="fold")
    table.add_column("parameters", show_count(summary.parameters), justify="right", no_wrap=True)
    table.add_column("size", show_bytes(summary.bytes), justify="right", no_wrap=True)
    table.add_column("dtype")
    table.add_column("files", str(sum(c.files for c in summary.components)), justify="right")
    table.add_column("tensors", str(sum(c.tensors for c in summary.components)), justify="right")
    for component in summary.components:
        table.add_row(*_row(component))
    # In a pipe there is no width to fit into: never cut a name short there.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    console.print(f"[bold]{summary.pipeline or summary.kind}[/bold]  ", end="")
    console.print(summary.path, markup=False, soft_wrap=True)
    console.print(table)
    for name, found in stored.items():
        formats = ", ".join(f"{count} x {codec}" for codec, count in found["codecs"].items())
        method = found["method"] or "no quantization_config"
        line = f"{name}: {method}, {found['layers']} quantized layers ({formats}), {show_bytes(found['bytes'])}"
        console.print(line, markup=False, soft_wrap=True)


def _row(component: ComponentSummary) -> tuple[str, ...]:
    kind = component.class_name or "?"
    if component.quantization:
        kind += f" ({_method(component) or 'quantized'})"
    if not component.tensors:
        return component.name, kind, "", "", "", "", ""
    return (
        component.name,
        kind,
        show_count(component.parameters),
        show_bytes(component.bytes),
        _dtypes(component),
        str(component.files),
        str(component.tensors),
    )


def _dtypes(component: ComponentSummary) -> str:
    """Return "bfloat16", or with shares of the bytes "int8 97%, float32 3%"."""
    if len(component.dtypes) < 2:
        return next(iter(component.dtypes), "")
    shares = (
        (name, 100 * count / component.bytes if component.bytes else 0) for name, count in component.dtypes.items()
    )
    return ", ".join(f"{name} {share:.0f}%" if share >= 1 else f"{name} <1%" for name, share in shares)
