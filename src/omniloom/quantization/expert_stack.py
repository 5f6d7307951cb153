"""A stack of quantized expert weights, and the stand-in for one of them that a module multiplies with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from omniloom.errors import ConfigError
from omniloom.quantization.codecs.base import Fields, FieldSpec, Shape
from omniloom.quantization.fields import FieldModule, check_field
from omniloom.quantization.kernels.activation import current_activation
from omniloom.quantization.kernels.base import Kernel, Prepared, device_facts
from omniloom.quantization.kernels.reference import product_dtype
from omniloom.quantization.kernels.registry import REFERENCE, choose_kernel
from omniloom.quantization.scheme import Activation, LayerScheme


class ExpertStack(FieldModule):
    """The weights of E experts: the codec's fields with a leading dimension E. Stands where the Parameter stood.

    ``transposed``: the module multiplies by (K, N) matrices instead of (N, K); fields are of (N, K) always.
    It answers ``shape``, ``dtype``, ``device``, ``size()``, ``dim()`` as the Parameter did; ``stack[e]`` is a stand-in.
    """

    def __init__(
        self,
        experts: int,
        shape: Shape,
        scheme: LayerScheme,
        fields: Mapping[str, torch.Tensor] | None = None,
        *,
        compute_dtype: torch.dtype = torch.float32,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        self.experts = experts
        self.matrix = shape
        self.scheme = scheme
        self.compute_dtype = compute_dtype
        self.transposed = transposed
        problem = scheme.codec.problem(shape)
        if problem:
            raise ConfigError(f"{scheme.codec.name} cannot hold a {shape} matrix: {problem}")
        self.register_fields(fields, repr(self))

    @classmethod
    def from_dense(
        cls,
        stack: torch.Tensor,
        scheme: LayerScheme,
        *,
        transposed: bool = False,
        compute_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> ExpertStack:
        """Quantize a stack (E, N, K), or (E, K, N) if ``transposed``, one expert at a time."""
        stack = stack.detach()
        rows, columns = (stack.shape[2], stack.shape[1]) if transposed else (stack.shape[1], stack.shape[2])
        target = torch.device(device) if device is not None else stack.device
        specs = scheme.codec.specs((rows, columns))
        fields = {
            name: torch.empty((stack.shape[0], *spec.shape), dtype=spec.dtype, device=target)
            for name, spec in specs.items()
        }
        for index in range(stack.shape[0]):
            dense = stack[index].to(target)
            encoded = scheme.codec.encode(dense.t().contiguous() if transposed else dense)
            for name, tensor in encoded.items():
                fields[name][index] = tensor
        dtype = compute_dtype or stack.dtype
        return cls(stack.shape[0], (rows, columns), scheme, fields, compute_dtype=dtype, transposed=transposed)

    def field_specs(self) -> dict[str, FieldSpec]:
        """Return the codec's fields with the number of experts in front."""
        specs = self.scheme.codec.specs(self.matrix)
        return {name: FieldSpec((self.experts, *spec.shape), spec.dtype) for name, spec in specs.items()}

    def set_field(self, name: str, tensor: torch.Tensor) -> None:
        """Set one field of all experts; the tensor is kept. Raises ``CheckpointError`` if it does not fit."""
        specs = self.field_specs()
        if name not in specs:
            raise ConfigError(f"{self!r} has no field {name!r} (it has {', '.join(specs)})")
        check_field(repr(self), name, tensor, specs[name])
        self._buffers[name] = tensor.detach()

    def set_fields(self, fields: Mapping[str, torch.Tensor]) -> None:
        """Set several."""
        for name, tensor in fields.items():
            self.set_field(name, tensor)

    @property
    def fields(self) -> Fields:
        """The stored tensors by name, those of all experts together."""
        return {name: self._buffers[name] for name in self.field_specs()}  # type: ignore[misc]

    @property
    def shape(self) -> torch.Size:
        """As the Parameter's: (E, N, K), or (E, K, N) if transposed."""
        rows, columns = self.matrix
        return torch.Size((self.experts, columns, rows) if self.transposed else (self.experts, rows, columns))

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return self.compute_dtype

    def size(self, dim: int | None = None) -> Any:
        """As a tensor's."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """3."""
        return 3

    def __getitem__(self, index: int | torch.Tensor) -> ExpertWeight:
        return ExpertWeight(self, int(index))

    def dense_weight(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the whole stack as the Parameter was."""
        return torch.stack([self[index].dense(dtype) for index in range(self.experts)])

    def extra_repr(self) -> str:
        return f"experts={self.experts}, shape={self.matrix}, codec={self.scheme.codec.name}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"


class ExpertWeight:
    """One expert's weight: ``F.linear(x, weight)`` and ``x @ weight`` run quantized, anything else decodes it."""

    prepared: Prepared | None = None
    bias: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None

    def __init__(self, stack: ExpertStack, index: int) -> None:
        self.stack = stack
        self.index = index
        self.scheme = stack.scheme
        self.dtype = stack.dtype
        self.device = stack.device

    @property
    def shape(self) -> Shape:
        """(N, K), whatever way round the module multiplies."""
        return self.stack.matrix

    @property
    def fields(self) -> Fields:
        """The expert's part of every field."""
        buffers = self.stack._buffers
        return {name: buffers[name][self.index] for name in self.stack.field_specs()}  # type: ignore[index]

    def dense(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the decoded matrix the way round that the module has it."""
        matrix = self.scheme.codec.decode(self.fields, self.shape, dtype or self.dtype)
        return matrix.t() if self.stack.transposed else matrix

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return x (M, K) times the expert's matrix: (M, N)."""
        wished = current_activation(self.scheme)
        kernel, activation = _kernel(self.scheme, wished, x.device, self.shape)
        if activation.codec is not None:
            return kernel(x, self, activation)
        dtype = product_dtype(x, activation)
        return F.linear(x.to(dtype), self.scheme.codec.decode(self.fields, self.shape, dtype)).to(x.dtype)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if len(args) >= 2 and isinstance(args[1], ExpertWeight) and isinstance(args[0], torch.Tensor):
            x, weight = args[0], args[1]
            if func is F.linear and not weight.stack.transposed:
                bias = args[2] if len(args) > 2 else kwargs.get("bias")
                y = weight.product(x)
                return y if bias is None else y + bias
            if func in (torch.Tensor.__matmul__, torch.Tensor.matmul, torch.matmul, torch.mm) and (
                weight.stack.transposed and not kwargs
            ):
                return weight.product(x)
        dense = [arg.dense() if isinstance(arg, ExpertWeight) else arg for arg in args]
        return func(*dense, **{k: v.dense() if isinstance(v, ExpertWeight) else v for k, v in kwargs.items()})


@functools.lru_cache(maxsize=256)
def _kernel(
    scheme: LayerScheme, activation: Activation, device: torch.device, shape: Shape
) -> tuple[Kernel, Activation]:
    kernel, real = choose_kernel(scheme, activation, device_facts(device), shape, streamed=True)
    return (kernel if kernel.native else REFERENCE), real
