"""LTX-Video: guidance as rows of one call, frames in groups of eight."""

from omniloom.pipelines.family import Branches, BranchRule, Family, FrameRule

LTX = Family(
    name="ltx",
    pipelines=("LTXPipeline", "LTXImageToVideoPipeline"),
    blocks={"transformer_blocks": "LTXVideoTransformerBlock"},
    size_stride=("vae_spatial_compression_ratio",),
    frames=FrameRule("vae_temporal_compression_ratio"),
    branches=Branches(BranchRule.BATCHED, ("uncond", "cond"), unguided=("cond",)),
)
