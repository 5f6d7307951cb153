"""The quantized Linear: a codec's fields in the place of a weight, multiplied by whatever kernel the device has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import nn

from omniloom.errors import CheckpointError
from omniloom.quantization.codecs.base import FieldSpec, Shape
from omniloom.quantization.fields import check_field
from omniloom.quantization.kernels import handles as _handles  # noqa: F401  (registers the operator)
from omniloom.quantization.kernels.base import cpu_facts
from omniloom.quantization.kernels.reference import product_dtype
from omniloom.quantization.kernels.registry import choose_kernel
from omniloom.quantization.prepared import KernelModule, prepare_kernels, release_kernels, set_streamed
from omniloom.quantization.scheme import WEIGHT_ONLY, LayerScheme

__all__ = ["QuantizedLinear", "is_plain_linear", "prepare_kernels", "release_kernels", "set_streamed"]


def is_plain_linear(module: object) -> TypeGuard[nn.Linear]:
    """Whether a module computes, and is called, as ``nn.Linear`` is.

    That leaves out quantized ones, and the projection of torch's MultiheadAttention, of which only the weight is taken.
    """
    taken = isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward and not taken


class QuantizedLinear(KernelModule, nn.Linear):
    """An ``nn.Linear`` (out_features N, in_features K) whose weight is stored as the fields of ``scheme.codec``.

    ``fields``: one tensor per field, kept as they are, strides too; ``None`` makes meta tensors for ``set_field``.
    ``bias``: a Parameter (N), kept with its own dtype. ``input_scale``: float32 scalar of static activations.
    ``pre_scale`` (K): activations are multiplied by it; the stored weight is already divided by it.
    ``low_rank``: down (R, K) and up (N, R), added to the product; ``low_rank_scaled`` says whether it sees the
    activation after ``pre_scale``.

    ``weight`` only describes the matrix to code that asks for its shape, dtype or device; ``dense_weight`` decodes.
    Casting the module changes ``compute_dtype`` and the bias; fields and scales are moved, never cast.
    Raises ``CheckpointError`` for fields that do not fit the codec, ``ConfigError`` if it cannot hold this shape.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        scheme: LayerScheme,
        fields: Mapping[str, torch.Tensor] | None = None,
        bias: nn.Parameter | None = None,
        *,
        compute_dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        input_scale: torch.Tensor | None = None,
        pre_scale: torch.Tensor | None = None,
        low_rank: tuple[torch.Tensor, torch.Tensor] | None = None,
        low_rank_scaled: bool = True,
    ) -> None:
        nn.Module.__init__(self)
        self.in_features = in_features
        self.out_features = out_features
        self.scheme = scheme
        self.compute_dtype = compute_dtype
        self.low_rank_scaled = low_rank_scaled
        choose_kernel(scheme, WEIGHT_ONLY, cpu_facts(), self.shape)  # the codec can hold it
        if bias is not None and not isinstance(bias, nn.Parameter):
            bias = nn.Parameter(bias, requires_grad=False)
        self.register_parameter("bias", bias)
        self.register_fields(fields, repr(self))
        self.register_buffer("input_scale", None)
        self.register_buffer("pre_scale", None)
        self.register_buffer("low_rank_down", None)
        self.register_buffer("low_rank_up", None)
        self.set_extras(input_scale=input_scale, pre_scale=pre_scale, low_rank=low_rank)
        self.start()
        if device is not None and fields is not None:
            self.to(device)

    @classmethod
    def from_dense(
        cls,
        source: nn.Linear | torch.Tensor,
        scheme: LayerScheme,
        *,
        bias: nn.Parameter | None = None,
        compute_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **extras: Any,
    ) -> QuantizedLinear:
        """Quantize a Linear, or a weight (N, K) with ``bias``. The source stays as it is.

        With ``pre_scale`` the weight is divided by it before it is encoded, so the layer computes what the source did.
        """
        weight = source.weight if isinstance(source, nn.Linear) else source
        if isinstance(source, nn.Linear):
            bias = source.bias
        dense = weight.detach()
        if device is not None:
            dense = dense.to(device)
        scale = extras.get("pre_scale")
        if scale is not None:
            dense = dense.to(torch.float32) / scale.to(dense.device, torch.float32)
        out_features, in_features = dense.shape
        fields = scheme.codec.encode(dense)
        made = cls(
            in_features,
            out_features,
            scheme,
            fields,
            bias,
            compute_dtype=compute_dtype or weight.dtype,
            device=device,
            **extras,
        )
        made.train(source.training if isinstance(source, nn.Linear) else False)
        return made

    # --- what the matrix looks like

    @property
    def shape(self) -> Shape:
        """(N, K)."""
        return (self.out_features, self.in_features)

    @property
    def weight(self) -> torch.Tensor:
        """A stand-in of shape (N, K) in the compute dtype: NaN everywhere, without memory."""
        return torch.full((), float("nan"), dtype=self.compute_dtype, device=self.device).expand(self.shape)

    @weight.setter
    def weight(self, value: object) -> None:
        self.register_parameter("weight", value)  # type: ignore[arg-type]

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Refuse a weight with ``AttributeError``."""
        if name == "weight":
            raise AttributeError(
                "the weight of a QuantizedLinear cannot be set: set its fields with set_field(), "
                "or make plain layers again with dequantize_()"
            )
        super().register_parameter(name, param)

    def extra_repr(self) -> str:
        activation = self.scheme.activation.codec
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"codec={self.scheme.codec.name}, activation={activation.name if activation else None}"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr() if '_parameters' in self.__dict__ else ''})"

    # --- fields

    def field_specs(self) -> dict[str, FieldSpec]:
        return self.scheme.codec.specs(self.shape)

    def set_field(self, name: str, tensor: torch.Tensor) -> None:
        """Set one field; the tensor is kept, not copied. Raises ``CheckpointError`` if it does not fit."""
        specs = self.field_specs()
        if name not in specs:
            raise CheckpointError(f"{self!r} has no field {name!r} (it has {', '.join(specs)})")
        check_field(repr(self), name, tensor, specs[name])
        self.release_kernel()
        self._buffers[name] = tensor.detach()

    def set_fields(self, fields: Mapping[str, torch.Tensor]) -> None:
        """Set several fields; nothing is changed if one of them does not fit."""
        specs = self.field_specs()
        for name, tensor in fields.items():
            if name in specs:
                check_field(repr(self), name, tensor, specs[name])
        for name, tensor in fields.items():
            self.set_field(name, tensor)

    def set_extras(
        self,
        *,
        input_scale: torch.Tensor | None = None,
        pre_scale: torch.Tensor | None = None,
        low_rank: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Set what is given of the input scale (scalar), the activation's factors (K) and the branch ((R, K), (N, R)).

        Raises ``CheckpointError`` for another shape, or factors that are not positive and finite.
        """
        if input_scale is not None:
            if input_scale.numel() != 1:
                raise CheckpointError(f"{self!r}: input_scale has shape {tuple(input_scale.shape)}, must be one number")
            self.input_scale = input_scale.detach().reshape(())
        if pre_scale is not None:
            pre_scale = pre_scale.detach().reshape(-1)
            if pre_scale.shape[0] != self.in_features:
                raise CheckpointError(f"{self!r}: pre_scale has {pre_scale.shape[0]} values, not {self.in_features}")
            cast = pre_scale.to(self.compute_dtype)
            if not pre_scale.is_meta and not bool((torch.isfinite(cast) & (cast > 0)).all()):
                raise CheckpointError(f"{self!r}: pre_scale must be positive and finite in {self.compute_dtype}")
            self.pre_scale = pre_scale
        if low_rank is not None:
            down, up = (part.detach() for part in low_rank)
            if down.shape != (up.shape[-1], self.in_features) or up.shape[0] != self.out_features:
                raise CheckpointError(
                    f"{self!r}: a low-rank branch of {tuple(down.shape)} and {tuple(up.shape)}, "
                    f"must be (R, {self.in_features}) and ({self.out_features}, R)"
                )
            self.low_rank_down, self.low_rank_up = down, up

    def decode(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the stored matrix (N, K), without ``pre_scale`` and the low-rank branch."""
        return self.scheme.codec.decode(self.fields, self.shape, dtype or self.compute_dtype)

    def dense_weight(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the matrix (N, K) that a plain Linear would need to compute the same, activations unquantized."""
        dtype = dtype or self.compute_dtype
        if self.pre_scale is None and self.low_rank_down is None:
            return self.decode(dtype)
        dense = self.decode(torch.float32)
        branch = None
        if self.low_rank_down is not None:
            branch = self.low_rank_up.to(torch.float32) @ self.low_rank_down.to(torch.float32)
        if branch is not None and self.low_rank_scaled:
            dense, branch = dense + branch, None
        if self.pre_scale is not None:
            dense = dense * self.pre_scale.to(torch.float32)
        return (dense if branch is None else dense + branch).to(dtype)

    # --- running

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x (…, K) times the weight, plus the bias: (…, N) in x's dtype. Only x gets a gradient."""
        if self._is_opaque(x):
            y: torch.Tensor = torch.ops.omniloom.quantized_linear(x, self._handle, self.out_features)
            return y
        return self.compute(x)

    def _is_opaque(self, x: torch.Tensor) -> bool:
        """Whether the layer runs as one operator: for gradients, and in graphs on CPUs or where the step decides."""
        if x.requires_grad and torch.is_grad_enabled():
            return True
        return torch.compiler.is_compiling() and (x.device.type == "cpu" or bool(self.scheme.fallback_steps))

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Do what ``forward`` does, without an operator in between."""
        if self.device.type == "meta":
            return x.new_empty(*x.shape[:-1], self.out_features)
        scaled = x if self.pre_scale is None else x * self.pre_scale.to(x.dtype)
        kernel, activation = self.kernel_for(x)
        if kernel.needs_preparation and self._prepared is None:
            self.prepare_kernel()
        y = kernel(scaled, self, activation)
        if self.low_rank_down is None:
            return y
        dtype = product_dtype(x, WEIGHT_ONLY)
        seen = (scaled if self.low_rank_scaled else x).to(dtype)
        branch = F.linear(F.linear(seen, self.low_rank_down.to(dtype)), self.low_rank_up.to(dtype))
        return (y.to(dtype) + branch).to(x.dtype)
