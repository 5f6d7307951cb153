"""A callable that looks like the one it stands for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

try:  # not public: where a torch has it not, the attributes below alone make dynamo break the graph
    from torch._C._dynamo import eval_frame as _eval_frame
except ImportError:  # pragma: no cover
    _eval_frame = None  # type: ignore[assignment]

Forward = Callable[..., Any]

_COPIED = ("__module__", "__qualname__", "__name__", "__doc__", "__annotations__")


class Transparent:
    """Base of our stand-ins for a module's ``forward``: name, documentation and signature are those of the original.

    Other libraries choose by parameter names and the return annotation, so ``inspect.signature`` must not see us.
    Instances are hashable by identity. A subclass answers ``_stands_for``.
    """

    module: Any

    def _stands_for(self) -> Forward:
        raise NotImplementedError

    def _look_like(self, original: Forward) -> None:
        for name in _COPIED:
            if hasattr(original, name):
                self.__dict__[name] = getattr(original, name)

    @property
    def __wrapped__(self) -> Forward:
        return self._stands_for()

    @property
    def __signature__(self) -> inspect.Signature:
        try:
            return inspect.signature(self._stands_for())
        except (TypeError, ValueError) as error:
            raise AttributeError(f"no signature: {error}") from error

    @property
    def __self__(self) -> Any:
        return self.module

    @property
    def __func__(self) -> Any:
        return getattr(self._stands_for(), "__func__", self._stands_for())

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {type(self.module).__name__}.forward>"


def outside_of_graphs(function: Any, reason: str) -> None:
    """Let dynamo neither inline ``function`` (a graph break with ``reason``) nor trace it or what it calls.

    That is what ``torch.compiler.disable`` does per call, at 0.6 µs; this says it once, about the code object.
    Compiled callables below set dynamo's state themselves and stay compiled.
    """
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = reason
    skip = getattr(getattr(_eval_frame, "_FrameAction", None), "SKIP", None)
    if skip is not None:
        _eval_frame.set_code_exec_strategy(function.__code__, _eval_frame._FrameExecStrategy(skip, skip))
