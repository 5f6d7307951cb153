"""The options that every model has: which one, where from, in which type, on which device."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from omniloom.config import register, register_section
from omniloom.quantization import build_quant_config

DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "half": "float16",
    "auto": "auto",
}


def parse_dtype(value: Any) -> str:
    """Return the canonical name of a dtype given as a name or a ``torch.dtype``."""
    name = DTYPES.get(str(value).lower().removeprefix("torch."))
    if name is None:
        raise ValueError("must be one of auto, float32 (fp32), bfloat16 (bf16), float16 (fp16)")
    return name


def parse_device(value: Any) -> str:
    """Return the name of a device given as a name or a ``torch.device``."""
    name = str(value).lower()
    if not re.fullmatch(r"auto|cpu|mps|(cuda|xpu)(:\d+)?", name):
        raise ValueError("must be one of auto, cpu, cuda, cuda:N, xpu, xpu:N, mps")
    return name


def _optional_text(value: Any) -> str | None:
    if value is None or (isinstance(value, str) and value.strip()):
        return value
    raise ValueError("must be a non-empty string")


def _optional_path(value: Any) -> str | None:
    return _optional_text(str(value) if value is not None else None)


def _bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError("must be true or false")


def _plain_quantization(config: Any) -> Any:
    return None if config is None else config.to_dict()


register("dtype", default="auto", parse=parse_dtype, help="Compute type: auto, float32, bfloat16 or float16.")
register("device", default="auto", parse=parse_device, help="Where to run: auto, cpu, cuda, cuda:N, xpu or mps.")
register(
    "base", default=None, parse=_optional_path, help="Pipeline folder or hub id that a single-file model belongs to."
)
register("variant", default=None, parse=_optional_text, help="File variant to load, for instance fp16.")
register("revision", default=None, parse=_optional_text, help="Branch, tag or commit of a hub id.")
register("offline", default=False, parse=_bool, help="Use only what is on disk already; never ask the hub.")
register(
    "quantization_config",
    default=None,
    parse=build_quant_config,
    help="Quantization method, mapping of its options, or mapping of components to these; none.",
    aliases=("quantization", "diffusion_quantization_config"),
    plain=_plain_quantization,
)


@register_section("vae", help="How the VAE decodes: tiling and slicing.")
@dataclasses.dataclass(frozen=True)
class VaeOptions:
    """tiling: decode in tiles (less memory, not bit-identical). slicing: decode one image of a batch at a time."""

    tiling: bool = False
    slicing: bool = False
