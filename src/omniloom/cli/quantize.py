"""``omniloom quantize``: a quantized copy of a model."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omniloom.cli import flags
from omniloom.cli.show import show_bytes

if TYPE_CHECKING:
    from omniloom.pipelines.save_quantized import Saved

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


def _shard_size(text: str) -> int:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMG]?)B?", text.strip().upper())
    size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if size < 1:
        raise typer.BadParameter(f"{text!r} is no size, for example 5GB or 500MB")
    return size


def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Pipeline folder, hub id (owner/name), or demo.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="The new folder.")],
    quantization: flags.Quantization = None,
    quantization_config: flags.QuantizationConfig = None,
    max_shard_size: Annotated[
        Any, typer.Option(metavar="SIZE", parser=_shard_size, help="Largest weight file, for example 2GB.")
    ] = "5GB",
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON object.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", metavar="", help="No progress.")] = False,
    debug: Annotated[bool, typer.Option("--debug", metavar="", help="Show a traceback if something fails.")] = False,
) -> None:
    """Write a quantized copy of a model, which loads without any option.

    Example: [bold]omniloom quantize demo --quantization fp8 -o demo-fp8[/bold]
    """
    from omniloom.cli.noise import hushed
    from omniloom.cli.progress import make_reporter

    given = {"quantization": quantization, "quantization_config": quantization_config}
    with hushed(debug), make_reporter(quiet) as reporter:
        import omniloom.options  # noqa: F401  (registers the options)
        from omniloom.config import RuntimeConfig
        from omniloom.pipelines.load import find_model
        from omniloom.pipelines.save_quantized import save_quantized

        config = RuntimeConfig.resolve(cli={key: value for key, value in given.items() if value is not None})
        done = save_quantized(
            find_model(model, config),
            config.quantization_config,
            output,
            given="--quantization",
            progress=reporter.on_load,
            max_shard_bytes=max_shard_size,
        )
    if as_json:
        print(
            json.dumps({"model": model, "output": str(output), "components": {n: _plain(s) for n, s in done.items()}})
        )
        return
    if not quiet:
        for name, saved in done.items():
            counts = f"{len(saved.selection.quantized)} layers quantized, {len(saved.selection.skipped)} kept"
            sizes = f"{show_bytes(saved.bytes_before)} -> {show_bytes(saved.bytes_after)}"
            print(f"{name}: {saved.method}, {counts}, {sizes}", file=sys.stderr)
    print(output)


def _plain(saved: Saved) -> dict[str, Any]:
    return {
        "method": saved.method,
        "quantized_layers": sorted(saved.selection.quantized),
        "skipped_layers": dict(saved.selection.skipped),
        "bytes_before": saved.bytes_before,
        "bytes_after": saved.bytes_after,
    }
