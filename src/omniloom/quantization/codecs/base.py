"""What a codec is: one storage format of a weight matrix, with exact reference arithmetic in torch."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import TypeVar

import torch

from omniloom.errors import ConfigError, suggest

Fields = dict[str, torch.Tensor]
Shape = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class FieldSpec:
    """Shape and dtype of one stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class Codec(abc.ABC):
    """A storage format: named field tensors ⇄ a dense matrix. Subclasses are frozen dataclasses, so codecs are values.

    A matrix is ``(N, K)`` = (out_features, in_features) of any floating dtype; groups run along K. The same codec also
    describes a dynamic activation: rows are then tokens. ``encode`` and ``decode`` compute in float32, work on every
    device, and trace under ``torch.compile`` without graph breaks.
    """

    name: str  # registered name, for instance "fp8_channel"
    bits: float  # nominal bits of one code, without scales

    @abc.abstractmethod
    def specs(self, shape: Shape) -> dict[str, FieldSpec]:
        """Return the stored tensors of an ``(N, K)`` matrix, in the order they are stored."""

    @abc.abstractmethod
    def encode(self, weight: torch.Tensor) -> Fields:
        """Return the fields of ``weight`` (N, K), on its device. Finite input gives finite fields."""

    @abc.abstractmethod
    def decode(self, fields: Fields, shape: Shape, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the dense (N, K) matrix: computed in float32, rounded once to ``dtype``."""

    def problem(self, shape: Shape) -> str | None:
        """Say why a matrix of this shape cannot be stored exactly as the format defines it; ``None`` if it can."""
        return None

    def nbytes(self, shape: Shape) -> int:
        """Bytes of all fields."""
        return sum(spec.nbytes for spec in self.specs(shape).values())


_CODECS: dict[str, Callable[..., Codec]] = {}
_C = TypeVar("_C", bound=Callable[..., Codec])


def register_codec(name: str) -> Callable[[_C], _C]:
    """Register a codec class, or a function that makes one, under ``name``."""

    def add(make: _C) -> _C:
        if name in _CODECS:
            raise ValueError(f"codec {name!r} is registered already")
        _CODECS[name] = make
        return make

    return add


def get_codec(name: str, **parameters: object) -> Codec:
    """Return the codec ``name`` with ``parameters``. Raises ``ConfigError`` for an unknown name."""
    if name not in _CODECS:
        raise ConfigError(f"unknown codec {name!r}{suggest(name, _CODECS)} (known: {', '.join(sorted(_CODECS))})")
    return _CODECS[name](**parameters)


def codec_names() -> list[str]:
    """Return the registered names, sorted."""
    return sorted(_CODECS)
