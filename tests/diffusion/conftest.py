"""Each test starts with dynamo's caches empty: they belong to code objects, which all tests share."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    yield
    if "torch._dynamo.utils" in sys.modules and torch._dynamo.utils.counters:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
