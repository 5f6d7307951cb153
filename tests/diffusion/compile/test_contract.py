"""The contract of regional compilation, point by point, with a stand-in for the compiler where that is enough."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import nn

import omniloom.diffusion.compile as compile_module
from omniloom.diffusion.compile import compile_report, regionally_compile, uncompile
from omniloom.diffusion.hooks import HookRegistry, ModelHook
from tests.diffusion.blocks import Adder, Block, Doubler, Graphs, Recorder, inputs, model, same_attributes


class Calls:
    """Stands in for ``torch.compile``; the results count their calls."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.functions: list[Any] = []
        self.arguments: list[Any] = []
        self.runs = 0
        self.fail_at = fail_at

    def __call__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        if len(self.functions) == self.fail_at:
            raise RuntimeError("no compiler")
        self.functions.append(function)
        self.arguments.append((args, kwargs))

        def compiled(*a: Any, **k: Any) -> Any:
            self.runs += 1
            return function(*a, **k)

        return compiled


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    stand_in = Calls()
    monkeypatch.setattr(compile_module.torch, "compile", stand_in)
    return stand_in


def get(module: Any) -> HookRegistry:
    return HookRegistry.get_or_create(module)


def test_1_unhooked_block(calls: Calls) -> None:
    net = model()
    block, expected = net.blocks[0], net(inputs())
    before = block.forward
    assert regionally_compile(net, "positional", dynamic=True) is net
    assert calls.functions[0] == before  # the bound method itself
    assert calls.functions[0].__self__ is block
    assert calls.arguments == [(("positional",), {"dynamic": True})] * 3
    assert block.forward != before
    assert torch.equal(net(inputs()), expected)
    assert calls.runs == 3


def test_2_hooked_block(calls: Calls) -> None:
    net = model()
    block, expected = net.blocks[0], net(inputs())
    hooks = {name: hook for name, hook in (("a", ModelHook()), ("b", ModelHook()), ("c", ModelHook()))}
    for name, hook in hooks.items():
        get(block).register_hook(name, hook)
    hooks["b"].fn_ref.original_forward = custom = lambda x: x
    dispatcher, original = block.forward, block._omni_original_forward
    regionally_compile(net)
    assert calls.functions[0] is original
    assert block.forward is dispatcher
    assert block._omni_original_forward is not original
    assert hooks["a"].fn_ref.original_forward is block._omni_original_forward
    assert hooks["c"].fn_ref.original_forward is block._omni_original_forward
    assert hooks["b"].fn_ref.original_forward is custom
    assert torch.equal(net(inputs()), expected)
    assert calls.runs == 3


def test_3_hook_registered_after_compile() -> None:
    net, graphs = model(), Graphs()
    regionally_compile(net, backend=graphs)
    compiled = net.blocks[0].forward
    get(net.blocks[0]).register_hook("h", hook := Recorder())
    assert net.blocks[0]._omni_original_forward is compiled is hook.fn_ref.original_forward
    net(inputs())
    assert hook.log == ["hook.pre", "hook.post"]  # not traced
    assert len(graphs.graphs) == 1


@pytest.mark.parametrize("k", range(3))
def test_4_a_failure_on_the_kth_block_leaves_everything_untouched(monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    net = model()
    get(net.blocks[0]).register_hook("h", hook := Doubler())
    before = [dict(module.__dict__) for module in net.modules()]
    forward, original = net.blocks[0].forward, hook.fn_ref.original_forward
    monkeypatch.setattr(compile_module.torch, "compile", Calls(fail_at=k))
    with pytest.raises(RuntimeError, match="no compiler"):
        regionally_compile(net)
    assert all(same_attributes(m, b) for m, b in zip(net.modules(), before, strict=True))
    assert net.blocks[0].forward is forward
    assert hook.fn_ref.original_forward is original
    assert compile_report(net) == {}


def test_5_removing_the_hook_after_compile(calls: Calls) -> None:
    net = model()
    get(net.blocks[0]).register_hook("h", Doubler())
    regionally_compile(net)
    compiled = net.blocks[0]._omni_original_forward
    get(net.blocks[0]).remove_hook("h")
    assert net.blocks[0].forward is compiled
    assert set(net.blocks[0].__dict__) == set(net.blocks[1].__dict__)
    net(inputs())
    assert calls.runs == 3
    uncompile(net)
    assert "forward" not in net.blocks[0].__dict__


@pytest.mark.parametrize("real", [False, True])
def test_6_signature(monkeypatch: pytest.MonkeyPatch, real: bool) -> None:
    if not real:
        monkeypatch.setattr(compile_module.torch, "compile", lambda f, *a, **k: lambda *aa, **kk: f(*aa, **kk))
    expected = inspect.signature(Block().forward)
    plain, hooked, compiled, both = (model(blocks=1) for _ in range(4))
    for net in (hooked, both):
        get(net.blocks[0]).register_hook("h", Doubler())
    for net in (compiled, both):
        regionally_compile(net, backend=Graphs())
    for net in (plain, hooked, compiled, both):
        signature = inspect.signature(net.blocks[0].forward)
        assert signature == expected
        assert signature.return_annotation == expected.return_annotation
        assert list(signature.parameters) == ["hidden_states", "scale"]
        hash(net.blocks[0].forward)


class Wrapper(nn.Module):
    def __init__(self, attribute: str, inner: nn.Module) -> None:
        super().__init__()
        self.attribute = attribute
        setattr(self, attribute, inner)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, self.attribute)(*args, **kwargs)


@pytest.mark.parametrize("attribute", ["_fsdp_wrapped_module", "module", "_orig_mod"])
def test_7_wrappers_match(calls: Calls, attribute: str) -> None:
    net = model(blocks=2)
    net.blocks[0] = wrapper = Wrapper(attribute, net.blocks[0])
    regionally_compile(net)
    assert [function.__self__ for function in calls.functions] == [getattr(wrapper, attribute), net.blocks[1]]
    wrapper(inputs())
    assert calls.runs == 1


class Foreign(nn.Module):
    """A wrapper whose class is generated, so only its place tells that it is a block."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.hidden = inner

    def forward(self, *args: Any) -> Any:
        return self.hidden(*args)


class InLists(nn.Module):
    _repeated_blocks = ["Elsewhere"]
    _layerwise_offload_blocks_attrs = ["layers", "stack.parts"]

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Foreign(Block()), Foreign(Block())])
        self.others = nn.ModuleList([Foreign(Block())])
        self.stack = nn.Module()
        self.stack.parts = nn.ModuleList([Foreign(Block())])


def test_8_lists_match_whatever_the_class(calls: Calls) -> None:
    net = InLists()
    regionally_compile(net)
    assert [function.__self__ for function in calls.functions] == [*net.layers, *net.stack.parts]


@pytest.mark.parametrize("name", ["a", "0a", "-1", ""])
def test_9_only_numbers_match(calls: Calls, name: str) -> None:
    net = InLists()
    net.layers = nn.Module()
    net.layers.add_module(name or "x", Foreign(Block()))
    regionally_compile(net)
    assert [function.__self__ for function in calls.functions] == [*net.stack.parts]


def test_10_compiling_twice_is_idempotent(calls: Calls) -> None:
    net = model()
    get(net.blocks[0]).register_hook("h", Doubler())
    regionally_compile(net)
    before = [dict(module.__dict__) for module in net.modules()]
    regionally_compile(net)
    assert len(calls.functions) == 3
    assert all(same_attributes(m, b) for m, b in zip(net.modules(), before, strict=True))
    assert compile_report(net)["Block"].blocks == 3


def test_11_each_logical_block_once(calls: Calls) -> None:
    """One wrapped, one plain, and one with a listed class inside of a listed class."""
    net = model(blocks=3)
    wrapped, plain, outer = net.blocks
    net.blocks[0] = Wrapper("module", wrapped)
    outer.linear = Block()  # a block within the block
    net._layerwise_offload_blocks_attrs = ["blocks"]
    regionally_compile(net)
    assert [function.__self__ for function in calls.functions] == [wrapped, plain, outer]
    assert compile_report(net)["Block"].blocks == 3


@pytest.mark.parametrize("when", ["hooks first", "compile first"])
def test_12_graphs_are_one_per_class_and_free_of_hook_code(when: str) -> None:
    net, graphs = model(blocks=5, others=4), Graphs()
    expected = net(inputs())

    def hooks() -> None:
        for block in [*net.blocks, *net.others]:
            get(block).register_hook("add", Adder())
            get(block).register_hook("record", Recorder())

    if when == "hooks first":
        hooks()
    regionally_compile(net, backend=graphs)
    if when == "compile first":
        hooks()
    net(inputs())
    assert len(graphs.graphs) == 2
    assert graphs.runs == 9
    assert "logaddexp" not in graphs.operations
    for block in [*net.blocks, *net.others]:
        get(block).remove_hook("add")
        assert get(block).get_hook("record").log == ["hook.pre", "hook.post"]
    assert torch.equal(net(inputs()), expected)
    report = {name: record.to_dict() for name, record in compile_report(net).items()}
    assert {name: (r["blocks"], r["graphs"], r["graph_breaks"], r["recompiles"]) for name, r in report.items()} == {
        "Block": (5, 1, 0, 0),
        "OtherBlock": (4, 1, 0, 0),
    }


@pytest.mark.parametrize("when", ["before", "after", "after a call"])
def test_13_a_hook_on_a_child_of_a_compiled_block_breaks_the_graph_and_is_not_in_it(when: str) -> None:
    net, graphs = model(blocks=2), Graphs()
    register = get(net.blocks[0].linear).register_hook
    register("h", Adder())
    expected = net(inputs())
    if when != "before":
        get(net.blocks[0].linear).remove_hook("h")
    regionally_compile(net, backend=graphs)
    if when == "after a call":
        net(inputs())
    if when != "before":
        register("h", Adder())
    record = Recorder()
    register("r", record)
    for _ in range(2):
        assert torch.equal(net(inputs()), expected)
    assert "logaddexp" not in graphs.operations
    assert record.log == ["hook.pre", "hook.post"] * 2
    assert compile_report(net)["Block"].graph_breaks >= 1


@pytest.mark.parametrize("hooked", [False, True])
def test_14_a_copy_of_a_compiled_block_uses_its_own_weights(hooked: bool) -> None:
    net, graphs = model(blocks=1), Graphs()
    if hooked:
        get(net.blocks[0]).register_hook("h", Recorder())
    regionally_compile(net, backend=graphs)
    expected = net(inputs())
    twin = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    runs = graphs.runs
    assert not twin(inputs()).any()
    assert graphs.runs == runs
    assert compile_report(twin) == {}
    assert torch.equal(net(inputs()), expected)
    assert graphs.runs == runs + 1
    regionally_compile(twin, backend=graphs)
    assert not twin(inputs()).any()
    assert graphs.runs == runs + 2


def test_hooks_of_the_module_call_stay_outside() -> None:
    """Torch's own forward hooks run around ``forward``, which alone is compiled."""
    net, graphs, traced = model(blocks=2), Graphs(), []
    for block in net.blocks:
        block.register_forward_pre_hook(lambda *_: traced.append(torch.compiler.is_compiling()))
    regionally_compile(net, backend=graphs)
    net(inputs())
    assert traced == [False, False]
    assert len(graphs.graphs) == 1
