"""FLUX.2 (embedded guidance, one call a step) and klein (classifier-free guidance unless distilled)."""

from omniloom.pipelines.family import Branches, BranchRule, Family

FLUX2 = Family(
    name="flux2",
    pipelines=("Flux2Pipeline", "Flux2KleinPipeline", "Flux2KleinKVPipeline", "Flux2KleinInpaintPipeline"),
    blocks={
        "transformer_blocks": "Flux2TransformerBlock",
        "single_transformer_blocks": "Flux2SingleTransformerBlock",
    },
    size_stride=("vae_scale_factor", 2),
    default_size=("default_sample_size", "vae_scale_factor"),
    schedule_args=("mu",),
    many_images=("Flux2Pipeline", "Flux2KleinPipeline", "Flux2KleinKVPipeline"),
    branches=Branches(BranchRule.ORDER, ("cond", "uncond")),
)
