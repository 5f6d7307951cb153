"""Qwen-Image, its Edit, Edit-Plus and Layered variants: a Qwen2.5-VL encoder, true classifier-free guidance."""

from omniloom.pipelines.family import Branches, BranchRule, Family

QWEN_IMAGE = Family(
    name="qwen-image",
    pipelines=(
        "QwenImagePipeline",
        "QwenImageImg2ImgPipeline",
        "QwenImageInpaintPipeline",
        "QwenImageEditPipeline",
        "QwenImageEditInpaintPipeline",
        "QwenImageEditPlusPipeline",
        "QwenImageLayeredPipeline",
    ),
    blocks={"transformer_blocks": "QwenImageTransformerBlock"},
    size_stride=("vae_scale_factor", 2),
    default_size=("default_sample_size", "vae_scale_factor"),
    needs={"guidance_scale": ("transformer", "guidance_embeds")},
    schedule_args=("mu",),
    many_images=("QwenImageEditPlusPipeline",),
    branches=Branches(BranchRule.ORDER, ("cond", "uncond")),
)
