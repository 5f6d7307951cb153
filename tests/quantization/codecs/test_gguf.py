"""GGUF's block types against the format's own Python package, over random bytes: every bit pattern is a block."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from omniloom.checkpoint.gguf import read_gguf
from omniloom.checkpoint.gguf_source import GgufSource
from omniloom.errors import CheckpointError
from omniloom.quantization.codecs import codec_names, get_codec
from omniloom.quantization.kernels.decoders import decode_into

gguf = pytest.importorskip("gguf")
TYPES = [name for name in codec_names() if name.startswith("gguf_") and name != "gguf_other"]
WRITABLE = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "mxfp4"]


@pytest.mark.parametrize("name", TYPES)
def test_decoding_is_equal_bit_for_bit(name: str) -> None:
    kind = getattr(gguf.GGMLQuantizationType, name.removeprefix("gguf_").upper())
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 256, (64, 3 * size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        wanted = gguf.quants.dequantize(raw, kind).astype(np.float32)
    fields = {"packed": torch.from_numpy(raw)}
    found = get_codec(name).decode(fields, (64, 3 * block)).numpy()
    fast = torch.empty(64, 3 * block)
    decode_into(get_codec(name), fields, (64, 3 * block), fast)
    for values in (found, fast.numpy()):
        same = (values.view(np.uint32) == wanted.view(np.uint32)) | (np.isnan(values) & np.isnan(wanted))
        assert same.all()


@pytest.mark.parametrize("name", WRITABLE)
def test_encoding_is_equal_bit_for_bit(name: str) -> None:
    weight = np.random.default_rng(1).standard_normal((32, 256)).astype(np.float32)
    wanted = gguf.quants.quantize(weight, getattr(gguf.GGMLQuantizationType, name.upper()))
    assert np.array_equal(get_codec(f"gguf_{name}").encode(torch.from_numpy(weight))["packed"].numpy(), wanted)


def test_a_file_is_read_and_a_broken_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    weight = np.random.default_rng(2).standard_normal((16, 64)).astype(np.float32)
    packed = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
    writer = gguf.GGUFWriter(path, arch="flux")
    writer.add_tensor("a.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("a.bias", weight[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_gguf(path)
    assert header.architecture == "flux" and set(header.tensors) == {"a.weight", "a.bias"}
    with GgufSource(path) as source:
        assert np.array_equal(source.read("a.weight").numpy(), packed)
        assert np.array_equal(source.read("a.bias").numpy(), weight[0])
    data = path.read_bytes()
    for cut in (3, 10, 40, len(data) // 2, len(data) - 8):
        path.write_bytes(data[:cut])
        with pytest.raises(CheckpointError):
            read_gguf(path)
