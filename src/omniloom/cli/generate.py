"""``omniloom generate``: from a prompt to files."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omniloom.cli import flags

if TYPE_CHECKING:
    from omniloom.cli.request import Job
    from omniloom.cli.target import Target
    from omniloom.engine.output import Output
    from omniloom.omni import Omni


def generate(
    prompt: flags.Prompt,
    model: flags.Model = "demo",
    negative_prompt: flags.NegativePrompt = None,
    image: flags.Images = None,
    mask: flags.Mask = None,
    output: flags.Output = None,
    report: flags.Report = None,
    as_json: flags.AsJson = False,
    quiet: flags.Quiet = False,
    size: flags.Size = None,
    steps: flags.Steps = None,
    seed: flags.Seed = None,
    n: flags.Count = None,
    guidance_scale: flags.GuidanceScale = None,
    true_cfg_scale: flags.TrueCfgScale = None,
    strength: flags.Strength = None,
    max_sequence_length: flags.MaxSequenceLength = None,
    frames: flags.Frames = None,
    fps: flags.Fps = None,
    dtype: flags.Dtype = None,
    device: flags.Device = None,
    scheduler: flags.Scheduler = None,
    quantization: flags.Quantization = None,
    quantization_config: flags.QuantizationConfig = None,
    compile: flags.Compile = None,
    base: flags.Base = None,
    settings: flags.Settings = None,
    config: flags.Config = None,
    debug: flags.Debug = False,
) -> None:
    """Paint images or videos from a prompt and print the paths of the files.

    Example: [bold]omniloom generate --prompt "a fox on blue" -o fox.png[/bold]
    """
    from omniloom.cli.request import Flags, make_job
    from omniloom.cli.target import check_file, plan_target

    target = plan_target(output)
    if report is not None:
        check_file("--report", report)
    typed = Flags(
        prompt=prompt,
        negative_prompt=negative_prompt,
        images=tuple(image or ()),
        mask=mask,
        size=size,
        sampling={
            "num_inference_steps": steps,
            "seed": seed,
            "num_outputs_per_prompt": n,
            "guidance_scale": guidance_scale,
            "true_cfg_scale": true_cfg_scale,
            "strength": strength,
            "max_sequence_length": max_sequence_length,
            "num_frames": frames,
            "fps": fps,
        },
        options={
            "dtype": dtype,
            "device": device,
            "scheduler": scheduler,
            "compile": compile,
            "base": base,
            "quantization": quantization,
            "quantization_config": quantization_config,
        },
        settings=tuple(settings or ()),
        config=config,
    )
    run(model, make_job(typed), target, report=report, as_json=as_json, quiet=quiet, debug=debug)


def run(model: str, job: Job, target: Target, *, report: Path | None, as_json: bool, quiet: bool, debug: bool) -> None:
    """Load the model, run the job and write its files; print their paths (or one JSON object) on stdout."""
    from omniloom.cli.noise import hushed
    from omniloom.cli.progress import make_reporter

    start = time.perf_counter()
    with hushed(debug):
        with make_reporter(quiet) as reporter:
            from omniloom.omni import Omni

            expecting = [(job.prompt, job.params)]
            with Omni(model, config=job.config(), on_load=reporter.on_load, expecting=expecting) as omni:
                loaded = time.perf_counter()
                [output] = omni.generate(job.prompt, job.params, on_progress=reporter.on_progress)
                summary = _summary(model, job, omni, output)
                summary["metrics"]["seconds_load"] = loaded - start
        summary["files"] = [str(path) for path in _write(output, target, summary, quiet)]
        if report is not None:
            from omniloom.cli.save import save_json

            save_json(report, summary)
    if not quiet:
        _tell(output, summary, time.perf_counter() - start)
    print(json.dumps(_without_report(summary)) if as_json else "\n".join(summary["files"]))


def _summary(model: str, job: Job, omni: Omni, output: Output) -> dict[str, Any]:
    from omniloom.config import to_plain

    return {
        "model": model,
        "prompt": job.prompt["prompt"],
        "seeds": list(output.seeds),
        "params": to_plain(output.params),
        "warnings": list(output.warnings),
        "metrics": to_plain(output.metrics),
        "report": omni.report.to_dict(),
    }


def _without_report(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in summary.items() if key != "report"}


def _write(output: Output, target: Target, summary: Mapping[str, Any], quiet: bool) -> list[Path]:
    from omniloom.cli.save import DEFAULT_FPS, save_frames, save_image
    from omniloom.errors import EngineError

    results: Any = output.frames if output.frames is not None else output.images
    if results is None:
        raise EngineError("the model made neither images nor frames, and nothing else can be written yet")
    moving = output.frames is not None
    paths = target.paths(output.seeds, frames=moving)
    if target.suffix and paths and paths[0].suffix != target.suffix:
        made = "frames" if moving else "images"
        _note(
            f"warning: this model makes {made}, so {paths[0].name} is written instead of {target.stem}{target.suffix}",
            quiet,
        )
    fps = float(output.params.get("fps") or DEFAULT_FPS)
    for index, (path, result) in enumerate(zip(paths, results, strict=True)):
        if moving:
            save_frames(path, result, fps)
        else:
            save_image(path, result, image_settings(summary, index))
    return paths


def image_settings(summary: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return what goes into the metadata of image ``index``. Local paths are left out but for the last name."""
    report = summary["report"]
    plan = report.get("plan") or {}
    config = {**(report.get("config") or {}), **{key: plan[key] for key in ("device", "dtype") if key in plan}}
    if config.get("base"):
        config["base"] = _last_name(config["base"])
    return {
        "omniloom": report.get("version"),
        "model": _last_name(summary["model"]),
        "pipeline": report.get("pipeline"),
        "prompt": summary["prompt"],
        "seed": summary["seeds"][index],
        "index": index,
        "params": summary["params"],
        "config": config,
    }


def _last_name(model: str) -> str:
    path = Path(model).expanduser()
    return path.resolve().name if path.exists() else model


def _tell(output: Output, summary: Mapping[str, Any], seconds: float) -> None:
    from omniloom.cli.show import show_rate

    for warning in output.warnings:
        _note(f"warning: {warning}", False)
    params, metrics = summary["params"], summary["metrics"]
    parts = []
    if "width" in params and "height" in params:
        parts.append(f"{params['width']}x{params['height']}")
    steps, denoise = metrics.get("steps"), (metrics.get("seconds") or {}).get("denoise")
    if steps:
        parts.append(f"{steps} steps" + (f" at {show_rate(steps / denoise)}" if denoise else ""))
    parts.append(f"seed {summary['seeds'][0]}" if summary["seeds"] else "")
    parts.append(f"{seconds:.1f} s in all, {metrics.get('seconds_load', 0.0):.1f} s of it loading")
    _note(", ".join(part for part in parts if part), False)


def _note(text: str, quiet: bool) -> None:
    if not quiet:
        print(text, file=sys.stderr, flush=True)
