from __future__ import annotations

import copy

import pytest
import torch

from omniloom.checkpoint.storage import OWN_PAGES_FROM, empty

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (1024, 1024), (1000, 3, 701)])
def test_it_is_a_tensor_like_any_other(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = empty(shape, dtype, CPU)
    assert (tensor.shape, tensor.dtype, tensor.device, tensor.is_contiguous()) == (shape, dtype, CPU, True)
    tensor.zero_()
    twin = copy.deepcopy(tensor)
    assert not twin.float().any()
    assert torch.nn.Parameter(tensor, requires_grad=False).data_ptr() == tensor.data_ptr()


def test_threshold() -> None:
    for nbytes in (OWN_PAGES_FROM - 1, OWN_PAGES_FROM, OWN_PAGES_FROM + 1):
        assert empty((nbytes,), torch.uint8, CPU).fill_(7).sum() == 7 * nbytes
    assert empty((OWN_PAGES_FROM,), torch.uint8, torch.device("meta")).device.type == "meta"
