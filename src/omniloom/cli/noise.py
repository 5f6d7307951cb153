"""Keeping what libraries print away from the results."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator

# They speak when they are merely imported, which transformers and diffusers do wherever they are installed.
_CHATTY = ("bitsandbytes", "torchao", "torch.utils._pytree")


@contextlib.contextmanager
def hushed(debug: bool) -> Iterator[None]:
    """Send prints to stderr, and without ``debug`` silence the libraries' bars, log lines and warnings.

    These are settings of the whole process, which is why only the command line makes them. Must be entered before
    transformers and diffusers are imported, whose loggers read the environment.
    """
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        if not debug:
            warnings.simplefilter("ignore")
            for name in _CHATTY:
                logging.getLogger(name).setLevel(logging.ERROR)
            for name in ("TRANSFORMERS_VERBOSITY", "DIFFUSERS_VERBOSITY"):
                os.environ.setdefault(name, "error")
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        yield
