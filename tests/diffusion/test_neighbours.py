"""Other libraries' caches on hooked, compiled models: they work, find what they look for, and leave no harm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import FirstBlockCacheConfig

from omniloom.diffusion.compile import compile_report, regionally_compile, uncompile
from omniloom.diffusion.compile.matching import find_blocks
from omniloom.diffusion.hooks import HookError, HookRegistry, ModelHook, explain, validate
from tests.diffusion.blocks import Doubler, Graphs, inputs, model
from tests.fixtures.reference import load, run
from tests.fixtures.tiny import FAMILIES

ORDERS = ["hc", pytest.param("ch", marks=pytest.mark.slow)]  # h: hooks, c: compilation
CALL = FAMILIES["flux"].request(num_inference_steps=5)


class Counting(ModelHook):
    calls = 0

    def new_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.fn_ref.original_forward(*args, **kwargs)


@pytest.fixture
def pipe(tiny_folder: Callable[..., Any]) -> Any:
    return load(tiny_folder("flux", double=2, single=2))


def hook_and_compile(net: Any, order: str = "hc") -> list[Counting]:
    hooks = [Counting() for _ in find_blocks(net)]
    for step in order:
        if step == "c":
            regionally_compile(net, backend=Graphs(), dynamic=True)
        else:
            for match, hook in zip(find_blocks(net), hooks, strict=True):
                HookRegistry.get_or_create(match.module).register_hook("count", hook)
    return hooks


def undo(net: Any) -> None:
    for match in find_blocks(net):
        HookRegistry.get_or_create(match.module).remove_hook("count")
    uncompile(net)


def attributes(net: Any) -> list[set[str]]:
    return [set(module.__dict__) for module in net.modules()]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("order", ORDERS)
def test_cache_dit_finds_its_block_pattern_and_skips_blocks(pipe: Any, tiny_folder: Any, order: str) -> None:
    cache_dit = pytest.importorskip("cache_dit")

    def enable(pipe: Any) -> None:
        config = cache_dit.DBCacheConfig(
            Fn_compute_blocks=1, Bn_compute_blocks=0, max_warmup_steps=1, residual_diff_threshold=1e3
        )
        cache_dit.enable_cache(pipe, cache_config=config)

    net, plain = pipe.transformer, run(pipe, seed=1, **CALL)
    other = load(tiny_folder("flux", double=2, single=2))  # enabled twice on one model, it skips even first blocks
    enable(other)
    cached = run(other, seed=1, **CALL)
    assert relative(cached, plain) > 1e-4
    hooks = hook_and_compile(net, order)
    assert relative(run(pipe, seed=1, **CALL), plain) <= 1e-4
    before = [hook.calls for hook in hooks]
    enable(pipe)
    assert relative(run(pipe, seed=1, **CALL), cached) <= 1e-4
    ran = [hook.calls - old for hook, old in zip(hooks, before, strict=True)]
    assert ran[0] == 5 > min(ran) > 0  # the first block decides, others were skipped
    assert all(record.status == "compiled" for record in compile_report(net).values())
    cache_dit.disable_cache(pipe)
    assert relative(run(pipe, seed=1, **CALL), plain) <= 1e-4
    undo(net)
    assert explain(net) == []
    assert torch.equal(run(pipe, seed=1, **CALL), plain)


@pytest.mark.parametrize("order", ORDERS)
def test_diffusers_first_block_cache_over_hooks_and_compilation(pipe: Any, order: str) -> None:
    net, plain, config = pipe.transformer, run(pipe, seed=1, **CALL), FirstBlockCacheConfig(threshold=1e3)
    net.enable_cache(config)
    cached = run(pipe, seed=1, **CALL)
    net.disable_cache()
    assert relative(cached, plain) > 1e-4
    before = attributes(net)
    hooks = hook_and_compile(net, order)
    net.enable_cache(config)
    assert relative(run(pipe, seed=1, **CALL), cached) <= 1e-4
    calls = [hook.calls for hook in hooks]
    assert calls[0] == 5 > min(calls) > 0
    assert len(validate(net)) == len(hooks)  # each says that another library stands on top
    net.disable_cache()
    assert validate(net) == []
    assert relative(run(pipe, seed=1, **CALL), plain) <= 1e-4
    undo(net)
    assert torch.equal(run(pipe, seed=1, **CALL), plain)
    # diffusers leaves forward attributes of its own behind; of ours there is nothing
    assert [now - old - {"forward"} for now, old in zip(attributes(net), before, strict=True)] == [set()] * len(before)


def test_diffusers_cache_first_is_a_clear_refusal_to_compile(pipe: Any) -> None:
    net = pipe.transformer
    net.enable_cache(FirstBlockCacheConfig(threshold=1e3))
    cached = run(pipe, seed=1, **CALL)
    before = attributes(net)
    with pytest.raises(HookError, match=r"transformer_blocks.0: diffusers' hooks .* × compilation.*compile first"):
        regionally_compile(net, backend=Graphs())
    assert attributes(net) == before
    for match in find_blocks(net):  # our own hooks go around it
        HookRegistry.get_or_create(match.module).register_hook("count", Counting())
    assert torch.equal(run(pipe, seed=1, **CALL), cached)
    undo(net)
    assert attributes(net) == before
    net.disable_cache()
    regionally_compile(net, backend=Graphs())
    assert len(compile_report(net)) == 2


@pytest.mark.parametrize("below", ["plain", "hooked", "compiled", "both"])
def test_a_diffusers_hook_on_top_is_never_bypassed(below: str) -> None:
    """Its wrapper carries copies of all attributes of what it wraps, so it must not be taken for ours."""
    theirs = pytest.importorskip("diffusers.hooks.hooks")

    class Plus(theirs.ModelHook):
        def post_forward(self, module: Any, output: Any) -> Any:
            return output + 1

    net, graphs = model(blocks=1), Graphs()
    block, expected = net.blocks[0], net.blocks[0](inputs())
    ours = HookRegistry.get_or_create(block)
    if below in ("hooked", "both"):
        ours.register_hook("below", ModelHook())
    if below in ("compiled", "both"):
        regionally_compile(net, backend=graphs)
    registry = theirs.HookRegistry.check_if_exists_or_initialize(block)
    registry.register_hook(Plus(), "plus")
    on_top = block.forward
    assert torch.equal(block(inputs()), expected + 1)
    ours.register_hook("double", Doubler())
    inside = below in ("hooked", "both")  # then the chain lies below their wrapper, else around it
    for _ in range(2):
        assert torch.equal(block(inputs()), expected * 2 + 1 if inside else (expected + 1) * 2)
    ours.remove_hook("double")
    assert torch.equal(block(inputs()), expected + 1)
    assert block.forward is on_top
    assert graphs.runs == (4 if below in ("compiled", "both") else 0)
    if below != "hooked":
        uncompile(net)
        assert torch.equal(block(inputs()), expected + 1)
    registry.remove_hook("plus")
    if inside:
        ours.remove_hook("below")
    assert torch.equal(block(inputs()), expected)
