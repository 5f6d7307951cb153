"""Quantization configs of multi-stage models: where users write theirs, and which part of a checkpoint's is a stage's.

The layout of omni checkpoints is that of transformers' Qwen-Omni configs: ``thinker_config``, ``talker_config``, …
inside the top-level config, whose ``quantization_config`` names layers with the stage in front
(``thinker.model.layers``).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from omniloom.config import UNSET, Unset
from omniloom.errors import ConfigError

USER_KEYS = ("quantization_config", "quantization", "diffusion_quantization_config")
_BLOCK_KEYS = ("block_name_to_quantize", "to_quant_block_names")
_LIST_KEYS = (*_BLOCK_KEYS, "exclude_modules", "ignore", "ignored_layers", "modules_to_not_convert")
_DICT_KEYS = ("extra_config", "quantized_layers")


def pick_user_spec(given: Mapping[str, Any], where: str = "options") -> Any | Unset:
    """Return what was given under one of the accepted names, ``UNSET`` if nothing was.

    Raises ``ConfigError`` if two of them were given.
    """
    found = [key for key in USER_KEYS if given.get(key, UNSET) is not UNSET]
    if len(found) > 1:
        raise ConfigError(f"{where}: {found[0]} and {found[1]} are two names of one option; give one of them")
    return given[found[0]] if found else UNSET


def stage_user_spec(stage: Mapping[str, Any], deployment: Mapping[str, Any], where: str = "stage") -> Any | Unset:
    """Return a stage's spec: its engine arguments, then its own keys, then those of the whole deployment."""
    levels = ((stage.get("engine_args") or {}, f"{where}, engine_args"), (stage, where), (deployment, "deployment"))
    picked = (pick_user_spec(level, place) for level, place in levels)
    return next((spec for spec in picked if spec is not UNSET), UNSET)


def stage_disk_config(
    config: Mapping[str, Any], stage_config_name: str | None, *, overrides: Mapping[str, Any] | None = None
) -> dict[str, Any] | str | None:
    """Return the part of a checkpoint's config that says how one stage's weights are quantized, if they are.

    ``stage_config_name``: ``"thinker_config"`` and the like, ``None`` for a model without stages. ``overrides``: the
    stage's ``hf_overrides``; a ``quantization_config`` of ``None`` there clears the checkpoint's. A stage's own config
    wins over the top-level one, which counts unless its list of blocks names none of the stage. In the result, names
    have no stage in front.
    """
    if overrides and "quantization_config" in overrides:
        return copy.deepcopy(overrides["quantization_config"])
    top = config.get("quantization_config")
    if stage_config_name is None:
        return copy.deepcopy(top)
    stage = stage_config_name.removesuffix("_config")
    own = config.get(stage_config_name) or {}
    for level in (own.get("text_config") or {}, own):
        if level.get("quantization_config"):
            return without_stage(level["quantization_config"], stage)
    if not isinstance(top, Mapping):
        return top
    blocks = [name for key in _BLOCK_KEYS for name in _names(top.get(key))]
    if blocks and not any(name == stage or name.startswith(stage + ".") for name in blocks):
        return None
    return without_stage(top, stage)


def without_stage(disk: Mapping[str, Any] | str, stage: str) -> dict[str, Any] | str:
    """Return the config with ``stage.`` taken off the front of layer names, plain ones and regular expressions."""
    if isinstance(disk, str):
        return disk
    result: dict[str, Any] = copy.deepcopy(dict(disk))
    for key in _LIST_KEYS:
        if result.get(key):
            result[key] = [_strip(name, stage) for name in _names(result[key])]
    for key in _DICT_KEYS:
        if isinstance(result.get(key), Mapping):
            result[key] = {_strip(name, stage): value for name, value in result[key].items()}
    if isinstance(result.get("quantization"), Mapping):
        result["quantization"] = without_stage(result["quantization"], stage)
    return result


def _names(value: Any) -> list[str]:
    """Return the names in a string, a comma-separated string or a list (of lists)."""
    if isinstance(value, str):
        return [name.strip() for name in value.split(",") if name.strip()]
    return [name for part in value or () for name in ([part] if isinstance(part, str) else _names(part))]


def _strip(name: str, stage: str) -> str:
    for start in ("", "re:", "^", "re:^"):
        for dot in (".", "\\."):
            if name.startswith(start + stage + dot):
                return start + name[len(start + stage + dot) :]
    return name
