from __future__ import annotations

import errno
import fnmatch
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import errors

from omniloom.checkpoint import resolve_model
from omniloom.errors import ModelError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
INDEX = {
    "_class_name": "FluxPipeline",
    "_name_or_path": ["not", "a component"],
    "transformer": ["diffusers", "FluxTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
    "text_encoder": ["transformers", "T5EncoderModel"],
    "tokenizer": ["transformers", "T5Tokenizer"],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "safety_checker": [None, None],
}
BASE = "diffusion_pytorch_model"
NEEDED = [
    "model_index.json",
    "transformer/config.json",
    f"transformer/{BASE}.safetensors.index.json",
    f"transformer/{BASE}-00001-of-00002.safetensors",
    f"transformer/{BASE}-00002-of-00002.safetensors",
    "vae/config.json",
    f"vae/{BASE}.safetensors",
    "text_encoder/config.json",
    "text_encoder/model.safetensors",
    "tokenizer/spiece.model",
    "tokenizer/tokenizer.json",
    "tokenizer/merges.txt",
    "tokenizer/chat_template.jinja",
    "scheduler/scheduler_config.json",
]
FP16 = [
    f"transformer/{BASE}.safetensors.index.fp16.json",
    f"transformer/{BASE}.fp16-00001-of-00002.safetensors",
    f"transformer/{BASE}-00002-of-00002.fp16.safetensors",
    "text_encoder/model.fp16.safetensors",
]
NOT_NEEDED = [
    "README.md",
    "flux1-dev.safetensors",
    f"transformer/{BASE}.bin",
    f"transformer/{BASE}.onnx",
    f"vae/{BASE}.bf16.safetensors",
    "vae/unknown.safetensors",
    "text_encoder/pytorch_model.bin",
    "text_encoder/sub/model.safetensors",
    "text_encoder_2/model.safetensors",
    "safety_checker/config.json",
    "safety_checker/model.safetensors",
    "images/a.png",
]


def plant(cache: Path, files: dict[str, str], repo: str = "models--owner--name", commit: str = COMMIT) -> Path:
    """A repository in the hub's cache layout: snapshots/<commit>/… are links to blobs."""
    for number, (name, text) in enumerate(files.items()):
        blob = cache / repo / "blobs" / f"{number:040x}"
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_text(text)
        link = cache / repo / "snapshots" / commit / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (cache / repo / "refs").mkdir(parents=True, exist_ok=True)
    (cache / repo / "refs" / "main").write_text(commit)
    return cache / repo / "snapshots" / commit


def content(name: str) -> str:
    return json.dumps(INDEX) if name == "model_index.json" else "{}"


class FakeHub:
    """``snapshot_download`` against a list of remote files, with the hub's own matching of patterns."""

    def __init__(self, root: Path, remote: list[str]) -> None:
        self.root = root
        self.remote = remote
        self.calls: list[dict[str, Any]] = []

    def __call__(self, repo: str, **options: Any) -> str:
        self.calls.append({"repo": repo, **options})
        folder = self.root / "models--owner--name" / "snapshots" / COMMIT
        folder.mkdir(parents=True, exist_ok=True)
        for name in self.remote:
            wanted = any(fnmatch.fnmatch(name, pattern) for pattern in options["allow_patterns"])
            if wanted and not any(fnmatch.fnmatch(name, pattern) for pattern in options["ignore_patterns"]):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(content(name))
        return str(folder)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(tmp_path / "hub", [*NEEDED, *FP16, *NOT_NEEDED])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return fake


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def fetched(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def refused(model: str | Path, *words: str, **options: Any) -> None:
    with pytest.raises(ModelError) as caught:
        resolve_model(model, **options)
    message = str(caught.value)
    assert "\n" not in message
    for word in (str(model).partition("@")[0], *words):
        assert word in message


# --- local paths -------------------------------------------------------------------------------------------------


def test_local_paths_are_taken_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    file = tmp_path / "model.safetensors"
    file.touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model(str(file)) == file
    assert resolve_model("~/model.safetensors") == file
    assert resolve_model("owner/name") == Path("owner/name")  # a folder here wins over the hub


def test_a_missing_path_suggests_its_neighbour(tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "qwen-image").mkdir()
    (tmp_path / "flux1-dev.safetensors").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    refused(str(tmp_path / "qwen_image"), "no such file or folder", "did you mean 'qwen-image'?")
    refused("./qwen-imag", "did you mean 'qwen-image'?")
    refused("~/qwen-imag", "did you mean 'qwen-image'?")
    refused("flux1-de.safetensors", "did you mean 'flux1-dev.safetensors'?")
    refused("Qwen-Imag", "owner/name", "did you mean 'qwen-image'?")
    refused("a/b/c", "no such file or folder")
    refused("models/x.gguf", "no such file or folder")
    refused(Path("owner/name"), "no such file or folder")
    refused("", "owner/name")
    assert hub.calls == []


def test_an_address_is_answered_with_the_id(hub: FakeHub) -> None:
    refused("https://huggingface.co/Qwen/Qwen-Image/tree/main", "'Qwen/Qwen-Image'")


# --- what is fetched ---------------------------------------------------------------------------------------------


def test_the_needed_files_and_no_other(hub: FakeHub) -> None:
    folder = resolve_model("owner/name")
    assert fetched(folder) == set(NEEDED)
    assert hub.calls[0]["allow_patterns"] == ["model_index.json", "config.json"]
    assert [call["revision"] for call in hub.calls] == [None, COMMIT]  # the branch cannot move in between
    assert not any(call["local_files_only"] for call in hub.calls)


def test_a_variant_where_there_is_one(hub: FakeHub) -> None:
    folder = resolve_model("owner/name", variant="fp16")
    plain = {f"vae/{BASE}.safetensors"}
    weights = {name for name in fetched(folder) if ".safetensors" in name}
    indices = {f"transformer/{BASE}.safetensors.index.json"}  # small, and named *.json like every config
    assert weights - indices == {*FP16, *plain}


def test_a_model_without_components(hub: FakeHub) -> None:
    hub.remote = ["config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "vocab.txt"]
    hub.remote += ["model.safetensors.index.json", "pytorch_model.bin", "model.fp16.safetensors", "onnx/model.onnx"]
    wanted = {name for name in hub.remote if not name.endswith((".bin", ".onnx", "fp16.safetensors"))}
    assert fetched(resolve_model("owner/name")) == wanted


def test_own_patterns(hub: FakeHub) -> None:
    folder = resolve_model("owner/name", allow_patterns=["flux1-dev.safetensors", "*.bin"])
    assert fetched(folder) == {"flux1-dev.safetensors"}


def test_revision(hub: FakeHub) -> None:
    resolve_model("owner/name@refs/pr/3")
    resolve_model("owner/name", revision="v1")
    resolve_model("owner/name@v1", revision="v1")
    assert [call["revision"] for call in hub.calls[::2]] == ["refs/pr/3", "v1", "v1"]
    assert {call["repo"] for call in hub.calls} == {"owner/name"}
    refused("owner/name@v1", "given twice", revision="v2")


def test_progress_and_offline_reach_the_library(hub: FakeHub) -> None:
    resolve_model("owner/name", progress=False, offline=True)
    assert all(call["local_files_only"] for call in hub.calls)
    bar = hub.calls[0]["tqdm_class"](total=3, desc="x", name="huggingface_hub.snapshot_download")
    assert bar.disable
    hub.calls.clear()
    resolve_model("owner/name")
    assert "tqdm_class" not in hub.calls[0]


def test_no_model_at_all(hub: FakeHub) -> None:
    hub.remote = ["README.md", "flux1-dev.safetensors"]
    refused("owner/name", "model_index.json", "config.json")


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff"])
def test_a_damaged_model_index(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("tests.checkpoint.test_hub.content", lambda name: text)
    with pytest.raises(ModelError, match="model_index.json: not a valid model index"):
        resolve_model("owner/name")


def test_component_names_cannot_leave_the_folder(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    index = {"..": ["a", "b"], "../x": ["a", "b"], "vae": ["diffusers", "AutoencoderKL"], "n": [1, 2], "e": []}
    monkeypatch.setattr("tests.checkpoint.test_hub.content", lambda name: json.dumps(index))
    resolve_model("owner/name")
    assert all(pattern.startswith("vae/") for pattern in hub.calls[1]["allow_patterns"])


def test_a_component_folder_that_is_not_there(hub: FakeHub) -> None:
    hub.remote = [name for name in NEEDED if not name.startswith("vae/")]
    refused("owner/name", "lacks vae", "model_index.json")


# --- failures ----------------------------------------------------------------------------------------------------


def response(status: int) -> httpx2.Response:
    return httpx2.Response(status, request=httpx2.Request("GET", "https://huggingface.co/api/models/owner/name"))


FAILURES: dict[str, tuple[Callable[[], Exception], list[str]]] = {
    "gated": (lambda: errors.GatedRepoError("403\nlong", response=response(403)), ["gated", "hf auth login"]),
    "missing": (lambda: errors.RepositoryNotFoundError("404\nlong", response=response(404)), ["no such model"]),
    "revision": (lambda: errors.RevisionNotFoundError("404\nlong", response=response(404)), ["no revision 'v9'"]),
    "invalid": (lambda: errors.HFValidationError("Repo id must\nnot"), ["not a valid hub id", "Repo id must"]),
    "network": (lambda: errors.LocalEntryNotFoundError("Got: x\ny"), ["cannot be reached", "local folder", "'v9'"]),
    "partial": (lambda: errors.IncompleteSnapshotError("a\nb", snapshot_path="/x"), ["only part of it"]),
    "server": (lambda: errors.HfHubHTTPError("503 Server\nmore", response=response(503)), ["503 Server"]),
    "cut": (lambda: httpx2.ReadTimeout("timed out\nhere"), ["download failed", "timed out"]),
    "proxy": (lambda: httpx2.ProxyError("407 Proxy"), ["download failed", "407 Proxy"]),
    "disk": (lambda: OSError(errno.ENOSPC, "No space left"), ["disk is full", "HF_HOME"]),
    "silent": (lambda: ConnectionError(), ["download failed", "ConnectionError"]),
}


@pytest.mark.parametrize("name", FAILURES)
def test_every_failure_is_one_line(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    make, words = FAILURES[name]

    def fail(*args: Any, **options: Any) -> str:
        raise make()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    refused("owner/name@v9", *words)


def test_our_own_bugs_stay_tracebacks(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> str:
        raise TypeError("a bug")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(TypeError, match="a bug"):
        resolve_model("owner/name")


# --- the real library, offline -----------------------------------------------------------------------------------


def test_offline_takes_the_cache(cache: Path) -> None:
    snapshot = plant(cache, {name: content(name) for name in NEEDED})
    assert resolve_model("owner/name") == snapshot
    assert resolve_model(f"owner/name@{COMMIT}") == snapshot
    assert resolve_model("owner/name@main", variant="fp16") == snapshot


def test_offline_and_not_in_the_cache(cache: Path) -> None:
    refused("owner/name", "not in the local cache", "HF_HUB_OFFLINE")
    plant(cache, {name: content(name) for name in NEEDED})
    refused("owner/name@v2", "not in the local cache", "'v2'")


def test_offline_and_only_partly_in_the_cache(cache: Path) -> None:
    snapshot = plant(cache, {name: content(name) for name in NEEDED if not name.startswith("transformer/")})
    refused("owner/name", "lacks transformer", "run once online")
    (snapshot / "model_index.json").unlink()
    refused("owner/name", "in the local cache")


def test_offline_and_known_to_be_incomplete(cache: Path) -> None:
    """The hub library keeps a listing of the repository: with it, every missing file is noticed."""
    plant(cache, {name: content(name) for name in NEEDED if name != f"vae/{BASE}.safetensors"})
    trees = cache / "models--owner--name" / "trees"
    trees.mkdir()
    files = {name: {"size": 2, "blob_id": "0" * 40} for name in [*NEEDED, *NOT_NEEDED]}
    (trees / f"{COMMIT}.json").write_text(json.dumps({"format_version": 1, "files": files}))
    refused("owner/name", "only part of it", "HF_HUB_OFFLINE")
