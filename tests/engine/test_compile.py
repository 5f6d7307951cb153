"""Compilation through the engine: the option, the report, and results that stay."""

from __future__ import annotations

import asyncio

import pytest
import torch

from omniloom import Omni, SamplingParams
from omniloom.config import RuntimeConfig
from omniloom.errors import ConfigError, OmniloomError
from tests.engine.asking import asked
from tests.fixtures.reference import load
from tests.fixtures.sensitivity import relative_l2
from tests.fixtures.tiny import FAMILIES

EAGER_BACKEND = {"granularity": "regional", "backend": "eager"}  # captures graphs, runs them as they are


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Graphs of other tests must not serve here."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_a_string_is_the_granularity() -> None:
    for given in ("regional", {"granularity": "regional"}):
        assert RuntimeConfig.resolve(python={"compile": given}).compile.granularity == "regional"
    merged = RuntimeConfig.resolve(file={"compile": {"dynamic": False}}, cli={"compile": "full"}).compile
    assert (merged.granularity, merged.dynamic) == ("full", False)
    with pytest.raises(ConfigError, match="did you mean 'regional'"):
        RuntimeConfig.resolve(python={"compile": "regionl"})
    with pytest.raises(ConfigError, match="did you mean 'dynamic'"):
        RuntimeConfig.resolve(python={"compile": {"dynamik": True}})


@pytest.mark.parametrize("family", ["flux", "z-image", "wan22-t2v", "qwen-image"])
def test_captured_graphs_give_the_same_and_are_reported(tiny_folder, family: str) -> None:
    facts = FAMILIES[family]
    prompt, params = asked(facts.request(), seed=1, output_type="latent")
    with Omni(tiny_folder(family), dtype="float32", device="cpu") as omni:
        [eager] = omni.generate(prompt, params)
    with Omni(tiny_folder(family), dtype="float32", device="cpu", compile=EAGER_BACKEND) as omni:
        assert {r["status"] for c in omni.report.to_dict()["compile"].values() for r in c.values()} == {"waiting"}
        [compiled] = omni.generate(prompt, params)
        report = omni.report.to_dict()["compile"]
    assert relative_l2(compiled.latents if compiled.latents is not None else 0, eager.latents) <= 1e-4
    expected = {"transformer", "transformer_2"} if family == "wan22-t2v" else {"transformer"}
    assert set(report) == expected
    records = [record for component in report.values() for record in component.values()]
    assert all(record["status"] == "compiled" and record["fallbacks"] == 0 for record in records)
    kinds = len({label for component in report.values() for label in component})
    assert sum(record["graphs"] for record in records) >= kinds  # equal blocks of two transformers share one
    assert omni.report.to_dict()["compile"] == report  # readable after unloading


def test_an_adopted_pipeline_gets_its_modules_back(tiny_folder) -> None:
    pipe = load(tiny_folder("flux"))
    modules = list(pipe.transformer.modules())
    before = [dict(vars(module)) for module in modules]
    with Omni.from_pipeline(pipe, compile=EAGER_BACKEND, vae={"tiling": True}):
        assert any("forward" in vars(module) for module in modules) and pipe.vae.use_tiling
    assert [dict(vars(module)) for module in modules] == before
    assert not pipe.vae.use_tiling
    with pytest.raises(OmniloomError):
        Omni.from_pipeline(pipe, compile={**EAGER_BACKEND, "backend": "no-such-backend"})
    assert [dict(vars(module)) for module in modules] == before


@pytest.mark.slow
def test_inductor_on_tiny_flux(tiny_folder) -> None:
    params = SamplingParams(
        num_inference_steps=2, height=32, width=32, seed=1, output_type="latent", max_sequence_length=16
    )
    with Omni(tiny_folder("flux"), dtype="float32", device="cpu") as omni:
        [eager] = omni.generate("a fox", params)
    with Omni(tiny_folder("flux"), dtype="float32", device="cpu", compile="regional") as omni:
        outputs = asyncio.run(omni.agenerate(["a fox", "a fox"], params))
        assert all(relative_l2(out.latents, eager.latents) <= 1e-4 for out in outputs)
        assert torch.equal(outputs[0].latents, outputs[1].latents)
