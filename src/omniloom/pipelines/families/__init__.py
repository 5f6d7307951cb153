"""One file per family; importing this package registers them all."""

from omniloom.pipelines.families import (
    flux,
    flux2,
    glm_image,
    hunyuan_image,
    hunyuan_video,
    ltx,
    qwen_image,
    sd3,
    wan,
    z_image,
)

__all__ = [
    "flux",
    "flux2",
    "glm_image",
    "hunyuan_image",
    "hunyuan_video",
    "ltx",
    "qwen_image",
    "sd3",
    "wan",
    "z_image",
]
