"""The flags of ``omniloom generate``: names, help and how a word becomes a value. ``None`` means "not typed"."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from omniloom.cli.typed import parse_integer, parse_json_or_file, parse_number

_INPUT = "Input"
_RESULT = "Result"
_SAMPLING = "Sampling (the model's own defaults unless given)"
_MODEL = "Model and machine"


def _flag(*names: str, panel: str, help: str, metavar: str | None = None, parser: Any = None) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, metavar=metavar, parser=parser, show_default=False)


def _switch(*names: str, panel: str, help: str) -> Any:
    return _flag(*names, panel=panel, help=help, metavar="")


def _checked(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def parser(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return parser


def _integer(*names: str, help: str) -> Any:
    return _flag(*names, panel=_SAMPLING, help=help, metavar="INT", parser=_checked(parse_integer))


def _number(*names: str, help: str) -> Any:
    return _flag(*names, panel=_SAMPLING, help=help, metavar="NUMBER", parser=_checked(parse_number))


Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="Pipeline folder, hub id (owner/name), .safetensors file, or demo.")
]

Prompt = Annotated[str, _flag("--prompt", "-p", panel=_INPUT, metavar="TEXT", help="What to paint.")]
NegativePrompt = Annotated[str | None, _flag("--negative-prompt", panel=_INPUT, metavar="TEXT", help="What to avoid.")]
Images = Annotated[
    list[Path] | None, _flag("--image", panel=_INPUT, metavar="FILE", help="Input image; may be repeated.")
]
Mask = Annotated[Path | None, _flag("--mask", panel=_INPUT, metavar="FILE", help="Mask: white is repainted.")]

Output = Annotated[
    str | None,
    _flag(
        "--output",
        "-o",
        panel=_RESULT,
        metavar="PATH",
        help="File (.png .jpg .webp, video .mp4 .gif) or folder. Several outputs are numbered: out-0.png, out-1.png. "
        "Default: omniloom-SEED.png here.",
    ),
]
Report = Annotated[
    Path | None,
    _flag("--report", panel=_RESULT, metavar="FILE", help="Write what was done, and how long it took, as JSON."),
]
AsJson = Annotated[bool, _switch("--json", panel=_RESULT, help="Print one JSON object instead of paths.")]
Quiet = Annotated[bool, _switch("--quiet", "-q", panel=_RESULT, help="No progress.")]

Size = Annotated[str | None, _flag("--size", panel=_SAMPLING, metavar="WxH", help="Pixels, for example 1024x768.")]
Steps = Annotated[int | None, _integer("--steps", help="Denoising steps.")]
Seed = Annotated[int | None, _integer("--seed", help="Output i uses SEED + i; drawn if not given.")]
Count = Annotated[int | None, _integer("--n", "-n", help="How many images or videos.")]
GuidanceScale = Annotated[float | None, _number("--guidance-scale", help="Guidance, as the model defines it.")]
TrueCfgScale = Annotated[
    float | None, _number("--true-cfg-scale", help="True classifier-free guidance (FLUX, Qwen-Image).")
]
Strength = Annotated[float | None, _number("--strength", help="How far an input image is changed, 0 to 1.")]
MaxSequenceLength = Annotated[int | None, _integer("--max-sequence-length", help="Prompt tokens that the model sees.")]
Frames = Annotated[int | None, _integer("--frames", help="Frames of a video.")]
Fps = Annotated[float | None, _number("--fps", help="Frames per second of a video.")]

Dtype = Annotated[
    str | None, _flag("--dtype", panel=_MODEL, metavar="NAME", help="auto, float32, bfloat16 or float16.")
]
Device = Annotated[
    str | None, _flag("--device", panel=_MODEL, metavar="NAME", help="auto, cpu, cuda, cuda:N, xpu, xpu:N or mps.")
]
Quantization = Annotated[
    str | None,
    _flag(
        "--quantization",
        panel=_MODEL,
        metavar="NAME",
        help="Quantization method; omniloom methods lists them, or none.",
    ),
]
QuantizationConfig = Annotated[
    Any,
    _flag(
        "--quantization-config",
        panel=_MODEL,
        metavar="JSON|@FILE",
        help='Method with options, or by component: \'{"transformer": {"method": "fp8"}, "text_encoder": "int8"}\'.',
        parser=_checked(parse_json_or_file),
    ),
]
Compile = Annotated[
    str | None,
    _flag(
        "--compile", panel=_MODEL, metavar="none|regional|full", help="Compile the transformer's blocks, or all of it."
    ),
]
Base = Annotated[
    str | None, _flag("--base", panel=_MODEL, metavar="MODEL", help="Pipeline that a single-file MODEL belongs to.")
]
Scheduler = Annotated[
    str | None, _flag("--scheduler", panel=_MODEL, metavar="NAME", help="Scheduler, for example euler, unipc or dpm++.")
]
Settings = Annotated[
    list[str] | None,
    _flag(
        "--set",
        panel=_MODEL,
        metavar="KEY=VALUE",
        help="Any other option, for example vae.tiling=true; may be repeated.",
    ),
]
Config = Annotated[
    Path | None,
    _flag(
        "--config",
        panel=_MODEL,
        metavar="FILE",
        help="JSON or YAML file with options, and sampling under 'params'; flags win.",
    ),
]
Debug = Annotated[bool, _switch("--debug", panel=_MODEL, help="Show library messages, and a traceback on failure.")]
