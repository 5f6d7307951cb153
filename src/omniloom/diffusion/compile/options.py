"""The arguments of ``torch.compile`` for one block."""

from __future__ import annotations

from typing import Any

DEFAULTS = "_regional_compile_inductor_options"


def block_arguments(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments for one block, in dicts of its own (``torch.compile`` takes entries out of them).

    The model's ``_regional_compile_inductor_options`` are defaults of Inductor's ``options``; what the caller gives
    wins. Raises ``ValueError`` for a ``mode`` beside them, which torch does not combine with options ("default" says
    nothing and gives way), and ``TypeError`` for ``options`` that are neither dict nor ``None``.
    """
    arguments = dict(arguments)
    given = arguments.get("options")
    defaults = getattr(model, DEFAULTS, None)
    if defaults and arguments.get("backend") in (None, "inductor"):
        mode = arguments.get("mode")
        if mode not in (None, "default"):
            raise ValueError(
                f"{type(model).__name__} sets options for Inductor, which mode={mode!r} cannot be combined with; "
                f"leave mode out, or give what it stands for as options={{…}}"
            )
        if given is not None and not isinstance(given, dict):
            raise TypeError(f"the options of torch.compile are a dict or None, not {given!r}")
        if mode == "default":
            del arguments["mode"]
        given = {**defaults, **(given or {})}
    if isinstance(given, dict):
        arguments["options"] = dict(given)
    return arguments
