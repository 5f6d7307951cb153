"""Numbers as people read them."""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Iterable, Iterator
from typing import TextIO


def show_bytes(count: int | None) -> str:
    """Return "1.4 GiB"; "?" for ``None``."""
    if count is None:
        return "?"
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def show_count(count: int) -> str:
    """Return "11.9 B", "860 M", "41.9 k" for a number of parameters."""
    for limit, unit in ((10**9, " B"), (10**6, " M"), (10**3, " k")):
        if count >= limit:
            return f"{count / limit:.3g}{unit}" if count < 1000 * limit else f"{count / limit:.0f}{unit}"
    return str(count)


def show_rate(steps_per_second: float) -> str:
    """Return "6.4 steps/s", or "2.1 s/step" where steps are slow."""
    if steps_per_second >= 1:
        return f"{steps_per_second:.1f} steps/s"
    return f"{1 / steps_per_second:.1f} s/step" if steps_per_second > 0 else ""


def styled(text: str, code: str, stream: TextIO) -> str:
    """Wrap ``text`` in the ANSI style ``code`` if ``stream`` is a terminal whose user did not ask for NO_COLOR."""
    plain = not text or not stream.isatty() or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    return text if plain else f"\x1b[{code}m{text}\x1b[0m"


def show_rows(rows: Iterable[tuple[str, str]], stream: TextIO) -> Iterator[str]:
    """Yield "label  text" lines with the texts in one column, wrapped and coloured if ``stream`` is a terminal."""
    rows = list(rows)
    column = max(len(label) for label, _ in rows) + 2
    width = max(20, shutil.get_terminal_size().columns - column) if stream.isatty() else None
    for label, text in rows:
        parts = textwrap.wrap(text, width, break_long_words=False) if width else [text]
        for number, part in enumerate(parts or [""]):
            head = label if number == 0 else ""
            yield f"{styled(head, '36', stream)}{' ' * (column - len(head))}{part}"
