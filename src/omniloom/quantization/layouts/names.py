"""The tensor names of quantized weights in the files that ``omniloom quantize`` writes. No torch.

A parameter ``x.weight`` is ``x.weight`` with the codes and ``x.weight_scale``, or what the format calls it, beside it.
"""

from __future__ import annotations

# codec -> field -> what is appended to the parameter's name; after ">", what stands in the place of its last part.
# A field that is not here is in the record.
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
# the same for stacks of matrices, where bitsandbytes has no names of its own (and there is no record)
STACK_SUFFIXES: dict[str, dict[str, str]] = {
    **SUFFIXES,
    "int8_rowmax": {"codes": "", "row_absmax": ".row_absmax"},
    "bnb4": {
        "packed": "",
        "absmax": ".absmax",
        "absmax_codes": ".absmax_codes",
        "nested_absmax": ".nested_absmax",
        "nested_offset": ".nested_offset",
        "nested_map": ".nested_map",
        "code_map": ".code_map",
    },
}
RECORD = ".quant_state.bitsandbytes__"  # of a 4-bit layer, followed by the kind: JSON, as bytes
FORMAT = ">weight_format"  # of LLM.int8: 0 says that codes are stored by row


def known_suffixes() -> set[str]:
    """Return everything that a parameter's name may be followed by."""
    tables = (*SUFFIXES.values(), *STACK_SUFFIXES.values())
    found = {suffix for fields in tables for suffix in fields.values() if suffix}
    return found | {RECORD + "nf4", RECORD + "fp4", FORMAT}


def stored_name(parameter: str, suffix: str) -> str:
    """Return the name of the tensor that belongs to ``parameter``."""
    return f"{parameter.rpartition('.')[0]}.{suffix[1:]}" if suffix.startswith(">") else parameter + suffix
