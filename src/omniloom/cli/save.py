"""Writing results: whole or not at all, with the seed and all settings inside a PNG."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omniloom.errors import EngineError

if TYPE_CHECKING:
    from PIL import Image

DEFAULT_FPS = 16.0


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Give a temporary path beside ``path`` that takes its place at the end, and is gone if anything fails.

    Missing folders are made. Raises ``EngineError`` if the system refuses.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise EngineError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def save_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON file."""
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save_image(path: Path, image: Image.Image, settings: Mapping[str, Any]) -> None:
    """Write one image in the format of its suffix. A PNG carries ``settings`` (text keys omniloom and parameters)."""
    with atomic(path) as temporary:
        if path.suffix.lower() == ".png":
            image.save(temporary, format="PNG", pnginfo=_png_info(settings))
        elif path.suffix.lower() == ".webp":
            image.save(temporary, format="WEBP", quality=95)
        else:
            image.convert("RGB").save(temporary, format="JPEG", quality=95)


def save_frames(path: Path, frames: Sequence[Image.Image], fps: float) -> None:
    """Write a video (.mp4) or an animation (.gif)."""
    with atomic(path) as temporary:
        if path.suffix.lower() == ".gif":
            first, *rest = frames
            first.save(
                temporary, format="GIF", save_all=True, append_images=rest, duration=max(20, round(1000 / fps)), loop=0
            )
        else:
            _save_mp4(temporary, frames, fps)


def _save_mp4(path: Path, frames: Sequence[Image.Image], fps: float) -> None:
    import av

    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001))
        stream.width, stream.height = (side - side % 2 for side in frames[0].size)  # yuv420p wants even sides
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": "17"}
        for frame in frames:
            picture = frame.convert("RGB").crop((0, 0, stream.width, stream.height))
            container.mux(stream.encode(av.VideoFrame.from_image(picture)))
        container.mux(stream.encode())


def _png_info(settings: Mapping[str, Any]) -> Any:
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    info.add_text("omniloom", json.dumps(settings))
    info.add_text("parameters", describe(settings))
    return info


def describe(settings: Mapping[str, Any]) -> str:
    """Return the settings as people (and gallery tools) read them: the prompt, then names and values."""
    params = dict(settings.get("params", {}))
    lines = [str(settings.get("prompt") or "")]
    if negative := params.pop("negative_prompt", None):
        lines.append(f"Negative prompt: {negative}")
    width, height = params.pop("width", None), params.pop("height", None)
    for name in ("seed", "num_outputs_per_prompt", "output_type"):
        params.pop(name, None)
    pairs = {"Steps": params.pop("num_inference_steps", None), "Seed": settings.get("seed")}
    pairs["Size"] = f"{width}x{height}" if width and height else None
    pairs |= {name.replace("_", " ").capitalize(): value for name, value in params.items()}
    pairs |= {"Model": settings.get("model"), "Version": f"omniloom {settings.get('omniloom')}"}
    lines.append(", ".join(f"{name}: {value}" for name, value in pairs.items() if value is not None))
    return "\n".join(lines)
