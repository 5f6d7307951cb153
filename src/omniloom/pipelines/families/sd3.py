"""Stable Diffusion 3 and 3.5: one list of joint blocks, classifier-free guidance as two rows of one call."""

from omniloom.pipelines.family import Branches, BranchRule, Family

SD3 = Family(
    name="sd3",
    pipelines=(
        "StableDiffusion3Pipeline",
        "StableDiffusion3Img2ImgPipeline",
        "StableDiffusion3InpaintPipeline",
    ),
    blocks={"transformer_blocks": "JointTransformerBlock"},
    size_stride=("vae_scale_factor", "patch_size"),
    default_size=("default_sample_size", "vae_scale_factor"),
    branches=Branches(BranchRule.BATCHED, ("uncond", "cond"), extra=("skip_layers",), unguided=("cond",)),
)
