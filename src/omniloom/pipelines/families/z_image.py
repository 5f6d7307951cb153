"""Z-Image and Turbo: three lists of the same block, inputs as lists, guidance as rows of one call."""

from omniloom.pipelines.family import Branches, BranchRule, Family

Z_IMAGE = Family(
    name="z-image",
    pipelines=("ZImagePipeline", "ZImageImg2ImgPipeline", "ZImageInpaintPipeline"),
    blocks={
        "noise_refiner": "ZImageTransformerBlock",
        "context_refiner": "ZImageTransformerBlock",
        "layers": "ZImageTransformerBlock",
    },
    size_stride=("vae_scale_factor", 2),
    schedule_args=("mu",),
    branches=Branches(BranchRule.BATCHED, ("cond", "uncond"), unguided=("cond",)),
)
