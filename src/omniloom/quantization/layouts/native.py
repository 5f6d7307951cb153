"""The layout that ``omniloom quantize`` writes: a codec's fields as the tensors that the method's own format has.

The names are in ``names.py``. bitsandbytes' 4-bit layers carry a JSON record as bytes, with the block size, the shape
and the scales' offset.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from omniloom.errors import CheckpointError
from omniloom.quantization.codecs import get_codec
from omniloom.quantization.codecs.base import Codec, Fields, Shape
from omniloom.quantization.codecs.bnb4 import Bnb4
from omniloom.quantization.layouts.names import FORMAT, RECORD, STACK_SUFFIXES, SUFFIXES, stored_name
from omniloom.quantization.methods import QuantizationConfig
from omniloom.quantization.methods.bitsandbytes import BitsAndBytesConfig

_RECORD_BYTES = 256  # the record is padded with blanks to this, as its length must be known before its values are

Specs = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def stored_specs(codec: Codec, shape: Shape, experts: int | None = None) -> Specs:
    """Return suffix -> (dtype, shape) of what a matrix is stored as; a stack has its ``experts`` in front."""
    lead = () if experts is None else (experts,)
    specs = codec.specs(shape)
    names = _names(codec, stack=experts is not None)
    stored = {suffix: (specs[field].dtype, (*lead, *specs[field].shape)) for field, suffix in names.items()}
    if isinstance(codec, Bnb4) and experts is None:
        stored[RECORD + codec.quant_type] = (torch.uint8, (_RECORD_BYTES,))
    if codec.name == "int8_rowmax" and experts is None:
        stored[FORMAT] = (torch.uint8, ())
    return stored


def to_tensors(codec: Codec, shape: Shape, fields: Fields, dtype: torch.dtype, stack: bool = False) -> Fields:
    """Return suffix -> tensor of a matrix's fields. ``dtype``: what bitsandbytes' record says the matrix was."""
    tensors = {suffix: fields[field] for field, suffix in _names(codec, stack).items()}
    if isinstance(codec, Bnb4) and not stack:
        tensors[RECORD + codec.quant_type] = _record(codec, shape, fields, dtype)
    if codec.name == "int8_rowmax" and not stack:
        tensors[FORMAT] = torch.zeros((), dtype=torch.uint8)
    return tensors


def from_tensors(codec: Codec, tensors: Mapping[str, torch.Tensor], stack: bool = False) -> Fields:
    """Return the fields of what ``to_tensors`` made. Raises ``CheckpointError`` for LLM.int8 that is not row by row."""
    if not stack and FORMAT in tensors and int(tensors[FORMAT]) != 0:
        raise CheckpointError(f"weight_format is {int(tensors[FORMAT])}: only 0 (row by row) can be read")
    fields = {field: tensors[suffix] for field, suffix in _names(codec, stack).items()}
    state = next((tensor for suffix, tensor in tensors.items() if suffix.startswith(RECORD)), None)
    if isinstance(codec, Bnb4) and codec.double_quant and state is not None:
        offset = json.loads(bytes(state.cpu().tolist()))["nested_offset"]
        fields["nested_offset"] = torch.tensor(offset, dtype=torch.float32, device=state.device)
    return fields


def stored_codec(
    codec: Codec, shape: Shape, found: Mapping[str, tuple[int, ...]], name: str, experts: int | None = None
) -> Codec:
    """Return the codec of a stored matrix, or of a stack of ``experts`` of them.

    ``codec``: of the config; ``found``: suffix -> shape of the tensors there.

    FP8 files differ in how many scales they have, which their shapes say. Raises ``CheckpointError`` for tensors that
    are missing or of a shape that the format does not have.
    """
    if codec.name.startswith("fp8_") and "_scale" in found:
        scale = found["_scale"] if experts is None else found["_scale"][1:]
        codec = get_codec("fp8_tensor" if scale in ((), (1,)) else "fp8_channel")
    specs = stored_specs(codec, shape, experts)
    if missing := sorted(set(specs) - set(found)):
        lost = stored_name(name, missing[0])
        raise CheckpointError(f"{lost!r} is missing: {name!r} is stored as {codec.name} and needs it")
    for suffix, (_, wanted) in specs.items():
        if _squeezed(found[suffix]) != _squeezed(wanted):
            raise CheckpointError(
                f"{stored_name(name, suffix)!r} has shape {list(found[suffix])}, "
                f"{codec.name} of a {list(shape)} matrix needs {list(wanted)}"
            )
    return codec


def _names(codec: Codec, stack: bool) -> dict[str, str]:
    """Return field -> suffix of the fields that are tensors of their own."""
    known = (STACK_SUFFIXES if stack else SUFFIXES)[codec.name]
    return {field: known[field] for field in codec.specs((1, 1)) if field in known}


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _record(codec: Bnb4, shape: Shape, fields: Fields, dtype: torch.dtype) -> torch.Tensor:
    record: dict[str, object] = {
        "quant_type": codec.quant_type,
        "blocksize": codec.block_size,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": list(shape),
    }
    if "nested_offset" in fields:
        offset = float(fields["nested_offset"])
        record |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    raw = json.dumps(record).encode("utf-8").ljust(_RECORD_BYTES)
    return torch.tensor(list(raw), dtype=torch.uint8)


def disk_config(config: QuantizationConfig, dense_layers: Iterable[str]) -> dict[str, Any]:
    """Return the ``quantization_config`` of a component whose weights are stored as ``config`` says.

    bitsandbytes' is written with the keys that diffusers and transformers know.
    """
    plain = {key: value for key, value in config.to_dict().items() if key not in ("method", "modules_to_not_convert")}
    ignored = sorted(dense_layers)
    if isinstance(config, BitsAndBytesConfig):
        return {
            "quant_method": config.method,
            "load_in_4bit": not config.load_in_8bit,
            "load_in_8bit": config.load_in_8bit,
            "bnb_4bit_quant_type": config.quant_type,
            "bnb_4bit_use_double_quant": config.compress_statistics,
            "bnb_4bit_quant_storage": "uint8",
            "block_size": config.block_size,
            "llm_int8_skip_modules": ignored,
        }
    return {"quant_method": config.method, **plain, config.serialized_key: True, "ignored_layers": ignored}
