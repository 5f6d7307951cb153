"""The command line as a whole: its commands, and how an exception becomes one line and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from omniloom import __version__
from omniloom.cli.check import check
from omniloom.cli.generate import generate
from omniloom.cli.inspect import inspect
from omniloom.cli.methods import methods
from omniloom.cli.models import models
from omniloom.cli.quantize import quantize
from omniloom.cli.show import styled
from omniloom.errors import OmniloomError

EXIT_USAGE, EXIT_MEMORY, EXIT_RUNTIME = 2, 4, 5
EXIT_INTERRUPTED, EXIT_PIPE = 130, 141  # as a shell reports SIGINT and SIGPIPE

app = typer.Typer(
    name="omniloom",
    help="Run diffusion transformers and omni models on any hardware.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate)
app.command()(quantize)
app.command()(inspect)
app.command()(models)
app.command()(methods)
app.command()(check)


@app.command()
def version() -> None:
    """Print the version."""
    print(f"omniloom {__version__}")


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit()


@app.callback(epilog="Exit codes: 0 done, 2 usage, 3 model, 4 memory, 5 failed while running, 130 interrupted.")
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, metavar="", help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    words = list(sys.argv[1:] if args is None else args)
    debug = "--debug" in words
    try:
        command = typer.main.get_command(app)
        # In this mode typer returns its own exit codes (130 for Ctrl-C) and raises everything else.
        code = command.main(args=words or ["--help"], prog_name="omniloom", standalone_mode=False)
        if code == EXIT_INTERRUPTED:
            raise KeyboardInterrupt
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except typer.TyperException as error:
        return _complain(error.format_message(), EXIT_USAGE)
    except OmniloomError as error:
        if debug:
            traceback.print_exc()
        return _complain(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return _complain("interrupted", EXIT_INTERRUPTED)
    except (BrokenPipeError, SystemExit):  # typer turns the first into the second
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that the interpreter's own last flush succeeds
        return EXIT_PIPE
    except Exception as error:
        if debug:
            traceback.print_exc()
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
            return _complain(f"out of memory: {error}", EXIT_MEMORY)
        hint = "" if debug else "; run again with --debug to see where"
        return _complain(f"internal error: {type(error).__name__}: {error}{hint}", EXIT_RUNTIME)


def run() -> NoReturn:
    """The console script: ``main`` for this process's own arguments, then exit."""
    code = main()
    if code == EXIT_INTERRUPTED:
        # Everything of ours is closed by now. The libraries' native threads are not always: 2 of 24 interrupted runs
        # ended with SIGABRT in the interpreter's shutdown instead of this code.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _complain(message: str, code: int) -> int:
    line = " ".join(message.split())
    print(f"{styled('error:', '1;31', sys.stderr)} {line}", file=sys.stderr, flush=True)
    return code
