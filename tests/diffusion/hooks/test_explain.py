"""``explain`` lists what is in effect, ``validate`` what does not go together."""

from __future__ import annotations

from typing import Any

import pytest

from omniloom.diffusion.compile import CompilePolicy, compile_model, regionally_compile
from omniloom.diffusion.hooks import (
    HookError,
    HookRegistry,
    Lease,
    Middleware,
    ModelHook,
    StateManager,
    explain,
    validate,
)
from tests.diffusion.blocks import Doubler, Graphs, Model, Recorder, inputs, model


def get(module: Any) -> HookRegistry:
    return HookRegistry.get_or_create(module)


def test_explain_lists_the_effective_order_with_reasons() -> None:
    net = model(blocks=2)
    assert explain(net) == []
    get(net).install("lease", Lease())
    get(net.blocks[0]).register_hook("b", Doubler(), phase="cache")
    get(net.blocks[0]).register_hook("a", ModelHook())
    regionally_compile(net, backend=Graphs())
    root, first, second = explain(net)
    assert (root.path, [link.name for link in root.links], root.compute) == ("", ["lease"], "original")
    assert [(link.name, link.phase, link.active) for link in first.links] == [
        ("b", "CACHE", True),
        ("a", "COMPUTE", False),
    ]
    assert (second.path, second.links, second.compute) == ("blocks.1", (), "compiled")
    text = str(first)
    assert "blocks.0 (Block)" in text and "moves no bytes" in text and "overrides nothing" in text
    assert text.index(" b [hook]") < text.index(" a [hook]") < text.index("compiled forward")


def test_explain_names_a_foreign_wrapper() -> None:
    net = model(blocks=1)
    get(net.blocks[0]).register_hook("b", Doubler())
    inner = net.blocks[0].forward
    net.blocks[0].forward = lambda *args: inner(*args)
    [entry] = explain(net)
    assert entry.on_top is not None and "function" in str(entry)


def hook_inside_of_a_block(net: Model) -> str:
    regionally_compile(net, backend=Graphs())
    get(net.blocks[1].linear).register_hook("h", Recorder())
    return "blocks.1.linear: hook h × regional compilation of Block: .*breaks the graph.*; put the hook on the compiled"


def hook_inside_of_full(net: Model) -> str:
    compile_model(net, CompilePolicy("full"), backend=Graphs())
    get(net.blocks[1]).register_hook("h", Recorder())
    return 'blocks.1: hook h × full compilation of Model: .*granularity "regional"'


def module_compile(net: Model) -> str:
    get(net).register_hook("h", Recorder())
    net.compile(backend=Graphs())
    return r"\(root\): hooks × module.compile\(\)"


def foreign(net: Model) -> str:
    get(net.head).register_hook("h", Recorder())
    inner = net.head.forward
    net.head.forward = lambda x: inner(x)
    return "head: hooks × builtins.function"


def nested_lease(net: Model) -> str:
    get(net).install("lease", Lease())
    get(net.head).install("lease", Lease())
    return "head: LEASE × LEASE of Model"


def batch_in_lease(net: Model) -> str:
    get(net).install("lease", Lease())
    get(net.head).install("batch", Middleware(), phase="batch")
    return "head: BATCH × LEASE of Model: it would wait"


class Keeps(Middleware):
    def __init__(self) -> None:
        self.states = StateManager(dict)


def state_in_company(net: Model) -> str:
    get(net).install("batch", Middleware(), phase="batch")
    get(net.blocks[0]).install("cache", Keeps())
    return "blocks.0: cache × BATCH: .*joinable = True"


WARNINGS = [hook_inside_of_a_block, foreign, state_in_company]
ERRORS = [hook_inside_of_full, module_compile, nested_lease, batch_in_lease]


@pytest.mark.parametrize("case", WARNINGS)
def test_a_costly_pair_is_a_finding_and_an_error_when_strict(case: Any) -> None:
    net = model()
    message = case(net)
    [finding] = validate(net)
    assert not finding.error
    with pytest.raises(HookError, match=message):
        validate(net, strict=True)


@pytest.mark.parametrize("case", ERRORS)
def test_a_forbidden_pair_is_rejected_with_a_fix(case: Any) -> None:
    net = model()
    message = case(net)
    with pytest.raises(HookError, match=message):
        validate(net)


def test_a_cache_outside_of_batching_needs_no_row_map() -> None:
    net = model()
    get(net).install("batch", Middleware(), phase="batch")
    get(net).install("cache", Keeps(), phase="cache")
    get(net.blocks[0]).register_hook("plain", Recorder())
    assert validate(net, strict=True) == []
    net(inputs())
