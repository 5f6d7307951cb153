"""Warm-up: one request for each size that is expected, so that a real one compiles nothing."""

from __future__ import annotations

from typing import Any

from omniloom.config import to_plain
from omniloom.diffusion.compile.warmup import Bucket, warm_up
from omniloom.engine.call import call_parameters
from omniloom.engine.engine import Engine
from omniloom.engine.params import SamplingParams
from omniloom.pipelines.build import LoadedPipeline
from omniloom.pipelines.compiling import denoisers_of
from omniloom.pipelines.tasks import supported_tasks

STEPS = 2  # of a model with two experts each makes one


def warm_engine(engine: Engine, loaded: LoadedPipeline, buckets: tuple[Bucket, ...]) -> list[dict[str, Any]]:
    """Run a request per bucket, as callers' requests are run; return what each cost, for the report.

    Raises what the request's error is: ``RequestError`` for a size that the model does not take.
    """

    def run(bucket: Bucket) -> None:
        output = engine.submit(*request_of(bucket, loaded)).result()
        if output.error is not None:
            raise output.error

    return [to_plain(cost) for cost in warm_up(denoisers_of(loaded).values(), buckets, run)]


def request_of(bucket: Bucket, loaded: LoadedPipeline) -> tuple[dict[str, Any], SamplingParams]:
    """Return the prompt and parameters of a cheap request of these sizes: few steps, and no decoding."""
    given = {
        "width": bucket.width,
        "height": bucket.height,
        "num_frames": bucket.frames,
        "max_sequence_length": bucket.text_length,
        "num_outputs_per_prompt": bucket.batch if bucket.batch > 1 else None,
    }
    if "num_inference_steps" in call_parameters(type(loaded.pipe)):
        given["num_inference_steps"] = STEPS
    prompt: dict[str, Any] = {"prompt": " ".join(["a"] * (bucket.text_length or 1))}
    if not {"text-to-image", "text-to-video"} & set(supported_tasks(loaded)):
        from PIL import Image

        prompt["image"] = Image.new("RGB", (bucket.width or 256, bucket.height or 256), "gray")
    params: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    return prompt, SamplingParams(seed=0, output_type="latent", **params)
