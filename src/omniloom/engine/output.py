"""What a request gives back."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from omniloom.errors import OmniloomError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL import Image


@dataclasses.dataclass
class Progress:
    """One progress event. ``phase``: "queued", "encode", "denoise", "decode" or "done"; ``step`` of ``total``."""

    request_id: str
    phase: str
    step: int = 0
    total: int = 0


@dataclasses.dataclass
class Output:
    """The result of one request; exactly one of ``images``, ``frames``, ``latents``, ``audio`` is set, or ``error``.

    images: a list of PIL images (``output_type="pil"``), or an array [n, h, w, 3] in 0..1 ("np"), or a tensor
    [n, 3, h, w] in 0..1 ("pt"). frames: the same for video, a list of frames per video. latents: the tensor that the
    pipeline would have decoded ("latent"). seeds: one per image or video. params: everything as it was resolved.
    metrics: ``seconds`` and ``peak_memory_bytes`` by phase ("encode", "denoise", "decode"), ``steps``,
    ``seconds_total``, ``seconds_queued``. warnings: things asked for that this model cannot heed.
    """

    request_id: str
    prompt: str | None = None
    images: list[Image.Image] | np.ndarray | torch.Tensor | None = None
    frames: list[list[Image.Image]] | np.ndarray | torch.Tensor | None = None
    latents: torch.Tensor | None = None
    audio: Any | None = None
    seeds: list[int] = dataclasses.field(default_factory=list)
    metrics: dict[str, Any] = dataclasses.field(default_factory=dict)
    params: dict[str, Any] = dataclasses.field(default_factory=dict)
    warnings: list[str] = dataclasses.field(default_factory=list)
    error: OmniloomError | None = None

    @property
    def ok(self) -> bool:
        """Whether the request succeeded."""
        return self.error is None

    def __repr__(self) -> str:
        what = f"error={self.error!r}" if self.error else self._content()
        return f"Output({self.request_id!r}, {what}, seeds={self.seeds})"

    def _content(self) -> str:
        for name in ("images", "frames", "latents", "audio"):
            value = getattr(self, name)
            if value is not None:
                return f"{name}={len(value)}"
        return "empty"
