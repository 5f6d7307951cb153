"""What a quantized Linear's kernel made of its fields. Copies, files and moves see the fields nevertheless."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from omniloom.quantization.codecs.base import Fields, Shape
from omniloom.quantization.fields import FieldModule
from omniloom.quantization.kernels.activation import current_activation
from omniloom.quantization.kernels.base import Kernel, Prepared, device_facts
from omniloom.quantization.kernels.handles import new_handle
from omniloom.quantization.kernels.registry import choose_kernel, fitting, get_kernel, measure_kernel
from omniloom.quantization.scheme import Activation, LayerScheme

HANDLE = "_handle"
_preparing = threading.RLock()  # packing is rare and slow; readers of a layer's fields wait for it


class MatrixView:
    """A quantized matrix outside of a module, for a kernel."""

    def __init__(
        self,
        scheme: LayerScheme,
        shape: Shape,
        fields: Fields,
        bias: torch.Tensor | None = None,
        input_scale: torch.Tensor | None = None,
    ) -> None:
        self.scheme = scheme
        self.shape = shape
        self.fields = fields
        self.bias = bias
        self.input_scale = input_scale
        self.prepared: Prepared | None = None


class KernelModule(FieldModule):
    """A module with the fields of one matrix, its kernel, and the operand that the kernel prepared.

    ``streamed``: the module is moved from tier to tier while it is used, so kernels that repack it are left out.
    """

    scheme: LayerScheme
    bias: Any  # nn.Linear's Parameter or None
    input_scale: torch.Tensor | None
    streamed: bool
    _choice: dict[tuple[Activation, str], tuple[Kernel, Activation]]
    _prepared: tuple[Kernel, Prepared] | None

    def start(self) -> None:
        """Give the module a handle and no kernel yet."""
        self.streamed = False
        self._choice = {}
        self._prepared = None
        self.register_buffer(HANDLE, new_handle(self), persistent=False)

    @property
    def shape(self) -> Shape:
        """(N, K)."""
        raise NotImplementedError

    @property
    def fields(self) -> Fields:
        """The stored tensors by name; those that a packed operand replaces are recovered, bit for bit."""
        buffers = self._buffers
        names = self.scheme.codec.specs(self.shape)
        found = {name: tensor for name in names if (tensor := buffers[name]) is not None}
        if len(found) == len(names):
            return found
        with _preparing:
            recovered = self._recovered()
            return {name: recovered[name] if name in recovered else buffers[name] for name in names}  # type: ignore[misc]

    def kernel_for(self, x: torch.Tensor) -> tuple[Kernel, Activation]:
        """Return the kernel for a call with ``x``, and the activation format it is to use.

        Raises ``EngineError`` if that depends on the denoising step and none is published.
        """
        wished = current_activation(self.scheme)
        key = (wished, x.device.type)
        if key not in self._choice:
            facts = device_facts(x.device)
            self._choice[key] = choose_kernel(self.scheme, wished, facts, self.shape, streamed=self.streamed)
        return self._choice[key]

    @property
    def prepared(self) -> Prepared | None:
        """The operand that the kernel made of the fields."""
        found = self._prepared
        return None if found is None else found[1]

    def prepare_kernel(self, *, measure_rows: int | None = None, name: str | None = None) -> str:
        """Choose the kernel and let it make its operand now; return its name.

        ``measure_rows``: take the fastest on so many tokens instead of the first that fits. ``name``: take this one.
        """
        with _preparing:
            wished = self.scheme.activation
            facts = device_facts(self.device)
            if name is not None or measure_rows is not None:
                self.release_kernel()
            key = (wished, self.device.type)
            if key not in self._choice:
                kernel, real = choose_kernel(self.scheme, wished, facts, self.shape, streamed=self.streamed)
                if name is not None:
                    kernel = get_kernel(name)
                elif measure_rows is not None:
                    kernel = self._fastest(real, measure_rows)
                self._choice[key] = (kernel, real)
            kernel, _ = self._choice[key]
            if kernel.needs_preparation and self._prepared is None and not self.missing_fields:
                prepared = kernel.prepare(self.fields, self.scheme, self.shape)
                self._prepared = (kernel, prepared)
                for field in prepared.replaces:
                    self._buffers[field] = None
            return kernel.name

    def _fastest(self, activation: Activation, rows: int) -> Kernel:
        facts = device_facts(self.device)
        scheme = LayerScheme(self.scheme.codec, activation)
        candidates = []
        for kernel in fitting(scheme, facts, self.shape, self.streamed):
            view = MatrixView(scheme, self.shape, self.fields, self.bias, self.input_scale)
            if kernel.needs_preparation:
                view.prepared = kernel.prepare(view.fields, scheme, self.shape)
            candidates.append((kernel, view))
        return measure_kernel(candidates, activation, rows, facts)

    def release_kernel(self) -> None:
        """Forget the kernel and its operand; the fields are back as they were."""
        with _preparing:
            for name, tensor in self._recovered().items():
                self._buffers[name] = tensor
            self._prepared = None
            self._choice = {}

    def _recovered(self) -> Fields:
        found = self._prepared
        return {} if found is None else found[0].recover(found[1])

    def nbytes(self) -> int:
        """Return the bytes of fields, scales, bias and a prepared operand."""
        prepared = self.prepared
        return super().nbytes() + (0 if prepared is None else prepared.nbytes)

    def _fixed(self) -> frozenset[str]:
        return frozenset((HANDLE,))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        self.release_kernel()
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        with _preparing:
            for name, tensor in self._recovered().items():
                destination[prefix + name] = tensor

    def _load_from_state_dict(self, *args: Any) -> None:
        self.release_kernel()
        super()._load_from_state_dict(*args)

    def __getstate__(self) -> dict[str, Any]:
        with _preparing:
            state = super().__getstate__()
            state["_buffers"] = {**state["_buffers"], **self._recovered()}  # int8 codes only
        state["_buffers"].pop(HANDLE, None)
        state["_prepared"], state["_choice"] = None, {}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.register_buffer(HANDLE, new_handle(self), persistent=False)


def prepare_kernels(model: nn.Module, *, measure_rows: int | None = None) -> dict[str, int]:
    """Choose and prepare the kernel of every quantized Linear; return how many layers each kernel has."""
    counts: dict[str, int] = {}
    for module in model.modules():
        if isinstance(module, KernelModule):
            name = module.prepare_kernel(measure_rows=measure_rows)
            counts[name] = counts.get(name, 0) + 1
    return counts


def release_kernels(model: nn.Module) -> None:
    """Give every quantized Linear its fields back, as before ``prepare_kernels``."""
    for module in model.modules():
        if isinstance(module, KernelModule):
            module.release_kernel()


def set_streamed(model: nn.Module, streamed: bool = True) -> None:
    """Say whether layers are moved from tier to tier while in use: kernels that repack them are then left out."""
    for module in model.modules():
        if isinstance(module, KernelModule) and module.streamed != streamed:
            module.release_kernel()
            module.streamed = streamed
