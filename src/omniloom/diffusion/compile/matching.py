"""Which modules of a model are its repeated blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

WRAPPED = ("_fsdp_wrapped_module", "module", "_orig_mod")


@dataclasses.dataclass(frozen=True)
class Match:
    """One logical block. ``label``: the class it is counted under."""

    path: str
    module: Any
    label: str


def class_names(model: Any) -> tuple[str, ...]:
    """Return the model's ``_repeated_blocks``."""
    names = getattr(model, "_repeated_blocks", None) or ()
    return (names,) if isinstance(names, str) else tuple(names)


def list_names(model: Any) -> tuple[str, ...]:
    """Return the names of the lists that hold blocks, whatever their class.

    ``_regional_compile_blocks_attrs`` wins over ``_layerwise_offload_blocks_attrs``, also when it is empty.
    """
    names = getattr(model, "_regional_compile_blocks_attrs", None)
    if names is None:
        names = getattr(model, "_layerwise_offload_blocks_attrs", None) or ()
    return (names,) if isinstance(names, str) else tuple(names)


def find_blocks(model: Any) -> list[Match]:
    """Return each logical block once, in the order of the modules.

    Of a wrapper around a listed class the block inside is taken, so that the wrapper's code stays outside of graphs; of
    listed classes inside of each other the outer one.
    """
    names, lists = class_names(model), list_names(model)
    found: dict[int, Match] = {}
    taken: list[str] = []
    for path, module in model.named_modules():
        if any(path == other or not other or path.startswith(other + ".") for other in taken):
            continue
        inner = _wrapped(module, names)
        if type(module).__name__ in names:
            match = Match(path, module, type(module).__name__)
        elif inner is not None:
            # Normally it comes up by itself, as a submodule; not to take the wrapper is what matters here.
            found.setdefault(id(inner), Match(path, inner, type(inner).__name__))
            continue
        elif _in_list(path, lists):
            match = Match(path, module, type(module).__name__)
        else:
            continue
        taken.append(path)
        found.setdefault(id(match.module), match)
    return list(found.values())


def _wrapped(module: Any, names: Collection[str]) -> Any | None:
    for attribute in WRAPPED:
        inner = getattr(module, attribute, None)
        if inner is not None and type(inner).__name__ in names:
            return inner
    return None


def _in_list(path: str, lists: Collection[str]) -> bool:
    parent, _, last = path.rpartition(".")
    return last.isdigit() and any(parent == name or parent.endswith("." + name) for name in lists)
