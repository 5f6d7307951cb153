"""Stable Diffusion 3 and 3.5: one list of joint blocks, classifier-free guidance as two rows of one call."""

from omniloom.pipelines.family import BranchRule, Family, register

SD3 = register(
    Family(
        name="sd3",
        pipelines=(
            "StableDiffusion3Pipeline",
            "StableDiffusion3Img2ImgPipeline",
            "StableDiffusion3InpaintPipeline",
        ),
        blocks={"JointTransformerBlock": "transformer_blocks"},
        size_stride=("vae_scale_factor", "patch_size"),
        default_size=("default_sample_size", "vae_scale_factor"),
        branches=BranchRule.BATCHED,  # plus a third call per step while skip-layer guidance is on
        branch_names=("uncond", "cond"),
    )
)
