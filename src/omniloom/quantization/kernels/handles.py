"""The operator that stands for a quantized layer in a compiled graph.

It takes the layer's handle, a 0-d int64 tensor, as an input: equal blocks then share one graph, a kernel may decode
tile by tile, and packed operands, which no graph accepts, stay out of it. A handle dies with its layer.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any

import torch

from omniloom.errors import EngineError

_numbers = itertools.count(1)
_layers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def new_handle(layer: Any) -> torch.Tensor:
    """Return a handle that nothing else has, as a CPU tensor; the layer is held weakly."""
    with _lock:
        number = next(_numbers)
        _layers[number] = layer
    return torch.tensor(number, dtype=torch.int64, device="cpu")


def resolve(handle: torch.Tensor) -> Any:
    """Return the layer of a handle. Raises ``EngineError`` if it is gone or belongs to another process."""
    layer = _layers.get(int(handle))
    if layer is None:
        raise EngineError(f"quantized layer {int(handle)} is not there (any more); was its model copied by hand?")
    return layer


def live_handles() -> int:
    """Return how many layers have a handle."""
    return len(_layers)


@torch.library.custom_op("omniloom::quantized_linear", mutates_args=())
def quantized_linear(x: torch.Tensor, handle: torch.Tensor, out_features: int) -> torch.Tensor:
    """Run the layer of ``handle`` on x (…, K): (…, ``out_features``), x's dtype."""
    with torch.no_grad():
        result: torch.Tensor = resolve(handle).compute(x)
    return result


@quantized_linear.register_fake
def _(x: torch.Tensor, handle: torch.Tensor, out_features: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _gradient(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    """As if the rounding of activations were not there."""
    weight = resolve(ctx.saved_tensors[0]).dense_weight(torch.float32)
    return (grad.to(torch.float32) @ weight).to(grad.dtype), None, None


quantized_linear.register_autograd(_gradient, setup_context=_remember)
