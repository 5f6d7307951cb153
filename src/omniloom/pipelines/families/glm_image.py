"""GLM-Image: an autoregressive stage makes prior tokens, a DiT paints from them."""

from omniloom.pipelines.family import Branches, BranchRule, Family

GLM_IMAGE = Family(
    name="glm-image",
    pipelines=("GlmImagePipeline",),
    blocks={"transformer_blocks": "GlmImageTransformerBlock"},
    size_stride=("vae_scale_factor", 4),
    default_size=("default_sample_size", "vae_scale_factor"),
    global_rng=True,  # the autoregressive stage seeds and samples from it
    branches=Branches(BranchRule.ORDER, ("cond", "uncond")),  # calls before the first step write the condition cache
)
