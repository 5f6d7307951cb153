"""The one exception tree.

    OmniloomError                 everything we raise on purpose
    ├── UserError                 the caller can mend it: one clear line
    │   ├── ConfigError           an option: unknown, of the wrong type, out of range     exit 2
    │   ├── RequestError          a prompt or a sampling parameter                        exit 2
    │   └── ModelError            a model: not found, foreign, unsupported                exit 3
    │       └── CheckpointError   a file: truncated, a key missing, a shape that differs  exit 3
    ├── MemoryLimitError          it does not fit                                         exit 4
    ├── Cancelled                 the caller asked the request to stop                    exit 5
    └── EngineError               a failure while running, with its cause chained         exit 5
        └── QueueFullError        no more requests may wait: try again later              exit 5

A message says what was given, what is allowed and what to type. The command line prints it as one line;
a traceback is for our own bugs (anything that is not an ``OmniloomError``).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class OmniloomError(Exception):
    """Base of every exception that omniloom raises on purpose."""

    exit_code = 5


class UserError(OmniloomError):
    """The input is wrong and the caller can mend it."""

    exit_code = 2


class ConfigError(UserError):
    """An option is unknown, of the wrong type, out of range or contradicts another one."""


class RequestError(UserError):
    """A prompt or a sampling parameter cannot be used with this model."""


class ModelError(UserError):
    """A model folder or file is missing, foreign or of a kind that is not supported."""

    exit_code = 3


class CheckpointError(ModelError):
    """A checkpoint file is damaged or does not fit the model it is meant for."""


class MemoryLimitError(OmniloomError):
    """The work does not fit into the memory that is there."""

    exit_code = 4


class Cancelled(OmniloomError):
    """The request was cancelled by its caller."""


class EngineError(OmniloomError):
    """A request failed while it ran; ``__cause__`` holds the original exception."""


class QueueFullError(EngineError):
    """As many requests wait as may: try again later."""


def suggest(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the known word nearest to ``word``, or an empty string."""
    spelled = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), spelled, n=1, cutoff=0.6)
    return f"; did you mean {spelled[close[0]]!r}?" if close else ""


def shorten(names: Iterable[str], limit: int = 10) -> str:
    """Join up to ``limit`` names for a message and say how many there are in all."""
    names = list(names)
    text = ", ".join(names[:limit])
    return text if len(names) <= limit else f"{text}, … ({len(names)} in all)"
