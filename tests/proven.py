"""What the suite proves, per pipeline class; ``python -m tests.proven`` writes what ``omniloom models`` reads."""

from __future__ import annotations

import json
from pathlib import Path

import omniloom.pipelines
from tests.fixtures.tiny import FAMILIES

FILE = Path(omniloom.pipelines.__file__).with_name("proven.json")


def proven() -> dict[str, list[str]]:
    """Return pipeline class -> tasks that ``test_families`` and ``test_exactness`` compare with diffusers."""
    from tests.engine.test_exactness import CASES as exact
    from tests.engine.test_families import CASES as cases

    found: dict[str, set[str]] = {}
    for name, task in [*cases, *((name, FAMILIES[name].tasks[0]) for name in exact)]:
        found.setdefault(FAMILIES[name].class_for(task), set()).add(task)
    return {pipeline: sorted(tasks) for pipeline, tasks in sorted(found.items())}


if __name__ == "__main__":
    FILE.write_text(json.dumps(proven(), indent=1) + "\n", encoding="utf-8")
    print(FILE)
