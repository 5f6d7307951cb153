"""The tiny pipelines are what the other tests believe them to be: stock folders whose every weight matters."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.fixtures.reference import final_latents, load, reference, run
from tests.fixtures.sensitivity import assert_sensitive, measure, relative_l2, zeroed
from tests.fixtures.tiny import FAMILIES, TinyFamily, build

BYTES = 6e6
LARGE = {  # widths that a test needs, or that the library fixes (a projection of 2048 x 2048)
    "flux-256": 16e6,
    "hunyuan-image-21": 21e6,
    "hunyuan-video-15": 21e6,
}
SAMPLES = {"qwen-image-edit": 3, "qwen-image-edit-plus": 2, "qwen-image-layered": 3}


def digests(folder: Path) -> dict[str, str]:
    """A hash per file of a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def quick(facts: TinyFamily, size: tuple[int, int]) -> dict[str, Any]:
    """What the gate adds to its calls."""
    return facts.gate(*size) if facts.gate else {}


@pytest.fixture(scope="module", params=list(FAMILIES))
def facts(request: pytest.FixtureRequest) -> TinyFamily:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def folder(facts: TinyFamily, tiny_folder: Callable[..., Path]) -> Path:
    return tiny_folder(facts.name)


@pytest.fixture(scope="module")
def pipe(folder: Path) -> Any:
    return load(folder)


def test_a_stock_folder_of_the_named_class(facts: TinyFamily, folder: Path, pipe: Any) -> None:
    assert type(pipe).__name__ == facts.pipeline_class
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < LARGE.get(facts.name, BYTES)


def test_building_twice_gives_the_same_bytes(facts: TinyFamily, folder: Path, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    again = build(facts.name, tmp_path / "again")
    assert digests(again) == digests(folder)
    assert torch.equal(torch.get_rng_state(), state)


def test_every_size_runs_and_repeats(facts: TinyFamily, pipe: Any) -> None:
    small, wide = (final_latents(pipe, facts.name, **facts.request(size, **quick(facts, size))) for size in facts.sizes)
    for latents in (small, wide):
        assert torch.isfinite(latents).all()
        assert latents.abs().max() < 100
    again = facts.request(**quick(facts, facts.sizes[0]))
    assert torch.equal(final_latents(pipe, facts.name, **again), small)


def test_every_task_decodes(facts: TinyFamily, folder: Path, pipe: Any) -> None:
    (height, width) = facts.sizes[1]
    for task in facts.tasks:
        same = facts.class_for(task) == facts.pipeline_class
        served = pipe if same else load(folder, pipeline_class=facts.class_for(task))
        result = np.asarray(run(served, output_type="np", **facts.request((height, width), task=task)))
        assert np.isfinite(result).all()
        assert tuple(result.shape[-3:-1]) == (height, width)
        assert result.std() > 0.02


def test_everything_matters(facts: TinyFamily, pipe: Any) -> None:
    assert_sensitive(pipe, facts.name, samples=SAMPLES.get(facts.name, 4))


def test_the_gate_sees_a_dead_block(tiny_folder: Callable[..., Path]) -> None:
    pipe = load(tiny_folder("flux"))
    before = measure(pipe, "flux", samples=1)
    with zeroed(pipe.transformer.proj_out.weight), pytest.raises(AssertionError, match="hardly move"):
        assert_sensitive(pipe, "flux", samples=2)
    assert measure(pipe, "flux", samples=1) == before


def test_reference_takes_one_seed_per_image(tiny_folder: Callable[..., Path]) -> None:
    request = FAMILIES["flux"].request(num_images_per_prompt=2)
    both = reference(tiny_folder("flux"), seed=[3, 4], **request)
    alone = reference(tiny_folder("flux"), seed=4, **FAMILIES["flux"].request())
    assert relative_l2(both[1:], alone) < 1e-5


def test_seeds_differ(tmp_path: Path, tiny_folder: Callable[..., Path]) -> None:
    other = build("flux", tmp_path / "other", seed=1)
    weights = "transformer/diffusion_pytorch_model.safetensors"
    assert digests(other)[weights] != digests(tiny_folder("flux"))[weights]


def test_an_unknown_family_is_named(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="no tiny family 'fluks'"):
        build("fluks", tmp_path)


def test_the_prompt_reaches_glm_image_through_its_autoregressive_stage(tiny_folder: Callable[..., Path]) -> None:
    facts, pipe = FAMILIES["glm-image"], load(tiny_folder("glm-image"))
    unquoted = [run(pipe, **facts.request(prompt=prompt)) for prompt in ("a red cat", "two boats")]
    assert relative_l2(*unquoted) > 1e-2


@pytest.mark.parametrize(
    ("name", "count"), [("qwen-image", 34), ("hunyuan-image-21", 34), ("qwen-image-edit-plus", 64)]
)
def test_templates_are_cut_where_the_prompt_starts(tiny_folder: Callable[..., Path], name: str, count: int) -> None:
    pipe = load(tiny_folder(name))
    head = pipe.prompt_template_encode.split("{}")[0]
    assert len(pipe.tokenizer(head).input_ids) == count == pipe.prompt_template_encode_start_idx


@pytest.mark.parametrize("name", ["flux-guidance", "flux2", "sd3", "wan22-t2v"])
def test_bfloat16_stays_close(tiny_folder: Callable[..., Path], name: str) -> None:
    request = FAMILIES[name].request()
    exact = reference(tiny_folder(name), **request)
    assert relative_l2(reference(tiny_folder(name), dtype=torch.bfloat16, **request).float(), exact) < 0.1


def test_outliers_can_be_made_larger(tmp_path: Path) -> None:
    pipe = load(build("flux", tmp_path / "spiky", outlier=50.0))
    assert torch.isfinite(run(pipe, **FAMILIES["flux"].request())).all()
    weight = pipe.transformer.transformer_blocks[0].attn.to_q.weight
    assert weight.abs().max() > 10 * weight.std()
