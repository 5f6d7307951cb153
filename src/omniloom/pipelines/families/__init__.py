"""One file per family; importing this package registers them all."""

from omniloom.pipelines.families import flux, sd3

__all__ = ["flux", "sd3"]
