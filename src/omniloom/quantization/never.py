"""Layers that stay in high precision unless a method is told ``all_layers``: data, per model family.

A pattern is a run of whole path components, each with ``*`` for any characters; ``^`` ties it to the start of the path.
So ``^proj_out`` is a model's last projection and not the ``proj_out`` inside of FLUX's single blocks.

Why: shifts, scales and gates multiply whole token streams, so their error is coherent over all tokens and adds up step
by step; embedders and last projections see raw latents and timesteps with outliers; and all of them are small.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable

CONDITIONING = "conditioning that acts on every token"
INPUT = "embeds raw inputs"
OUTPUT = "makes the raw output"
ROUTER = "decides which experts run"
TOWER = "looks at pictures or listens"
SPEECH = "makes codes or sound"


@dataclasses.dataclass(frozen=True)
class Never:
    """One rule: layers whose path matches ``pattern`` are not quantized; ``why`` goes into the report."""

    pattern: str
    why: str


def _rules(why: str, *patterns: str) -> tuple[Never, ...]:
    return tuple(Never(pattern, why) for pattern in patterns)


# Denoisers of every family, also of those that are not listed below.
DENOISER = (
    *_rules(
        CONDITIONING,
        "norm*",
        "*_norm",
        "*_mod",
        "*modulation*",
        "adaln*",
        "adaLN*",
        "time_*",
        "timestep_*",
        "t_embedder",
        "guidance_*",
        "condition_embedder",
    ),
    *_rules(INPUT, "^x_embedder", "^img_in", "^txt_in", "^proj_in", "^patch_*", "^pos_embed*", "^context_embedder*"),
    *_rules(INPUT, "^caption_*", "^image_embedder", "^image_proj*"),
    *_rules(OUTPUT, "^proj_out", "^final_layer", "^head"),
    *_rules(ROUTER, "router", "gate"),
)

FAMILIES: dict[str, tuple[Never, ...]] = {
    "flux": (),
    "flux2": (),  # its shared modulations are named *_modulation_*
    "glm-image": _rules(INPUT, "^glyph_projector", "^prior_projector"),
    "hunyuan-image": (),  # the token refiner is a part of context_embedder
    "hunyuan-video": (),
    "ltx": (),
    "qwen-image": (),
    "sd3": (),
    "wan": (),
    "z-image": (
        *_rules(INPUT, "^all_x_embedder", "^cap_embedder", "^siglip_embedder"),
        *_rules(OUTPUT, "^all_final_layer"),
    ),
}

# Text encoders, vision-language models and omni models of transformers; also stages of such models.
LANGUAGE = (
    *_rules(INPUT, "embed_tokens", "shared", "multi_modal_projector", "text_projection", "hidden_projection"),
    *_rules(INPUT, "thinker_to_talker_proj", "visual_projection"),
    *_rules(OUTPUT, "lm_head", "codec_head"),
    *_rules(ROUTER, "router", "gate", "shared_expert_gate"),
    *_rules(TOWER, "visual", "vision_tower", "vision_model", "vision_embed_tokens", "audio_tower", "audio_encoder"),
    *_rules(SPEECH, "code_predictor", "code2wav", "token2wav", "speaker_encoder", "speech_tokenizer", "codec_*"),
)


def never_rules(family: str, *, denoiser: bool) -> tuple[Never, ...]:
    """Return the rules for a component: of the family's denoisers, or of encoders and language models."""
    return DENOISER + FAMILIES.get(family, ()) if denoiser else LANGUAGE


def first_rule(path: str, rules: Iterable[Never]) -> Never | None:
    """Return the first rule that the path of a layer matches."""
    return next((rule for rule in rules if _compile(rule.pattern).search(path)), None)


@functools.cache
def _compile(pattern: str) -> re.Pattern[str]:
    body = re.escape(pattern.removeprefix("^")).replace(r"\*", "[^.]*")
    start = "^" if pattern.startswith("^") else r"(?:^|\.)"
    return re.compile(rf"{start}{body}(?:\.|$)")
