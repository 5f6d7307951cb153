"""What really happened, machine-readable: ``omni.report.to_dict()``.

Features add their own part under their own key (``report.add("compile", {...})``); values are plain JSON types.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from omniloom.config import to_plain


@dataclasses.dataclass(frozen=True)
class ComponentReport:
    """One component. ``parameters``: elements; ``bytes``: of parameters and buffers, shared storages counted once.

    ``dtype``: the storage dtype of most bytes; ``dtypes``: bytes by dtype. Components without weights have the class,
    ``load_seconds`` and ``call_state`` only. ``call_state``: "copy", "exclusive" or "concurrent". ``quantization``: of
    a quantized component, its method, layers, codecs, kernels and bytes before and after; put beside the other keys.
    """

    class_name: str
    parameters: int = 0
    bytes: int = 0
    dtype: str | None = None
    dtypes: dict[str, int] = dataclasses.field(default_factory=dict)
    device: str | None = None
    load_seconds: float | None = None
    call_state: str | None = None
    quantization: dict[str, Any] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types; the class is under ``class``."""
        plain = to_plain(self)
        quantization = plain.pop("quantization")
        return {"class": plain.pop("class_name"), **plain, **quantization}


class Report:
    """The report of one loaded model; parts are added as things happen."""

    def __init__(self, **parts: Any) -> None:
        self._parts: dict[str, Any] = dict(parts)

    def add(self, key: str, value: Any) -> None:
        """Add or replace the part ``key``; a function is called whenever the report is read."""
        self._parts[key] = value

    def freeze(self) -> None:
        """Call what is a function for the last time: what it looks at is about to go."""
        self._parts = {key: value() if callable(value) else value for key, value in self._parts.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON types."""
        return {key: _plain(value) for key, value in self._parts.items()}


def component_report(
    value: Any, load_seconds: float | None, call_state: str | None, quantization: dict[str, Any] | None = None
) -> ComponentReport:
    """Measure one component that is loaded.

    ``quantization``: what its own report says; ``prepared_bytes`` (of operands that kernels made, by which the bytes
    grow) and ``matrix_elements`` (of matrices that are stored as codes) are taken into the figures.
    """
    name = type(value).__name__
    more = dict(quantization or {})
    prepared, matrices = more.pop("prepared_bytes", 0), more.pop("matrix_elements", 0)
    if not hasattr(value, "parameters"):
        return ComponentReport(name, load_seconds=load_seconds, call_state=call_state)
    parameters = list(value.parameters())
    by_dtype: dict[str, int] = {}
    seen: set[int] = set()
    for tensor in [*parameters, *value.buffers()]:
        storage = tensor.untyped_storage().data_ptr() if tensor.numel() else id(tensor)
        if storage in seen and storage:
            continue
        seen.add(storage)
        key = str(tensor.dtype).removeprefix("torch.")
        by_dtype[key] = by_dtype.get(key, 0) + tensor.nbytes
    if prepared:
        by_dtype["packed"] = prepared
    total = sum(by_dtype.values())
    if more:
        more["bytes_after"] = total
    return ComponentReport(
        name,
        parameters=sum(p.numel() for p in parameters) + matrices,
        bytes=total,
        dtype=max(by_dtype, key=by_dtype.__getitem__) if by_dtype else None,
        dtypes=by_dtype,
        device=str(parameters[0].device) if parameters else None,
        load_seconds=load_seconds,
        call_state=call_state,
        quantization=more,
    )


def _plain(value: Any) -> Any:
    if callable(value):
        value = value()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.to_dict() if hasattr(value, "to_dict") else to_plain(value)
