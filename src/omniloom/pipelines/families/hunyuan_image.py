"""HunyuanImage 2.1: a guider object decides about guidance; its branches are named by a context."""

from omniloom.pipelines.family import Branches, BranchRule, Family

HUNYUAN_IMAGE = Family(
    name="hunyuan-image",
    pipelines=("HunyuanImagePipeline",),
    blocks={
        "transformer_blocks": "HunyuanImageTransformerBlock",
        "single_transformer_blocks": "HunyuanImageSingleTransformerBlock",
    },
    size_stride=("vae_scale_factor", 2),
    default_size=("default_sample_size", "vae_scale_factor"),
    branches=Branches(BranchRule.ORDER, ("pred_cond", "pred_uncond")),
)
