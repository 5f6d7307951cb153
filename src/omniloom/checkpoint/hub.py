"""From what the user types to a local path: a folder, a file, or ``owner/name[@revision]`` on the Hugging Face hub."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omniloom.checkpoint.names import BASES, scan
from omniloom.errors import ModelError, shorten, suggest

_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[^@\s]+))?")
_URL = re.compile(r"https?://(www\.)?(huggingface\.co|hf\.co)/(?P<repo>[\w.-]+/[\w.-]+)/?.*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FIRST = ("model_index.json", "config.json")
_FILE_ENDINGS = (".safetensors", ".gguf")
_SIDE_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
_NEVER = ("*.bin", "*.ckpt", "*.pt", "*.pth", "*.pkl", "*.onnx", "*.msgpack", "*.h5")


def resolve_model(
    model: str | Path,
    *,
    revision: str | None = None,
    variant: str | None = None,
    offline: bool | None = None,
    progress: bool | None = None,
    allow_patterns: Sequence[str] | None = None,
) -> Path:
    """Return the local path of ``model``, downloading what a run needs of it if it is a hub id.

    model: a folder or file (``~`` is expanded), or ``owner/name`` or ``owner/name@revision`` on the hub.
    variant: "fp16" fetches the weights of that variant where a component has them, else its plain ones.
    offline: only look into the local cache; None follows ``HF_HUB_OFFLINE``.
    progress: False hides the download bars (on stderr); None leaves it to the hub library.
    allow_patterns: fetch the files that match these instead of choosing by ``model_index.json``.
    Raises ``ModelError``, one line that says what to do.
    """
    text = str(model)
    path = Path(text).expanduser()
    if text and path.exists():
        return path
    match = _HUB_ID.fullmatch(text)
    if isinstance(model, Path) or _looks_like_path(text) or not match:
        raise ModelError(_not_there(text, path))
    repo, asked = match["repo"], match["revision"]
    if asked and revision and asked != revision:
        raise ModelError(f"{text}: the revision is given twice: @{asked} and revision={revision!r}")
    ignore = [*_NEVER] if variant or allow_patterns else [*_NEVER, "*.safetensors.index.*.json"]
    download = _Download(repo, asked or revision, offline, progress is not False, ignore)
    if allow_patterns is not None:
        return download(list(allow_patterns))
    return _needed_files(download, variant)


def _looks_like_path(text: str) -> bool:
    name = text.partition("@")[0]  # a revision may hold slashes: refs/pr/3
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name or text.endswith(_FILE_ENDINGS)


def _not_there(text: str, path: Path) -> str:
    if url := _URL.fullmatch(text):
        return f"{text}: give a hub model as {url['repo']!r} instead of its address"
    try:
        siblings = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return f"{text}: no such file or folder, and {path.parent} is no folder either"
    kind = "no such file or folder" if _looks_like_path(text) else "neither a local path nor a hub id 'owner/name'"
    return f"{text}: {kind}{suggest(path.name, siblings)}"


def _needed_files(download: _Download, variant: str | None) -> Path:
    """First what the model consists of, then the files of its components: never the whole repository."""
    folder = download(list(_FIRST))
    if not any((folder / name).is_file() for name in _FIRST):
        raise ModelError(
            f"{download.repo}: has neither model_index.json nor config.json"
            f"{' in the local cache' if download.offline else ''}, so it is no model that can be run as a whole"
        )
    download.pin(folder)
    parts = _components(folder)
    wanted = [part + side for part in parts for side in _SIDE_FILES]
    wanted += [name for part in parts for name in _weights(part, variant)]
    folder = download(wanted)
    if missing := [part.rstrip("/") for part in parts if not (folder / part).is_dir()]:
        raise ModelError(
            f"{download.repo}: {folder} lacks {shorten(missing)}, which model_index.json names"
            + ("; run once online to complete the download" if download.offline else "")
        )
    if variant:
        plain = [part for part in parts if all(files.variant != variant for files in scan(folder / part))]
        if plain:
            download([pattern for part in plain for pattern in _weights(part, None)])
    return folder


def _components(folder: Path) -> list[str]:
    """The prefixes of the component folders (``"vae/"``), or ``[""]`` for a model at the root."""
    index = folder / "model_index.json"
    if not index.is_file():
        return [""]
    try:
        entries = json.loads(index.read_bytes().decode("utf-8"))
        if not isinstance(entries, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{index}: not a valid model index: {error}") from error
    named = [name for name, entry in entries.items() if _is_component(name, entry)]
    return [f"{name}/" for name in named]


def _is_component(name: str, entry: object) -> bool:
    """``"vae": ["diffusers", "AutoencoderKL"]``; ``[null, null]`` is a component that was left out."""
    known = isinstance(entry, list) and len(entry) == 2 and all(isinstance(item, str) for item in entry)
    return known and not name.startswith((".", "_")) and not set(name) & set("/\\")


def _weights(part: str, variant: str | None) -> list[str]:
    """Exact name patterns, because in the hub's patterns ``*`` would match other variants and sub-folders too."""
    mark = f".{variant}" if variant else ""
    shard = "-[0-9][0-9][0-9][0-9][0-9]-of-[0-9][0-9][0-9][0-9][0-9]"
    names = [f"{mark}.safetensors", f"{mark}{shard}.safetensors", f"{shard}{mark}.safetensors"]
    names += [f".safetensors.index{mark}.json", f"{mark}.safetensors.index.json"]
    return sorted({f"{part}{base}{name}" for base in BASES for name in names})


class _Download:
    """``snapshot_download`` of one repository, with its failures told in one line each."""

    def __init__(self, repo: str, revision: str | None, offline: bool | None, bars: bool, ignore: list[str]) -> None:
        import huggingface_hub

        self.repo = repo
        self.revision = revision
        self.offline = huggingface_hub.constants.HF_HUB_OFFLINE if offline is None else offline
        self.options: dict[str, Any] = {"ignore_patterns": ignore, "local_files_only": self.offline}
        if not bars:
            self.options["tqdm_class"] = _silent_bar()

    def pin(self, folder: Path) -> None:
        """Stay on the commit that was found first, even if the branch moves between two calls."""
        if _COMMIT.fullmatch(folder.name):
            self.revision = folder.name

    def __call__(self, patterns: list[str]) -> Path:
        import huggingface_hub

        try:
            folder = huggingface_hub.snapshot_download(
                self.repo, revision=self.revision, allow_patterns=patterns, **self.options
            )
        except Exception as error:  # the hub library's own errors, its http client's and the system's
            reason = _reason(error, self.repo, self.revision, self.offline)
            if reason is None:
                raise
            raise ModelError(f"{self.repo}: {reason}") from error
        return Path(folder)


def _silent_bar() -> type:
    from huggingface_hub.utils.tqdm import tqdm

    class Silent(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

    return Silent


def _reason(error: Exception, repo: str, revision: str | None, offline: bool) -> str | None:
    """What went wrong and what to do about it, or None for what is no failure of the download (a bug)."""
    from huggingface_hub import errors

    page = f"https://huggingface.co/{repo}"
    if isinstance(error, errors.GatedRepoError):
        return f"the model is gated: accept its terms at {page}, then run `hf auth login` (or set HF_TOKEN)"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "no such model on the hub, or it is private: check the name; for a private one run `hf auth login`"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the model has no revision {revision!r}: see {page}/branches"
    if isinstance(error, errors.HFValidationError):
        return f"not a valid hub id: {_first_line(error)}"
    if isinstance(error, errors.LocalEntryNotFoundError):
        wanted = f" at revision {revision!r}" if revision else ""
        there = "only part of it is" if isinstance(error, errors.IncompleteSnapshotError) else "it is not"
        why = "offline mode is on: unset HF_HUB_OFFLINE (or offline)" if offline else "the hub cannot be reached"
        return f"{there} in the local cache{wanted} and {why}; run once with a network, or give a local folder"
    if isinstance(error, errors.HfHubHTTPError):
        return f"the hub answered with an error, try again later: {_first_line(error)}"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "the disk is full: free some space, or point HF_HOME to another disk"
    if isinstance(error, OSError) or type(error).__module__.startswith(("httpx", "httpcore", "requests")):
        return f"the download failed, check the network and run again (it resumes): {_first_line(error)}"
    return None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
