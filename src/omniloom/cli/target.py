"""Where results go: the file names that a ``-o`` value means, decided and checked before anything is loaded."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from pathlib import Path

from omniloom.errors import ConfigError

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
FRAME_SUFFIXES = (".mp4", ".gif")
SUFFIXES = (*IMAGE_SUFFIXES, *FRAME_SUFFIXES)


@dataclasses.dataclass(frozen=True)
class Target:
    """A folder with names made from the seeds (``stem`` is ``None``), or one name that is numbered if need be."""

    folder: Path
    stem: str | None = None
    suffix: str | None = None

    def paths(self, seeds: list[int], *, frames: bool) -> list[Path]:
        """Return one path per output. A named file is overwritten; a name made from a seed never takes a used one."""
        suffix = self.suffix_for(frames=frames)
        if self.stem is not None:
            numbers = [""] if len(seeds) == 1 else [f"-{i}" for i in range(len(seeds))]
            return [self.folder / f"{self.stem}{number}{suffix}" for number in numbers]
        return [_unused(self.folder, f"omniloom-{seed}", suffix) for seed in seeds]

    def suffix_for(self, *, frames: bool) -> str:
        """Return the suffix that was asked for, if it can hold frames (or an image), else one that can."""
        fitting = FRAME_SUFFIXES if frames else IMAGE_SUFFIXES
        if self.suffix and self.suffix.lower() in fitting:
            return self.suffix
        return (".mp4" if can_write_mp4() else ".gif") if frames else ".png"


def plan_target(text: str | None) -> Target:
    """Read a ``-o`` value. A name without a suffix, with a trailing slash, or of a folder that is there is a folder.

    Raises ``ConfigError`` for a suffix that cannot be written or a place that is not writable.
    """
    path = Path(text or ".").expanduser()
    if text is not None and not text.strip():
        raise ConfigError("--output is empty: give a file such as out.png, or a folder")
    if path.is_dir() or not path.suffix or (text or "").endswith(("/", os.sep)):
        if path.exists() and not path.is_dir():
            raise ConfigError(f"--output {text}: is a file without a known suffix (allowed: {', '.join(SUFFIXES)})")
        _check_writable(path, text)
        return Target(path)
    kind = path.suffix.lower()
    if kind not in SUFFIXES:
        raise ConfigError(
            f"--output {text}: cannot write {path.suffix!r} files (allowed: {', '.join(SUFFIXES)}, or a folder)"
        )
    if kind == ".mp4" and not can_write_mp4():
        raise ConfigError(f"--output {text}: writing .mp4 needs PyAV: pip install 'omniloom[video]' (or write a .gif)")
    _check_writable(path.parent, text)
    return Target(path.parent, path.stem, path.suffix)


def check_file(option: str, path: Path) -> None:
    """Raise ``ConfigError`` if the file ``path`` of ``option`` cannot be written."""
    if path.is_dir():
        raise ConfigError(f"{option} {path}: is a folder; give a file")
    _check_writable(path.parent, str(path), option)


def can_write_mp4() -> bool:
    """Whether PyAV (the ``video`` extra) is installed."""
    return importlib.util.find_spec("av") is not None


def _check_writable(folder: Path, text: str | None, option: str = "--output") -> None:
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise ConfigError(f"{option} {text}: {place} is not a folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {text or '.'}: the folder {place} is not writable")


def _unused(folder: Path, stem: str, suffix: str) -> Path:
    path, number = folder / f"{stem}{suffix}", 2
    while path.exists():
        path, number = folder / f"{stem}-{number}{suffix}", number + 1
    return path
