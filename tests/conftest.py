"""Settings and fixtures for the whole suite. ``tiny_folder`` and friends come from ``tests.fixtures.plugin``."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# Nothing in the suite may reach a hub, a terminal's width or a user's colour settings.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
for _name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR"):
    os.environ.pop(_name, None)

pytest_plugins = ["tests.fixtures.plugin"]

settings.register_profile(
    "omniloom",
    deadline=None,
    max_examples=50,
    derandomize="CI" in os.environ,  # new examples are for developers to find, not for a build to fail on
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
settings.load_profile("omniloom")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` where torch finds no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch finds none"))
