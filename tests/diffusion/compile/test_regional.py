"""What regional compilation does beyond the contract: nothing to do, undoing, replaced blocks, refusals."""

from __future__ import annotations

import copy
import functools
import logging
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from omniloom.diffusion.compile import (
    CompilePolicy,
    Granularity,
    compile_model,
    compile_report,
    regionally_compile,
    uncompile,
)
from omniloom.diffusion.hooks import HookError, HookRegistry
from omniloom.errors import ConfigError
from tests.diffusion.blocks import Block, Doubler, Graphs, Recorder, inputs, model, same_attributes


def get(module: Any) -> HookRegistry:
    return HookRegistry.get_or_create(module)


@pytest.mark.parametrize("names", [None, [], "Absent"])
def test_nothing_to_compile_is_a_warning_or_an_error(caplog: pytest.LogCaptureFixture, names: Any) -> None:
    net = model()
    net._repeated_blocks = names
    before = [dict(module.__dict__) for module in net.modules()]
    with caplog.at_level(logging.WARNING):
        assert regionally_compile(net, backend=Graphs()) is net
    assert "stays uncompiled" in caplog.text and "_repeated_blocks" in caplog.text or "Absent" in caplog.text
    with pytest.raises(HookError, match="_repeated_blocks"):
        compile_model(net, CompilePolicy(strict=True), backend=Graphs())
    assert all(same_attributes(m, b) for m, b in zip(net.modules(), before, strict=True))


def test_a_module_without_repeated_blocks_at_all() -> None:
    assert regionally_compile(linear := nn.Linear(2, 2)) is linear


def test_own_list_names_win_and_leave_the_offload_attribute_alone() -> None:
    net = model(blocks=2)
    net._repeated_blocks = ["None"]
    net._layerwise_offload_blocks_attrs = ["blocks"]
    net._regional_compile_blocks_attrs = []
    regionally_compile(net, backend=Graphs())
    assert compile_report(net) == {}
    net._regional_compile_blocks_attrs = ["blocks"]
    regionally_compile(net, backend=Graphs())
    assert compile_report(net)["Block"].blocks == 2
    assert net._layerwise_offload_blocks_attrs == ["blocks"]


@pytest.mark.parametrize("steps", ["cHuh", "Hcuh", "Hchu", "cHhu", "cu", "cHucuh"])
def test_uncompile_restores_exactly(steps: str) -> None:
    """c: compile, H: hook, u: uncompile, h: unhook."""
    net = model()
    net.blocks[1].forward = functools.partial(Block.forward, net.blocks[1], scale=2.0)
    before, expected = [dict(module.__dict__) for module in net.modules()], net(inputs())
    for step in steps:
        if step == "c":
            regionally_compile(net, backend=Graphs())
        elif step == "u":
            assert uncompile(net) is net
        for block in net.blocks:
            if step == "H":
                get(block).register_hook("h", Recorder())
            elif step == "h":
                get(block).remove_hook("h")
        assert torch.equal(net(inputs()), expected)
    assert all(same_attributes(m, b) for m, b in zip(net.modules(), before, strict=True))
    assert compile_report(net) == {}


def test_a_foreign_dispatcher_without_a_registry() -> None:
    """Another library's wrapper that keeps the callable in ``_omni_original_forward``."""
    net, graphs = model(blocks=1), Graphs()
    block, expected = net.blocks[0], net(inputs())
    block._omni_original_forward = original = block.forward
    block.forward = wrapper = lambda *args: block._omni_original_forward(*args)
    regionally_compile(net, backend=graphs)
    assert block.forward is wrapper
    assert block._omni_original_forward is not original
    assert torch.equal(net(inputs()), expected)
    assert graphs.runs == 1
    uncompile(net)
    assert block._omni_original_forward is original


def test_a_wrapper_set_over_the_compiled_forward_stays() -> None:
    net, graphs = model(blocks=1), Graphs()
    block, expected = net.blocks[0], net(inputs())
    regionally_compile(net, backend=graphs)
    inner = block.forward
    block.forward = wrapper = lambda *args: inner(*args)
    regionally_compile(net, backend=graphs)  # it is compiled, below
    assert compile_report(net)["Block"].blocks == 1
    get(block).register_hook("h", Recorder())
    assert torch.equal(net(inputs()), expected)
    assert graphs.runs == 1
    get(block).remove_hook("h")
    assert block.forward is wrapper
    uncompile(net)
    assert block.forward is wrapper
    assert torch.equal(net(inputs()), expected)
    assert graphs.runs == 1


def test_blocks_that_were_replaced_meanwhile_are_compiled_by_the_next_call() -> None:
    net, graphs = model(blocks=2), Graphs()
    regionally_compile(net, backend=graphs)
    net.blocks[0] = copy.deepcopy(net.blocks[1])
    net(inputs())
    assert graphs.runs == 1
    regionally_compile(net, backend=graphs)
    net(inputs())
    assert graphs.runs == 3
    assert len(graphs.graphs) == 1
    assert sorted(compile_report(net)) == ["Block", "Block (2)"]


def test_x2_a_class_swap_of_a_compiled_block_is_not_bypassed(caplog: pytest.LogCaptureFixture) -> None:
    class Swapped(Block):
        def forward(self, hidden_states: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return hidden_states * 10

    for hooked in (False, True):
        block_model = model(blocks=1)
        block = block_model.blocks[0]
        if hooked:
            get(block).register_hook("h", Doubler())
        regionally_compile(block_model, backend=Graphs())
        block(inputs())
        block.__class__ = Swapped
        assert torch.equal(block(inputs()), inputs() * (20 if hooked else 10))
        assert compile_report(block_model) == {}
        assert "another forward" in caplog.text
        assert hooked or "forward" not in block.__dict__


def test_a_compiled_model_can_be_pickled() -> None:
    net = model(blocks=1)
    expected = net(inputs())
    regionally_compile(net, backend=Graphs())
    twin = pickle.loads(pickle.dumps(net))
    assert torch.equal(twin(inputs()), expected)
    assert twin.blocks[0].forward.__self__ is twin.blocks[0]


def test_diffusers_own_hooks_under_a_compiled_block_are_refused() -> None:
    hooks = pytest.importorskip("diffusers.hooks.hooks")
    net = model()
    registry = hooks.HookRegistry.check_if_exists_or_initialize(net.blocks[1])
    regionally_compile(net, backend=Graphs())  # a registry without hooks is no obstacle
    uncompile(net)
    registry.register_hook(hooks.ModelHook(), "cast")
    before = [dict(module.__dict__) for module in net.modules()]
    with pytest.raises(HookError, match=r"blocks.1: diffusers' hooks \(cast\).*compile first"):
        regionally_compile(net, backend=Graphs())
    assert all(same_attributes(m, b) for m, b in zip(net.modules(), before, strict=True))


class TestGranularity:
    def test_none_does_nothing(self) -> None:
        net = model()
        assert compile_model(net, CompilePolicy("none", strict=True)) == {}
        assert compile_report(net) == {}

    @pytest.mark.parametrize("when", ["before", "after"])
    def test_full_is_one_graph_and_the_roots_hooks_stay_outside(self, when: str) -> None:
        net, graphs = model(), Graphs()
        expected = net(inputs())
        hook = Recorder()
        if when == "before":
            get(net).register_hook("h", hook)
        compile_model(net, CompilePolicy(Granularity.FULL), backend=graphs)
        if when == "after":
            get(net).register_hook("h", hook)
        assert torch.equal(net(inputs()), expected)
        assert (len(graphs.graphs), graphs.runs, hook.log) == (1, 1, ["hook.pre", "hook.post"])
        assert compile_report(net)["Model"].to_dict()["granularity"] == "full"
        uncompile(net)
        get(net).remove_hook("h")
        assert "forward" not in net.__dict__

    def test_full_refuses_hooks_inside(self) -> None:
        net = model()
        get(net.blocks[1]).register_hook("offload", Recorder())
        with pytest.raises(HookError, match='blocks.1: the hooks offload × full compilation.*"regional"'):
            compile_model(net, CompilePolicy("full"), backend=Graphs())
        assert "forward" not in net.__dict__

    def test_full_refuses_compiled_blocks(self) -> None:
        net = model()
        regionally_compile(net, backend=Graphs())
        with pytest.raises(HookError, match="blocks.0 is compiled already"):
            compile_model(net, CompilePolicy("full"), backend=Graphs())

    def test_regional_refuses_what_is_compiled_as_a_whole(self) -> None:
        net = model()
        compile_model(net, CompilePolicy("full"), backend=Graphs())
        compile_model(net, CompilePolicy("full"), backend=Graphs())
        with pytest.raises(HookError, match="compiled as a whole"):
            regionally_compile(net, backend=Graphs())
        assert list(compile_report(net)) == ["Model"]

    def test_strict_regional_refuses_hooks_inside_of_blocks(self) -> None:
        net = model()
        get(net.blocks[1].norm).register_hook("h", Recorder())
        with pytest.raises(HookError, match=r"hooks inside of the block \(norm\)"):
            compile_model(net, CompilePolicy(strict=True), backend=Graphs())

    @pytest.mark.parametrize("wrong", [{"granularity": "whole"}, {"budget": -1}, {"budget": True}, {"budget": 1.5}])
    def test_wrong_policies(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ConfigError):
            CompilePolicy(**wrong)


def test_compiled_blocks_stay_their_own_in_a_model_that_its_user_compiles() -> None:
    net, graphs, outer = model(), Graphs(), Graphs()
    expected = net(inputs())
    regionally_compile(net, backend=graphs)
    whole = torch.compile(net, backend=outer)
    assert torch.equal(whole(inputs()), expected)
    assert graphs.runs == 3 and len(graphs.graphs) == 1
    assert "layer_norm" not in outer.operations


def test_a_wrapper_does_not_hide_blocks_beside_its_own() -> None:
    net = model(blocks=2)
    net.module = net.blocks[0]
    regionally_compile(net, backend=Graphs())
    assert compile_report(net)["Block"].blocks == 2


def test_a_block_that_is_compiled_in_place_is_refused() -> None:
    net = model()
    net.blocks[1].compile(backend=Graphs())
    with pytest.raises(HookError, match=r"blocks.1: module.compile\(\) × regional"):
        regionally_compile(net, backend=Graphs())
    assert compile_report(net) == {}
