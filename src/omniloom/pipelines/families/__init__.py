"""The families, one file each, and the registry over them."""

from __future__ import annotations

from omniloom.pipelines.families.flux import FLUX
from omniloom.pipelines.families.flux2 import FLUX2
from omniloom.pipelines.families.glm_image import GLM_IMAGE
from omniloom.pipelines.families.hunyuan_image import HUNYUAN_IMAGE
from omniloom.pipelines.families.hunyuan_video import HUNYUAN_VIDEO
from omniloom.pipelines.families.ltx import LTX
from omniloom.pipelines.families.qwen_image import QWEN_IMAGE
from omniloom.pipelines.families.sd3 import SD3
from omniloom.pipelines.families.wan import WAN
from omniloom.pipelines.families.z_image import Z_IMAGE
from omniloom.pipelines.family import GENERIC, Family

FAMILIES: tuple[Family, ...] = (
    FLUX,
    FLUX2,
    GLM_IMAGE,
    HUNYUAN_IMAGE,
    HUNYUAN_VIDEO,
    LTX,
    QWEN_IMAGE,
    SD3,
    WAN,
    Z_IMAGE,
)

_BY_PIPELINE = {pipeline: family for family in FAMILIES for pipeline in family.pipelines}


def family_of(pipeline_class: str) -> Family:
    """Return the family of a pipeline class; ``GENERIC`` for one that nothing is known about."""
    return _BY_PIPELINE.get(pipeline_class, GENERIC)
