"""How long a command takes, measured so that other work on the machine does not decide the test."""

from __future__ import annotations

import resource
import subprocess
import sys


def cpu_seconds(*words: object, tries: int = 3) -> float:
    """Run ``omniloom`` as a process and return the least CPU time of some tries.

    The commands measured are single-threaded and read warm files, so on an idle machine this is the time on the wall.
    """
    found = []
    for _ in range(tries):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "omniloom", *map(str, words)], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    return min(found)
