"""What decides whether a call needs another graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from omniloom.diffusion.compile.keys import shape_key

X = torch.zeros(2, 3, 4)


def key(*args: Any, **kwargs: Any) -> Any:
    return shape_key(args, kwargs)


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(2, 3, 5),
        torch.zeros(2, 3, 4, dtype=torch.float16),
        torch.zeros(2, 3, 4, device="meta"),
        torch.zeros(3, 2, 4).transpose(0, 1),
        torch.zeros(2, 3, 4, requires_grad=True),
        torch.nn.Parameter(torch.zeros(2, 3, 4), requires_grad=False),
        None,
        [X],
    ],
)
def test_what_differs(other: Any) -> None:
    assert key(X) != key(other)
    assert key(a={"b": [X]}) != key(a={"b": [other]})


def test_what_is_equal() -> None:
    assert key(X, 1, "a", None, 0.5, (X, {"k": X})) == key(X + 1, 1, "a", None, 0.7, (X.clone(), {"k": X}))
    assert hash(key(object(), x=[1, {2: 3}])) is not None
    assert key(1) != key(True) != key(1.0)
    with torch.no_grad():
        without = key(X)
    assert without != key(X)
