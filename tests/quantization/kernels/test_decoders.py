from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omniloom.quantization.codecs import get_codec
from omniloom.quantization.codecs.base import Codec
from omniloom.quantization.kernels.decoders import _STEPS, SCRATCH, decode_into

CODECS = [
    get_codec("int8_channel"),
    get_codec("int8_rowmax"),
    get_codec("fp8_tensor"),
    get_codec("fp8_channel"),
    get_codec("fp8_block", rows=32, columns=64),
    get_codec("mxfp8"),
    get_codec("mxfp4"),
    get_codec("mxfp4_dual"),
    get_codec("int4_group", group_size=64),
    get_codec("int4_group", group_size=-1),
    get_codec("int4_group", group_size=32, symmetric=False),
    get_codec("bnb4"),
    get_codec("bnb4", quant_type="fp4", double_quant=False, block_size=128),
]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@settings(max_examples=15, deadline=None)
@given(rows=st.integers(1, 150), columns=st.integers(1, 40), size=st.floats(-30, 30), seed=st.integers(0, 99))
def test_it_is_the_codec_bit_for_bit(codec: Codec, rows: int, columns: int, size: float, seed: int) -> None:
    for width in (columns * 64, columns * 7):
        weight = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 10.0**size
        fields = codec.encode(weight)
        for dtype in (torch.float32, torch.bfloat16):
            out = torch.empty(rows, width, dtype=dtype)
            decode_into(codec, fields, (rows, width), out)
            assert _bits(out).equal(_bits(codec.decode(fields, (rows, width), dtype)))


def test_every_e4m3_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].view(torch.float8_e4m3fn).view(1, -1)
    fields = {"codes": codes, "scale": torch.tensor([[0.375]])}
    out = torch.empty(codes.shape)
    decode_into(get_codec("fp8_channel"), fields, (1, codes.shape[1]), out)
    assert _bits(out).equal(_bits(codes.float() * 0.375))


@pytest.mark.parametrize("exponent", [0, 1, 119, 246, 247, 254])
def test_extreme_shared_exponents(exponent: int) -> None:
    codes = torch.full((2, 32), 1.0).to(torch.float8_e4m3fn)
    fields = {"codes": codes, "exponents": torch.full((2, 1), exponent, dtype=torch.uint8)}
    out = torch.empty(2, 32)
    decode_into(get_codec("mxfp8"), fields, (2, 32), out)
    assert _bits(out).equal(_bits(get_codec("mxfp8").decode(fields, (2, 32))))


def test_several_steps_and_all_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omniloom.quantization.kernels.decoders._STEP_CELLS", 64 * 5)
    for codec in CODECS:
        weight = torch.randn(33, 1024, generator=torch.Generator().manual_seed(1))
        fields = codec.encode(weight)
        out = torch.empty(33, 1024)
        decode_into(codec, fields, (33, 1024), out)
        assert out.equal(codec.decode(fields, (33, 1024)))
    assert set(_STEPS) <= {codec.name for codec in CODECS}


def test_threads_have_scratch_of_their_own() -> None:
    mine = SCRATCH.get("tile", 10, torch.float32).data_ptr()
    others: list[int] = []
    thread = threading.Thread(target=lambda: others.append(SCRATCH.get("tile", 10, torch.float32).data_ptr()))
    thread.start()
    thread.join()
    assert others and others[0] != mine
    assert SCRATCH.get("tile", 5, torch.float32).data_ptr() == mine
