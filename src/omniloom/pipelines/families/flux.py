"""FLUX.1: two lists of blocks, embedded guidance (dev) or none (schnell), optional true classifier-free guidance."""

from omniloom.pipelines.family import Branches, BranchRule, Family

FLUX = Family(
    name="flux",
    pipelines=(
        "FluxPipeline",
        "FluxImg2ImgPipeline",
        "FluxInpaintPipeline",
        "FluxFillPipeline",
        "FluxKontextPipeline",
        "FluxKontextInpaintPipeline",
    ),
    blocks={
        "transformer_blocks": "FluxTransformerBlock",
        "single_transformer_blocks": "FluxSingleTransformerBlock",
    },
    size_stride=("vae_scale_factor", 2),  # packed in 2x2 patches; other sizes are cut down with a warning only
    default_size=("default_sample_size", "vae_scale_factor"),
    needs={"guidance_scale": ("transformer", "guidance_embeds")},
    schedule_args=("mu",),
    branches=Branches(BranchRule.ORDER, ("cond", "uncond")),
)
