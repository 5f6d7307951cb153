r"""How an entry of a list of layers matches a layer: the rule depends on who writes such lists.

    vllm                the full path, a run of whole path components, ``re:`` + regular expression, or a glob
    hf                  the module's last name, the full path, or ``entry.`` anywhere in it (diffusers, transformers)
    modelopt            a wildcard over the whole path; without one, the path or anything below it
    compressed-tensors  the full path, ``re:`` + regular expression, or the class's name
    substring           any part of the path (SVDQuant)

Regular expressions match from the start of the path. A layer has several names: its path, the path with the component
in front, the names its checkpoint has for it, and those of runtimes that fuse or rename layers.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from omniloom.errors import ConfigError, shorten
from omniloom.quantization.methods.base import IgnoreList

Test = Callable[[Sequence[str], str], bool]
_WILD = re.compile(r"[*?\[]")
# Layers that are one matrix in some models and runtimes, and several in others: last component -> those of the parts.
SHARDS = {
    "to_qkv": ("to_q", "to_k", "to_v"),
    "add_kv_proj": ("add_q_proj", "add_k_proj", "add_v_proj"),
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13": ("w1", "w3"),
}
FUSED = {part: whole for whole, parts in SHARDS.items() for part in parts}
_RENAMES = ((r"\.to_out\.0$", ".to_out"), (r"\.net\.0\.proj$", ".net_0.proj"), (r"\.net\.2$", ".net_2"))


def layer_names(path: str, component: str = "", source: Iterable[str] = ()) -> tuple[str, ...]:
    """Return all names of the layer at ``path``. ``source``: what its checkpoint calls it."""
    names = [path, *source]
    for name in tuple(names):
        head, _, last = name.rpartition(".")
        if last in FUSED:
            names.append(f"{head}.{FUSED[last]}" if head else FUSED[last])
        for pattern, replacement in _RENAMES:
            if re.search(pattern, name):
                names.append(re.sub(pattern, replacement, name))
    if component:
        names += [f"{component}.{name}" for name in tuple(names)]
    return tuple(dict.fromkeys(names))


class Matcher:
    """Compiled ignore lists that remember which of their entries matched. Raises ``ConfigError`` for a bad regex."""

    def __init__(self, lists: Iterable[IgnoreList]) -> None:
        self._tests = [(part.key, entry, _test(part, entry)) for part in lists for entry in part.entries]
        self._used: set[tuple[str, str]] = set()

    def find(self, names: Sequence[str], class_name: str = "Linear") -> tuple[str, str] | None:
        """Return (key, entry) of the first entry that matches the layer with these names; mark all that do."""
        hits = [(key, entry) for key, entry, test in self._tests if test(names, class_name)]
        self._used.update(hits)
        return hits[0] if hits else None

    def unmatched(self) -> tuple[str, ...]:
        """Return the entries that have matched nothing so far, as ``key: entry``."""
        rest = [(key, entry) for key, entry, _ in self._tests if (key, entry) not in self._used]
        return tuple(dict.fromkeys(f"{key}: {entry}" for key, entry in rest))


def matches(style: str, entry: str, names: Sequence[str], class_name: str = "Linear") -> bool:
    """Whether one entry of a list matches. Raises ``ConfigError`` for a bad regex or an unknown ``style``."""
    return _test(IgnoreList("entry", style, (entry,)), entry)(names, class_name)


def check_shards(layer: str, ignored: Mapping[str, bool]) -> bool:
    """Return whether a fused layer is ignored. ``ignored``: the name of each shard, and whether a list names it.

    Raises ``ConfigError`` if only some are: one matrix cannot be half quantized.
    """
    if len(set(ignored.values())) > 1:
        yes = [name for name, value in ignored.items() if value]
        no = [name for name, value in ignored.items() if not value]
        raise ConfigError(
            f"layer {layer} is one matrix of {len(ignored)} parts, of which only some are to be ignored: "
            f"{shorten(yes)} but not {shorten(no)}; list all of them or none"
        )
    return any(ignored.values())


def unmatched_everywhere(parts: Iterable[tuple[Iterable[IgnoreList], Sequence[str]]]) -> tuple[str, ...]:
    """Return the entries that matched nothing in any component that has them.

    ``parts``: each component's lists and what its ``Matcher.unmatched`` said.
    """
    found: dict[str, bool] = {}
    for lists, unmatched in parts:
        for entry in (f"{part.key}: {entry}" for part in lists for entry in part.entries):
            found[entry] = found.get(entry, False) or entry not in unmatched
    return tuple(entry for entry, matched in found.items() if not matched)


def _test(part: IgnoreList, entry: str) -> Test:
    if part.style == "hf":
        return lambda names, _: any(n == entry or n.rpartition(".")[2] == entry or f"{entry}." in n for n in names)
    if part.style == "substring":
        return lambda names, _: any(entry in name for name in names)
    if part.style == "modelopt":
        if _WILD.search(entry):
            return _glob(entry)
        return lambda names, _: any(name == entry or name.startswith(entry + ".") for name in names)
    if part.style not in ("vllm", "compressed-tensors"):
        raise ConfigError(f"{part.key}: no matching rule {part.style!r}")
    if entry.startswith("re:"):
        return _regex(part.key, entry)
    if part.style == "compressed-tensors":
        return lambda names, class_name: entry in names or entry == class_name
    if _WILD.search(entry):
        return _glob(entry)
    return lambda names, _: any(f".{entry}." in f".{name}." for name in names)


def _glob(entry: str) -> Test:
    pattern = re.compile(fnmatch.translate(entry))
    return lambda names, _: any(pattern.match(name) for name in names)


def _regex(key: str, entry: str) -> Test:
    try:
        pattern = re.compile(entry.removeprefix("re:"))
    except re.error as error:
        raise ConfigError(f"{key}: {entry!r} is not a regular expression: {error}") from error
    return lambda names, _: any(pattern.match(name) for name in names)
