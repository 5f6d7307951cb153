"""The ``omniloom`` command: words in, words out. Results go to stdout, everything else to stderr."""

from __future__ import annotations

from omniloom.cli.app import main, run

__all__ = ["main", "run"]
