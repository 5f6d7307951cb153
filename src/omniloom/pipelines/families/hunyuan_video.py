"""HunyuanVideo 1.5: video with a guider object and no step callback."""

from omniloom.pipelines.family import Branches, BranchRule, Family, FrameRule

HUNYUAN_VIDEO = Family(
    name="hunyuan-video",
    pipelines=("HunyuanVideo15Pipeline", "HunyuanVideo15ImageToVideoPipeline"),
    blocks={"transformer_blocks": "HunyuanVideo15TransformerBlock"},
    size_stride=("vae_scale_factor_spatial",),
    frames=FrameRule("vae_scale_factor_temporal"),
    fps=24,
    one_output=True,  # diffusers 0.42 does not repeat the attention mask for several videos
    branches=Branches(BranchRule.ORDER, ("pred_cond", "pred_uncond")),
)
