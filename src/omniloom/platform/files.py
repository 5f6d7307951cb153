"""Small reads from /proc and /sys (below a root folder that tests replace) and from macOS's ``sysctl``."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path("/")


def read_text(path: Path) -> str | None:
    """Return the text of a small file, or ``None`` if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def read_int(path: Path) -> int | None:
    """Return the integer that is all a file holds, or ``None`` ("max", missing, anything else)."""
    text = (read_text(path) or "").strip()
    return int(text) if text.lstrip("-").isdecimal() else None


def run_tool(command: Sequence[str]) -> str:
    """Return the output of a system tool, or an empty string if it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def sysctl(name: str) -> str:
    """Return one macOS ``sysctl`` value, or an empty string."""
    return run_tool(["/usr/sbin/sysctl", "-n", name])
