"""Which layers of each family's denoiser are quantized by default, and why each of the others is not."""

from __future__ import annotations

from omniloom.quantization.never import CONDITIONING, EDGE, MODULATION

_MLP = "{0}.N {0}.N.proj"
_JOINT = "attn.add_k_proj attn.add_q_proj attn.add_v_proj attn.to_add_out attn.to_k attn.to_out.N attn.to_q attn.to_v"
_SINGLE = "attn.to_k attn.to_q attn.to_v proj_mlp proj_out"
_CROSS = "attnN.to_k attnN.to_out.N attnN.to_q attnN.to_v"
FF = " ".join(_MLP.format(name) for name in ("ff.net", "ff_context.net"))
_QWEN_FF = " ".join(_MLP.format(name) for name in ("img_mlp.net", "txt_mlp.net"))
_TIME = "time_text_embed.timestep_embedder.linear_N"
_TEXT = "time_text_embed.text_embedder.linear_N"
_NORMS = "transformer_blocks.N.normN.linear transformer_blocks.N.normN_context.linear"
_REFINER = " ".join(
    f"context_embedder.token_refiner.refiner_blocks.N.{name}"
    for name in ("attn.to_k", "attn.to_out.N", "attn.to_q", "attn.to_v", "ff.net.N", "ff.net.N.proj")
)
_HUNYUAN = f"context_embedder.proj_in {_REFINER} context_embedder_N.linear_N proj_out"
_HUNYUAN_TIME = " ".join(f"context_embedder.{name}" for name in (_TIME, _TEXT))
_HUNYUAN_NORMS = f"context_embedder.token_refiner.refiner_blocks.N.norm_out.linear norm_out.linear {_NORMS}"
_ATTENTION = "attention.to_k attention.to_out.N attention.to_q attention.to_v feed_forward.wN"


def under(prefix: str, names: str) -> str:
    return " ".join(f"{prefix}.N.{name}" for name in names.split())


# family -> (quantized, {reason: kept}), numbers as N
TABLE: dict[str, tuple[str, dict[str, str]]] = {
    "flux-guidance": (
        under("transformer_blocks", f"{_JOINT} {FF}") + " " + under("single_transformer_blocks", _SINGLE),
        {
            MODULATION: f"norm_out.linear single_transformer_blocks.N.norm.linear {_NORMS}",
            CONDITIONING: f"time_text_embed.guidance_embedder.linear_N {_TEXT} {_TIME}",
            EDGE: "context_embedder proj_out x_embedder",
        },
    ),
    "flux2": (
        under("transformer_blocks", f"{_JOINT} ff.linear_in ff.linear_out ff_context.linear_in ff_context.linear_out")
        + " "
        + under("single_transformer_blocks", "attn.to_out attn.to_qkv_mlp_proj"),
        {
            MODULATION: "double_stream_modulation_img.linear double_stream_modulation_txt.linear norm_out.linear "
            "single_stream_modulation.linear",
            CONDITIONING: "time_guidance_embed.guidance_embedder.linear_N "
            "time_guidance_embed.timestep_embedder.linear_N",
            EDGE: "context_embedder proj_out x_embedder",
        },
    ),
    "glm-image": (
        under("transformer_blocks", f"{_CROSS} ff.net.N ff.net.N.proj"),
        {
            MODULATION: "norm_out.linear transformer_blocks.N.normN.linear",
            CONDITIONING: "time_condition_embed.condition_embedder.linear_N "
            "time_condition_embed.timestep_embedder.linear_N",
            EDGE: "glyph_projector.net.N glyph_projector.net.N.proj image_projector.proj prior_projector.net.N "
            "prior_projector.net.N.proj proj_out",
        },
    ),
    "hunyuan-image-21": (
        under("transformer_blocks", f"{_JOINT} {FF}") + " " + under("single_transformer_blocks", _SINGLE),
        {
            MODULATION: f"{_HUNYUAN_NORMS} single_transformer_blocks.N.norm.linear",
            CONDITIONING: f"{_HUNYUAN_TIME} time_guidance_embed.timestep_embedder.linear_N",
            EDGE: _HUNYUAN,
        },
    ),
    "hunyuan-video-15": (
        under("transformer_blocks", f"{_JOINT} {FF}"),
        {
            MODULATION: _HUNYUAN_NORMS,
            CONDITIONING: f"{_HUNYUAN_TIME} time_embed.timestep_embedder.linear_N",
            EDGE: f"{_HUNYUAN} image_embedder.linear_N",
        },
    ),
    "ltx": (
        under("transformer_blocks", f"{_CROSS} ff.net.N ff.net.N.proj"),
        {
            CONDITIONING: "time_embed.emb.timestep_embedder.linear_N time_embed.linear",
            EDGE: "caption_projection.linear_N proj_in proj_out",
        },
    ),
    "qwen-image": (
        under("transformer_blocks", f"{_JOINT} {_QWEN_FF}"),
        {
            MODULATION: "norm_out.linear transformer_blocks.N.img_mod.N transformer_blocks.N.txt_mod.N",
            CONDITIONING: _TIME,
            EDGE: "img_in proj_out txt_in",
        },
    ),
    "sd3": (
        under("transformer_blocks", f"{_JOINT} {_CROSS} {FF}"),
        {
            MODULATION: f"norm_out.linear {_NORMS}",
            CONDITIONING: f"{_TEXT} {_TIME}",
            EDGE: "context_embedder proj_out",
        },
    ),
    "wan22-t2v": (
        under("blocks", f"{_CROSS} ffn.net.N ffn.net.N.proj"),
        {
            CONDITIONING: "condition_embedder.text_embedder.linear_N condition_embedder.time_embedder.linear_N "
            "condition_embedder.time_proj",
            EDGE: "proj_out",
        },
    ),
    "z-image": (
        " ".join(under(name, _ATTENTION) for name in ("context_refiner", "layers", "noise_refiner")),
        {
            MODULATION: "all_final_layer.N-N.adaLN_modulation.N layers.N.adaLN_modulation.N "
            "noise_refiner.N.adaLN_modulation.N",
            CONDITIONING: "cap_embedder.N t_embedder.mlp.N",
            EDGE: "all_final_layer.N-N.linear all_x_embedder.N-N",
        },
    ),
}
