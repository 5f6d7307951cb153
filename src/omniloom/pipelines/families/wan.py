"""Wan 2.1 and 2.2: video, one or two transformers (high noise first), TI2V with per-token timesteps."""

from omniloom.pipelines.family import Branches, BranchRule, Family, FrameRule

WAN = Family(
    name="wan",
    pipelines=("WanPipeline", "WanImageToVideoPipeline", "WanVideoToVideoPipeline"),
    denoisers=("transformer", "transformer_2"),
    blocks={"blocks": "WanTransformerBlock"},
    size_stride=("vae_scale_factor_spatial", 2),  # patches of 1x2x2; other sizes are cut down with a warning only
    frames=FrameRule("vae_scale_factor_temporal"),
    fps=16,
    siblings={
        "image-to-video": ("WanImageToVideoPipeline", "expand_timesteps"),  # TI2V: one checkpoint does both
        "text-to-video": ("WanPipeline", "expand_timesteps"),
    },
    branches=Branches(BranchRule.ORDER, ("cond", "uncond")),
)
