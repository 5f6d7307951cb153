"""Layers that stay in high precision unless ``all_layers`` is asked for: facts, one pattern a row.

What modulation gives multiplies whole token streams, so its error is the same for all tokens and adds up over the
steps; embedders and final projections see raw latents and timesteps, with outliers; routers choose. All are small.
"""

from __future__ import annotations

import re

MIN_SIDE = 16  # a matrix with a shorter side saves nothing and fits no kernel

MODULATION = "modulation: one error for all tokens, in every step"
CONDITIONING = "conditioning: sees raw timesteps and guidance"
EDGE = "embedder or final projection: sees raw latents"
TOWER = "vision, audio or codec part: small, and sensitive to outliers"
HEAD = "head or router: it decides, and it is small"

# (pattern over the path, whole components; reason)
_ROWS: tuple[tuple[str, str], ...] = (
    (r"norm\w*(\.\w+)*", MODULATION),
    (r"(img|txt)_mod(\.\w+)*", MODULATION),
    (r"\w*modulation\w*(\.\w+)*", MODULATION),
    (r"(time|timestep|guidance|t|condition|cap|text)_embed(der|s|ding)?\w*(\.\w+)*", CONDITIONING),
    (r"time_(text|guidance|condition)_embed(\.\w+)*", CONDITIONING),
    (r"timestep_embedder(\.\w+)*", CONDITIONING),
    (r"time_proj(ection)?(\.\w+)*", CONDITIONING),
    (r"(lm_head|embed_tokens|text_projection|score)(\.\w+)*", HEAD),
    (r"(gate|router|\w+_router|shared_expert_gate)", HEAD),
    (r"(visual|vision_tower|vision_model|audio_tower|audio_model|multi_modal_projector)(\.\w+)*", TOWER),
    (r"(code2wav|token2wav|code_predictor|speaker_encoder|speech_tokenizer)(\.\w+)*", TOWER),
)
# these only as the first component of the path: FLUX's single blocks have a proj_out of their own, which is quantized
_FIRST: tuple[tuple[str, str], ...] = (
    (r"(x_embedder|img_in|txt_in|patch_embedding|patch_embed|proj_in|context_embedder\w*|caption_projection)", EDGE),
    (r"(all_x_embedder|image_embedder|image_projector|prior_projector|glyph_projector|clip_projector|head)", EDGE),
    (r"(proj_out|norm_out|final_layer|all_final_layer|pos_embed)", EDGE),
)
_PATTERNS = [(re.compile(rf"(?:.*\.)?{pattern}"), reason) for pattern, reason in _ROWS]
_PATTERNS += [(re.compile(rf"{pattern}(\..*)?"), reason) for pattern, reason in _FIRST]


def never_quantized(path: str) -> str | None:
    """Say why the layer at ``path`` is best kept as it is; ``None`` if nothing speaks against quantizing it."""
    return next((reason for pattern, reason in _PATTERNS if pattern.fullmatch(path)), None)
