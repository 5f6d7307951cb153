"""What is quantized in a file, from its tensors' names, types and shapes alone. No torch, no tensor is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from omniloom.quantization.layouts.names import RECORD, known_suffixes, stored_name

# what proves, beside a parameter, that it holds codes
_PROOFS = ("_scale", "_scale_inv", ".absmax", ".absmax_codes", ".row_absmax")
_ROWMAX = ">SCB"


class Header(Protocol):
    """One tensor as a file's header has it; ``dtype`` is the format's code ("F8_E4M3")."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class StoredQuantization:
    """``layers``: matrices or stacks of them that are stored as codes; ``bytes``: of codes and scales together.

    ``codecs``: how many layers there are in each format; "other" for one that omniloom does not write itself.
    """

    layers: int
    codecs: dict[str, int]
    bytes: int


def stored_quantization(tensors: Mapping[str, Header]) -> StoredQuantization | None:
    """Count what is quantized among the tensors of a component; ``None`` if nothing is."""
    codecs: dict[str, int] = {}
    total = 0
    for parameter in _parameters(tensors):
        beside = _beside(parameter, tensors)
        codec = _codec(tensors[parameter], beside)
        codecs[codec] = codecs.get(codec, 0) + 1
        total += tensors[parameter].nbytes + sum(found.nbytes for found in beside.values())
    if not codecs:
        return None
    return StoredQuantization(sum(codecs.values()), dict(sorted(codecs.items())), total)


def _parameters(tensors: Mapping[str, Any]) -> Iterable[str]:
    """Yield the parameters that have scales beside them, each once."""
    found: dict[str, None] = {}
    for name in tensors:
        above, _, last = name.rpartition(".")
        if last == _ROWMAX[1:]:
            found[f"{above}.weight"] = None
        for suffix in _PROOFS:
            if name.endswith(suffix):
                found[name.removesuffix(suffix)] = None
    return [parameter for parameter in found if parameter in tensors]


def _beside(parameter: str, tensors: Mapping[str, Header]) -> dict[str, Header]:
    weight = parameter.rpartition(".")[2] == "weight"
    suffixes = (suffix for suffix in known_suffixes() if weight or not suffix.startswith(">"))
    names = {suffix: stored_name(parameter, suffix) for suffix in suffixes}
    return {suffix: tensors[name] for suffix, name in names.items() if name in tensors}


def _codec(codes: Header, beside: Mapping[str, Header]) -> str:
    if _ROWMAX in beside or ".row_absmax" in beside:
        return "int8_rowmax"
    if ".absmax" in beside or ".absmax_codes" in beside:
        kinds = [suffix.removeprefix(RECORD) for suffix in beside if suffix.startswith(RECORD)]
        return f"bnb4 {kinds[0]}" if kinds else "bnb4"
    if "_scale_inv" in beside:
        return "fp8_block" if codes.dtype == "F8_E4M3" else "other"
    if "_scale" not in beside:
        return "other"
    scale = beside["_scale"]
    exponents = scale.dtype in ("U8", "F8_E8M0")
    if codes.dtype == "F8_E4M3" and not exponents:
        return "fp8_channel" if max(scale.shape, default=1) > 1 else "fp8_tensor"
    if codes.dtype == "F8_E4M3":
        return "mxfp8"
    if codes.dtype == "U8" and exponents:
        return "mxfp4_dual" if "_dual_scale" in beside else "mxfp4"
    return "int8_channel" if codes.dtype == "I8" else "other"
