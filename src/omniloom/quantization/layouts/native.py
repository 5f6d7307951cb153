"""The layout that ``omniloom quantize`` writes: the tensor names that each method's own format uses.

A parameter ``x.weight`` becomes ``x.weight`` with the codes and ``x.weight_scale`` (or what the format calls it) beside
it. bitsandbytes' 4-bit layers carry a JSON record as bytes, with the block size, the shape and the scales' offset.
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
from omniloom.quantization.methods import QuantizationConfig
from omniloom.quantization.methods.bitsandbytes import BitsAndBytesConfig

# codec -> field -> what is appended to the parameter's name; after ">", what stands in the place of its last part
SUFFIXES: dict[str, dict[str, str]] = {
    "fp8_tensor": {"codes": "", "scale": "_scale"},
    "fp8_channel": {"codes": "", "scale": "_scale"},
    "fp8_block": {"codes": "", "scale": "_scale_inv"},
    "int8_channel": {"codes": "", "scale": "_scale"},
    "mxfp8": {"codes": "", "exponents": "_scale"},
    "mxfp4": {"packed": "", "exponents": "_scale"},
    "mxfp4_dual": {"packed": "", "exponents": "_scale", "coarse": "_dual_scale"},
    "int8_rowmax": {"codes": "", "row_absmax": ">SCB"},
    "bnb4": {
        "packed": "",
        "absmax": ".absmax",
        "absmax_codes": ".absmax",
        "nested_absmax": ".nested_absmax",
        "nested_map": ".nested_quant_map",
        "code_map": ".quant_map",
    },
}
_FORMAT = ">weight_format"  # of LLM.int8: 0 says that codes are stored by row
_STATE = ".quant_state.bitsandbytes__"
_STATE_BYTES = 256  # the record is padded with blanks to this, as its length must be known before its values are

Specs = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def known_suffixes() -> set[str]:
    """Return everything that a parameter's name may be followed by."""
    plain = {suffix for fields in SUFFIXES.values() for suffix in fields.values()}
    return (plain | {_STATE + "nf4", _STATE + "fp4", _FORMAT}) - {""}


def stored_name(parameter: str, suffix: str) -> str:
    """Return the name of the tensor that belongs to ``parameter``."""
    return f"{parameter.rpartition('.')[0]}.{suffix[1:]}" if suffix.startswith(">") else parameter + suffix


def stored_specs(codec: Codec, shape: Shape, experts: int | None = None) -> Specs:
    """Return suffix -> (dtype, shape) of what a matrix is stored as; a stack has its ``experts`` in front."""
    lead = () if experts is None else (experts,)
    specs = codec.specs(shape)
    names = _names(codec, stack=experts is not None)
    stored = {suffix: (specs[field].dtype, (*lead, *specs[field].shape)) for field, suffix in names.items()}
    if isinstance(codec, Bnb4) and experts is None:
        stored[_STATE + codec.quant_type] = (torch.uint8, (_STATE_BYTES,))
    if codec.name == "int8_rowmax" and experts is None:
        stored[_FORMAT] = (torch.uint8, ())
    return stored


def to_tensors(codec: Codec, shape: Shape, fields: Fields, dtype: torch.dtype, stack: bool = False) -> Fields:
    """Return suffix -> tensor of a matrix's fields. ``dtype``: what bitsandbytes' record says the matrix was."""
    tensors = {suffix: fields[field] for field, suffix in _names(codec, stack).items()}
    if isinstance(codec, Bnb4) and not stack:
        tensors[_STATE + codec.quant_type] = _record(codec, shape, fields, dtype)
    if codec.name == "int8_rowmax" and not stack:
        tensors[_FORMAT] = torch.zeros((), dtype=torch.uint8)
    return tensors


def from_tensors(codec: Codec, tensors: Mapping[str, torch.Tensor], stack: bool = False) -> Fields:
    """Return the fields of what ``to_tensors`` made. Raises ``CheckpointError`` for LLM.int8 that is not row by row."""
    if not stack and _FORMAT in tensors and int(tensors[_FORMAT]) != 0:
        raise CheckpointError(f"weight_format is {int(tensors[_FORMAT])}: only 0 (row by row) can be read")
    fields = {field: tensors[suffix] for field, suffix in _names(codec, stack).items()}
    state = next((tensor for suffix, tensor in tensors.items() if suffix.startswith(_STATE)), None)
    if isinstance(codec, Bnb4) and codec.double_quant and state is not None:
        offset = json.loads(bytes(state.cpu().tolist()))["nested_offset"]
        fields["nested_offset"] = torch.tensor(offset, dtype=torch.float32, device=state.device)
    return fields


def stored_codec(codec: Codec, shape: Shape, found: Mapping[str, tuple[int, ...]], name: str) -> Codec:
    """Return the codec of a stored matrix. ``codec``: of the config; ``found``: suffix -> shape of the tensors there.

    FP8 files differ in how many scales they have, which their shapes say. Raises ``CheckpointError`` for tensors that
    are missing or of a shape that the format does not have.
    """
    if codec.name.startswith("fp8_") and "_scale" in found:
        codec = get_codec("fp8_tensor" if found["_scale"] in ((), (1,)) else "fp8_channel")
    specs = stored_specs(codec, shape)
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
    """Return field -> suffix. The offset of bitsandbytes' scales is in the record; stacks have no record."""
    if stack and codec.name in ("bnb4", "int8_rowmax"):  # no format of others has stacks of these
        return {field: "" if field in ("packed", "codes") else f".{field}" for field in codec.specs((1, 1))}
    known = SUFFIXES[codec.name]
    return {field: known[field] for field in codec.specs((1, 1)) if field != "nested_offset"}


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
    raw = json.dumps(record).encode("utf-8").ljust(_STATE_BYTES)
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
