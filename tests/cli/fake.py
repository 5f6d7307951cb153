"""An ``Omni`` that paints plain squares: everything of the command line can be tested without a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from PIL import Image

from omniloom.config import RuntimeConfig
from omniloom.engine.output import Output, Progress
from omniloom.engine.params import SamplingParams


class FakeReport:
    def __init__(self, config: RuntimeConfig) -> None:
        self.config = config

    def to_dict(self) -> dict[str, Any]:
        plan = {"device": "cpu", "dtype": "float32", "folder": "/home/me/secret"}
        return {"version": "9", "pipeline": "FakePipeline", "config": self.config.to_dict(), "plan": plan}


class FakeOmni:
    """``error`` is raised by ``generate``; ``moving`` makes frames. Calls are recorded on the class."""

    calls: list[dict[str, Any]] = []
    error: BaseException | None = None
    moving = False
    warnings: list[str] = []

    def __init__(
        self, model: str = "demo", *, config: RuntimeConfig, on_load: Callable[..., None], expecting: Any
    ) -> None:
        self.model, self.config = model, config
        self.report = FakeReport(config)
        on_load("transformer", 5, 10)
        on_load("transformer", 10, 10)

    def __enter__(self) -> FakeOmni:
        return self

    def __exit__(self, *_: object) -> None:
        self.calls.append({"unloaded": True})

    def generate(self, prompt: Any, params: SamplingParams, *, on_progress: Callable[[Progress], None]) -> list[Output]:
        self.calls.append({"model": self.model, "config": self.config, "prompt": prompt, "params": params})
        print("a library prints this")
        for phase, step in (
            ("queued", 0),
            ("encode", 0),
            ("denoise", 0),
            ("denoise", 1),
            ("denoise", 2),
            ("decode", 2),
        ):
            on_progress(Progress("r", phase, step, 2))
        if self.error is not None:
            raise self.error
        given = params.given()
        width, height = given.get("width", 16), given.get("height", 16)
        count, seed = given.get("num_outputs_per_prompt", 1), given.get("seed", 1234)
        seeds = [seed + i for i in range(count)]
        images = [Image.new("RGB", (width, height), (s % 256, 80, 120)) for s in seeds]
        resolved = {"width": width, "height": height, "num_inference_steps": given.get("num_inference_steps", 20)}
        resolved |= {key: given[key] for key in ("fps", "negative_prompt") if key in given}
        frames = [
            [image.point(lambda v, i=i: v + 9 * i) for i in range(given.get("num_frames", 4))] for image in images
        ]
        return [
            Output(
                "r",
                prompt=prompt["prompt"],
                images=None if self.moving else images,
                frames=frames if self.moving else None,
                seeds=seeds,
                params=resolved,
                metrics={"steps": 2, "seconds": {"denoise": 0.5}},
                warnings=list(self.warnings),
            )
        ]
