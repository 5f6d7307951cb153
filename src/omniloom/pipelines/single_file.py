"""A dense single-file transformer (original or ComfyUI naming) for a base folder, through diffusers' own conversion."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from omniloom.checkpoint import TensorSource, single_file
from omniloom.errors import CheckpointError, ModelError, shorten
from omniloom.pipelines.construct import empty_diffusers_model
from omniloom.pipelines.index import PipelineIndex

_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "transformer.")


@dataclasses.dataclass(frozen=True)
class _Info:
    shape: tuple[int, ...]
    nbytes: int
    torch_dtype: torch.dtype

    @property
    def dtype(self) -> str:
        return str(self.torch_dtype).removeprefix("torch.")


class TensorDict:
    """A tensor source over tensors that exist already, with the interface of ``TensorSource``."""

    def __init__(self, tensors: dict[str, torch.Tensor], file: str) -> None:
        self._tensors = tensors
        self.file = file

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def names(self) -> list[str]:
        """Return all names."""
        return list(self._tensors)

    def info(self, name: str) -> _Info:
        """Return shape, bytes and dtype of one tensor."""
        tensor = self._tensors[name]
        return _Info(tuple(tensor.shape), tensor.nbytes, tensor.dtype)

    def read(
        self, name: str, *, dtype: torch.dtype | None = None, device: Any = "cpu", prefer: str = "map"
    ) -> torch.Tensor:
        """Return one tensor, floating point ones in ``dtype``."""
        tensor = self._tensors[name]
        return tensor.to(
            device, dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        ).contiguous()

    def load_many(
        self,
        names: Iterable[str],
        *,
        dtype_of: Callable[[str], torch.dtype | None] | None = None,
        device: Any = "cpu",
        progress: Callable[[int], None] | None = None,
        prefer: str = "map",
        in_flight: int = 0,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors one by one and let go of each; nothing is read ahead."""
        for name in names:
            size = self._tensors[name].nbytes
            tensor = self.read(name, dtype=dtype_of(name) if dtype_of else None, device=device)
            del self._tensors[name]
            yield name, tensor
            if progress:
                progress(size)


def transformer_source(path: Path, index: PipelineIndex, component: str = "transformer") -> TensorDict:
    """Return the tensors of a single-file checkpoint under the names of the base folder's transformer.

    The tensors are mapped, not copied, but for the few that the conversion has to join. Raises ``CheckpointError``
    if keys are left over, ``ModelError`` if diffusers has no conversion for the class.
    """
    from diffusers.loaders import single_file_model as single

    spec = next((s for s in index.components if s.name == component), None)
    if spec is None:
        raise ModelError(f"the base folder {index.folder} has no component {component!r} that {path} could stand for")
    cls: Any = spec.resolve()
    source = TensorSource(single_file(path))
    try:
        tensors = {name: source.map(name) for name in source.names()}
    finally:
        source.close()
    tensors = _under_prefix(tensors)
    config = cls.load_config(str(spec.folder))
    expected = empty_diffusers_model(cls, dict(config), torch.float32).state_dict()
    if 2 * len(set(expected) & set(tensors)) > len(
        tensors
    ):  # diffusers' own names; fill() tells what is wrong with them
        return TensorDict(tensors, str(path))
    mapped = single._get_single_file_loadable_mapping_class(cls)
    if mapped is None:
        raise ModelError(
            f"{path} does not have the names of a {cls.__name__} and diffusers has no conversion for that class"
        )
    convert = single.SINGLE_FILE_LOADABLE_CLASSES[mapped]["checkpoint_mapping_fn"]
    before = len(tensors)
    try:
        converted = convert(checkpoint=tensors, config=dict(config))
    except (KeyError, IndexError, AttributeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path} cannot be read as a {cls.__name__}: {type(error).__name__}: {reason}") from error
    left = [] if converted is tensors or len(tensors) == before else sorted(tensors)
    if left:
        raise CheckpointError(f"{path}: keys that a {cls.__name__} does not have: {shorten(left)}")
    return TensorDict(dict(converted), str(path))


def _under_prefix(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Keep what is under the transformer's prefix, if the file has one (all-in-one files hold encoders and VAE too)."""
    for prefix in _PREFIXES:
        if any(name.startswith(prefix) for name in tensors):
            return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    return tensors
