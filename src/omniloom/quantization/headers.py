"""What is quantized in a file, from its tensors' names, types and shapes alone. No torch, no tensor is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

# what follows a parameter's name where its codes have scales beside them; layouts/native.py writes these
_SCALES = ("_scale", "_scale_inv", ".absmax", ".absmax_codes", ".row_absmax")
_MORE = (
    "_dual_scale", ".nested_absmax", ".nested_map", ".nested_offset", ".nested_quant_map", ".quant_map", ".code_map",
    ".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4",
)  # fmt: skip
_ROWMAX, _FORMAT = "SCB", "weight_format"  # of LLM.int8, in the place of the parameter's last part
_BNB_KIND = ".quant_state.bitsandbytes__"


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


def suffixes() -> set[str]:
    """Return everything that is known to follow a parameter's name, ``>`` in front of what stands for its last part."""
    return {*_SCALES, *_MORE, ">" + _ROWMAX, ">" + _FORMAT}


def _parameters(tensors: Mapping[str, Any]) -> Iterable[str]:
    """Yield the parameters that have scales beside them, each once."""
    found: dict[str, None] = {}
    for name in tensors:
        above, _, last = name.rpartition(".")
        if last == _ROWMAX:
            found[f"{above}.weight"] = None
        for suffix in _SCALES:
            if name.endswith(suffix):
                found[name.removesuffix(suffix)] = None
    return [parameter for parameter in found if parameter in tensors]


def _beside(parameter: str, tensors: Mapping[str, Header]) -> dict[str, Header]:
    names = {suffix: parameter + suffix for suffix in (*_SCALES, *_MORE)}
    above, _, last = parameter.rpartition(".")
    if last == "weight":
        names |= {">" + part: f"{above}.{part}" for part in (_ROWMAX, _FORMAT)}
    return {suffix: tensors[name] for suffix, name in names.items() if name in tensors}


def _codec(codes: Header, beside: Mapping[str, Header]) -> str:
    if ">" + _ROWMAX in beside or ".row_absmax" in beside:
        return "int8_rowmax"
    if ".absmax" in beside or ".absmax_codes" in beside:
        kinds = [suffix.removeprefix(_BNB_KIND) for suffix in beside if suffix.startswith(_BNB_KIND)]
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
