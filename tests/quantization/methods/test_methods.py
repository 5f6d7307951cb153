"""Every method's fields: round trips, what is allowed, other producers' names, and what each makes of a layer."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniloom.errors import ConfigError
from omniloom.quantization import QuantizationConfig, build_quant_config
from omniloom.quantization.methods.base import _METHODS, field_hints, online_methods
from omniloom.quantization.methods.inc import IncConfig

CLASSES = sorted(set(_METHODS.values()), key=lambda cls: cls.method)
_NAMES = st.text("abcdefghij_.0123456789*", min_size=1, max_size=12).filter(lambda text: text.strip("."))
_LIST = st.lists(_NAMES, max_size=3).map(tuple)
_DICT = st.dictionaries(_NAMES, st.one_of(st.integers(), st.booleans(), _NAMES, st.lists(_NAMES)), max_size=3)
# fields with few legal values; others are drawn by their type
_CHOICES: dict[str, list[Any]] = {
    "activation_scheme": ["dynamic"],
    "weight_granularity": ["channel", "tensor", None],
    "weight_block_size": [None],
    "quant_type": ["nf4", "fp4"],
    "block_size": [32, 64, 4096],
    "bits": [4],
    "version": ["gemm", "gemv"],
    "format": [None, "int-quantized"],
    "checkpoint_format": ["gptq", "gptq_v2"],
    "mxfp4_scale_alg": [0, 2],
    "precision": ["nvfp4", "int4"],
    "act_unsigned": [False],
    "activation_bits": [4, 16],
    "quant_algo": [None],
    "require_smooth_scale": [False],
}


def _drawn(cls: type[QuantizationConfig]) -> st.SearchStrategy[dict[str, Any]]:
    fields: dict[str, st.SearchStrategy[Any]] = {}
    for name, hint in field_hints(cls).items():
        if name in _CHOICES:
            fields[name] = st.sampled_from(_CHOICES[name])
        elif cls.method == "mxfp4_dualscale" and name.startswith("w4a8"):
            fields[name] = st.just(())
        elif name == "w4a8_fallback_layers":
            fields[name] = st.lists(st.from_regex(r"[a-z]\w{0,3}(\.[a-z0-9]{1,3}){0,2}", fullmatch=True)).map(tuple)
        elif "int, ..." in str(hint):
            fields[name] = st.lists(st.integers(0, 99)).map(tuple)
        elif "tuple[str" in str(hint) or "tuple[typing.Any" in str(hint):
            fields[name] = _LIST
        elif "dict" in str(hint):
            fields[name] = _DICT.filter(bool)
        elif hint is bool:
            fields[name] = st.booleans()
        elif "int" in str(hint):
            fields[name] = st.just(16) if cls.method.startswith("modelopt") else st.integers(1, 256)
        elif "str" in str(hint):
            fields[name] = _NAMES
        else:
            fields[name] = st.booleans()
    return st.fixed_dictionaries({}, optional=fields)


@given(st.sampled_from(CLASSES).flatmap(lambda cls: st.tuples(st.just(cls), _drawn(cls))))
def test_round_trip_through_json(drawn: tuple[type[QuantizationConfig], dict[str, Any]]) -> None:
    cls, fields = drawn
    if cls.method == "modelopt_mixed":
        fields = {"quantized_layers": {"a": {"quant_algo": "FP8"}}, **fields}
    config = cls(**fields)
    plain = json.loads(json.dumps(config.to_dict()))
    for again in (QuantizationConfig.from_dict(plain), build_quant_config(plain), pickle.loads(pickle.dumps(config))):
        assert again == config and hash(again) == hash(config) and type(again) is cls
    changed = cls(**fields | {"ignored_layers": (*config.ignored_layers, "one.more")})
    assert changed != config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.ignored_layers = ()  # type: ignore[misc]


def test_a_config_does_not_share_what_it_was_given() -> None:
    extra = {"a": {"bits": 8}}
    config = IncConfig(extra_config=extra)
    extra["a"]["bits"] = 2
    assert config.extra_config == {"a": {"bits": 8}}
    config.to_dict()["extra_config"]["a"]["bits"] = 3
    assert config.extra_config == {"a": {"bits": 8}}
    assert config != build_quant_config("int8") and config != "inc"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"method": "fp8", "activation_scheme": "dynamc"}, "'dynamc'; did you mean 'dynamic'?: must be one of"),
        ({"method": "fp8", "weight_block_size": [128]}, "weight_block_size=[128]: give [rows, columns]"),
        ({"method": "fp8", "weight_block_size": [128, 0]}, "give [rows, columns]"),
        ({"method": "fp8", "weight_block_size": [8, 8], "weight_granularity": "tensor"}, "contradicts"),
        ({"method": "fp8", "weight_block_size": [8, 8], "activation_scheme": "static"}, "needs activation_scheme"),
        ({"method": "int8", "activation_scheme": "static"}, "int8 activations are 'dynamic' only"),
        ({"method": "bitsandbytes", "quant_type": "nf5"}, "quant_type='nf5'; did you mean 'nf4'?"),
        ({"method": "bitsandbytes", "block_size": 48}, "block_size=48: must be one of 32, 64"),
        ({"method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": True}, "load_in_4bit=True with load_in_8bit"),
        ({"method": "mxfp4", "w4a8_fallback_steps": [-1]}, "w4a8_fallback_steps=[-1]: give denoising steps"),
        ({"method": "mxfp4", "w4a8_fallback_steps": [True]}, "w4a8_fallback_steps=[True]"),
        ({"method": "mxfp4", "w4a8_fallback_layers": ["blocks.*"]}, "'blocks.*' is no full path of a layer"),
        ({"method": "mxfp4", "mxfp4_scale_alg": 1}, "mxfp4_scale_alg=1: must be one of 0, 2"),
        ({"method": "mxfp4", "require_smooth_scale": True}, "require_smooth_scale needs a serialized checkpoint"),
        ({"method": "mxfp4", "require_smooth_scale": 1}, "must be of type bool"),
        ({"method": "mxfp4_dualscale", "w4a8_fallback_steps": [0]}, "only method 'mxfp4' has such a fallback"),
        ({"method": "mxfp4_dualscale", "w4a8_fallback_layers": ["a"]}, "only method 'mxfp4' has such a fallback"),
        ({"method": "mxfp4_dualscale", "num_bf16_fallback_layers": -1}, "must be at least 0"),
        ({"method": "inc", "bits": 4, "weight_bits": 8}, "'bits' is given twice, also as 'weight_bits'"),
        ({"method": "gptq", "group_size": 0}, "group_size=0: positive, or -1 for a whole row"),
        ({"method": "svdquant", "act_unsigned": True}, "act_unsigned=True: must be one of False"),
    ],
)
def test_bad_values(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        build_quant_config(spec)
    assert "\n" not in str(error.value)


def test_keys_of_other_producers() -> None:
    bnb = build_quant_config(
        {
            "quant_method": "bitsandbytes",
            "_load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_threshold": 6.0,
            "llm_int8_skip_modules": None,
        }
    )
    assert bnb == build_quant_config("bitsandbytes")
    skipping = build_quant_config({"method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["proj"]})
    assert skipping.modules_to_not_convert == ("proj",) and skipping.load_in_8bit  # type: ignore[union-attr]
    for blocks in ("a.b, c", ["a.b", "c"], [["a.b"], ["c"]]):
        inc = build_quant_config({"quant_method": "auto-round", "to_quant_block_names": blocks, "iters": 200})
        assert inc.block_name_to_quantize == ("a.b", "c")  # type: ignore[union-attr]
    awq = build_quant_config({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"})
    assert awq.group_size == 64 and awq.version == "gemm"  # type: ignore[union-attr]
    tensors = build_quant_config({"quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["re:x"]})
    [ignored] = tensors.ignore_lists()  # type: ignore[union-attr]
    assert (ignored.style, ignored.entries) == ("compressed-tensors", ("re:x",))


def test_fallback_steps_are_sorted_once() -> None:
    config = build_quant_config({"method": "mxfp4", "w4a8_fallback_steps": [3, 0, 3]})
    assert config.w4a8_fallback_steps == (0, 3)  # type: ignore[union-attr]


def test_only_online_methods_quantize_dense_weights() -> None:
    for cls in CLASSES:
        config = cls()
        if cls.method in online_methods():
            config.check_online()
            serialized = dataclasses.replace(config, **{cls.serialized_key: True})  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match="quantized already.*or one of bitsandbytes, fp8"):
                serialized.check_online()
        else:
            with pytest.raises(ConfigError, match=f"{cls.method!r} describes weights that are quantized already"):
                config.check_online()
            with pytest.raises(ConfigError, match="the checkpoint's tensors say how a.b is stored"):
                config.scheme("a.b", (32, 32))
    with pytest.raises(ConfigError, match="activation_scheme='static' needs input scales"):
        build_quant_config({"method": "fp8", "activation_scheme": "static"}).check_online()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("spec", "codec", "activation"),
    [
        ("fp8", "fp8_channel", "fp8_channel"),
        ({"method": "fp8", "weight_granularity": "tensor"}, "fp8_tensor", "fp8_channel"),
        ({"method": "fp8", "weight_granularity": "block"}, "fp8_block", "fp8_block"),
        ({"method": "fp8", "weight_block_size": [16, 32]}, "fp8_block", "fp8_block"),
        ("int8", "int8_channel", "int8_channel"),
        ("bitsandbytes", "bnb4", None),
        ("bitsandbytes_8bit", "int8_rowmax", None),
        ("mxfp8", "mxfp8", "mxfp8"),
        ("mxfp4", "mxfp4", "mxfp4"),
        ({"method": "mxfp4", "w4a8_fallback_layers": ["blocks.0.x"]}, "mxfp4", "mxfp8"),
        ("mxfp4_dualscale", "mxfp4_dual", "mxfp4_dual"),
    ],
)
def test_schemes(spec: Any, codec: str, activation: str | None) -> None:
    scheme = build_quant_config(spec).scheme("blocks.0.x", (256, 128))  # type: ignore[union-attr]
    found = scheme.activation.codec
    assert (scheme.codec.name, found.name if found else None) == (codec, activation)


def test_fallback_steps_of_mxfp4() -> None:
    config = build_quant_config({"method": "mxfp4", "w4a8_fallback_steps": [0, 2], "w4a8_fallback_layers": ["b"]})
    scheme = config.scheme("a", (32, 32))  # type: ignore[union-attr]
    assert scheme.activation.codec.name == "mxfp4" and scheme.fallback.codec.name == "mxfp8"  # type: ignore[union-attr]
    assert scheme.fallback_steps == {0, 2}
    assert config.scheme("b", (32, 32)).fallback is None  # type: ignore[union-attr]
    assert config.named_layers() == (("w4a8_fallback_layers", "b"),)  # type: ignore[union-attr]


def test_first_blocks_of_dualscale() -> None:
    config = build_quant_config({"method": "mxfp4_dualscale", "num_bf16_fallback_layers": 2})
    for path in ("blocks.0.a", "transformer_blocks.1.attn.to_q", "layers.1.x"):
        assert config.keeps(path) == "one of the first 2 blocks (num_bf16_fallback_layers)"  # type: ignore[union-attr]
    for path in ("blocks.2.a", "single_transformer_blocks.0.x", "proj_out", "a.blocks.0.x"):
        assert config.keeps(path) is None  # type: ignore[union-attr]
    stored = build_quant_config({"method": "mxfp4_dualscale", "is_checkpoint_serialized": True})
    assert stored.keeps("blocks.0.a") is None  # type: ignore[union-attr]
