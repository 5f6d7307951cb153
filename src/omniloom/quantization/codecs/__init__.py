"""Storage formats of weight matrices, one file per family. Importing the package registers every codec."""

from omniloom.quantization.codecs import bnb4, fp8, gguf, int4, int8, mx
from omniloom.quantization.codecs.base import Codec, Fields, FieldSpec, Shape, codec_names, get_codec, register_codec

__all__ = [
    "Codec",
    "FieldSpec",
    "Fields",
    "Shape",
    "bnb4",
    "codec_names",
    "fp8",
    "get_codec",
    "gguf",
    "int4",
    "int8",
    "mx",
    "register_codec",
]
