"""Registering, removing, order and outcomes of wrong input."""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import weakref
from typing import Any

import pytest
import torch

from omniloom.diffusion.hooks import HookError, HookRegistry, ModelHook, Phase
from tests.diffusion.blocks import Adder, Block, Doubler, Recorder, inputs, model, same_attributes


@pytest.fixture
def block() -> Block:
    return model(blocks=1).blocks[0]


def test_a_registry_without_hooks_leaves_nothing(block: Block) -> None:
    before = dict(block.__dict__)
    registry = HookRegistry.get_or_create(block)
    assert HookRegistry.check_if_exists_or_initialize(block) is registry
    assert same_attributes(block, before)
    assert registry.get_hook("none") is None


def test_attributes_while_hooked(block: Block) -> None:
    original = block.forward
    registry = HookRegistry.get_or_create(block)
    before = set(block.__dict__)
    registry.register_hook("hook", hook := Recorder())
    assert set(block.__dict__) - before == {"forward", "_omni_original_forward", "_hook_registry"}
    assert block._omni_original_forward == original
    assert block._hook_registry is registry
    assert hook.fn_ref.original_forward is block._omni_original_forward


@pytest.mark.parametrize("order", list(itertools.permutations("abc")))
def test_removing_the_last_hook_in_any_order_restores_the_attributes(block: Block, order: Any) -> None:
    before = dict(block.__dict__)
    x, registry = inputs(), HookRegistry.get_or_create(block)
    expected = block(x)
    for name, hook in (("a", Doubler()), ("b", Recorder()), ("c", Adder())):
        registry.register_hook(name, hook)
    for name in order:
        assert registry.remove_hook(name) is True
    assert same_attributes(block, before)
    assert torch.equal(block(x), expected)


def test_a_forward_of_the_instance_is_put_back(block: Block) -> None:
    block.forward = functools.partial(Block.forward, block, scale=3.0)
    before = dict(block.__dict__)
    registry = HookRegistry.get_or_create(block)
    registry.register_hook("hook", Doubler())
    assert torch.equal(block(inputs()), 2 * before["forward"](inputs()))
    registry.remove_hook("hook")
    assert same_attributes(block, before)


def test_several_hooks_replace_the_forward(block: Block) -> None:
    x = inputs()
    expected = block(x)
    registry = HookRegistry.get_or_create(block)
    registry.register_hook("b", Adder())
    registry.register_hook("a", Doubler())
    assert torch.equal(block(x), (expected + 1) * 2)
    assert registry.get_hook("b").fn_ref.original_forward is block._omni_original_forward
    assert registry.get_hook("a").fn_ref.original_forward is not block._omni_original_forward
    registry.remove_hook("b")
    assert registry.get_hook("a").fn_ref.original_forward is block._omni_original_forward
    assert torch.equal(block(x), expected * 2)


def test_order_is_phase_then_order_then_name(block: Block) -> None:
    log: list[str] = []
    registry = HookRegistry.get_or_create(block)
    registry.register_hook("z", Recorder("z", log), phase="cache")
    registry.register_hook("c", Recorder("c", log))
    registry.register_hook("b", Recorder("b", log))
    registry.register_hook("a", Recorder("a", log), order=5)
    registry.register_hook("y", Recorder("y", log), phase=Phase.TRACE)
    block(inputs())
    assert list(registry.hooks) == ["y", "z", "b", "c", "a"]
    assert log == [f"{n}.pre" for n in "yzbca"] + [f"{n}.post" for n in "acbzy"]


def test_hooks_that_override_nothing_are_not_called(block: Block) -> None:
    registry = HookRegistry.get_or_create(block)
    for name in "abcd":
        registry.register_hook(name, ModelHook())
    assert block.forward._live[2] is block._omni_original_forward
    assert registry.get_hook("a").fn_ref.original_forward is block._omni_original_forward


def test_an_override_on_the_instance_counts(block: Block) -> None:
    hook = ModelHook()
    hook.post_forward = lambda module, output: output * 0
    HookRegistry.get_or_create(block).register_hook("hook", hook)
    assert not block(inputs()).any()


class Failing(ModelHook):
    def __init__(self, returns: Any = None, error: bool = True) -> None:
        self.returns, self.error = returns, error
        self.detached = 0

    def initialize_hook(self, module: Any) -> Any:
        assert module._omni_original_forward is not None  # as a hook that looks at it expects
        if self.error:
            raise RuntimeError("cannot initialize")
        return self.returns

    def detach_hook(self, module: Any) -> Any:
        self.detached += 1
        return module


def rejected() -> list[tuple[str, Any, dict[str, Any], type[Exception], str]]:
    return [
        ("taken", Recorder(), {}, HookError, "remove_hook"),
        ("new", Recorder(), {"phase": "CACHED"}, HookError, "did you mean 'CACHE'"),
        ("new", Recorder(), {"phase": 7}, HookError, "allowed: TRACE"),
        ("new", Recorder(), {"order": "first"}, HookError, "whole number"),
        ("", Recorder(), {}, HookError, "name"),
        (Recorder(), "new", {}, HookError, "register_hook"),
        ("new", object(), {}, HookError, "ModelHook"),
        ("new", Failing(), {}, RuntimeError, "cannot initialize"),
        ("new", Failing(torch.nn.Identity(), error=False), {}, HookError, "another module"),
    ]


@pytest.mark.parametrize("case", range(len(rejected())))
@pytest.mark.parametrize("hooked", [False, True])
def test_a_rejected_registration_leaves_no_trace(block: Block, case: int, hooked: bool) -> None:
    name, hook, options, error, message = rejected()[case]
    registry = HookRegistry.get_or_create(block)
    if hooked or name == "taken":
        registry.register_hook("taken", Doubler())
    before, hooks, x = dict(block.__dict__), registry.hooks, inputs()
    expected = block(x)
    with pytest.raises(error, match=message):
        registry.register_hook(name, hook, **options)
    assert same_attributes(block, before)
    assert registry.hooks == hooks
    assert getattr(hook, "fn_ref", None) is None
    assert torch.equal(block(x), expected)


def test_a_hook_of_which_initialization_succeeded_is_detached_when_rejected(block: Block) -> None:
    hook = Failing(torch.nn.Identity(), error=False)
    with pytest.raises(HookError, match="another module"):
        HookRegistry.get_or_create(block).register_hook("hook", hook)
    assert hook.detached == 1


def test_one_replacing_hook_cannot_serve_two_modules() -> None:
    first, second = model(blocks=2).blocks
    hook = Doubler()
    HookRegistry.get_or_create(first).register_hook("hook", hook)
    with pytest.raises(HookError, match="one per module"):
        HookRegistry.get_or_create(second).register_hook("hook", hook)
    HookRegistry.get_or_create(first).remove_hook("hook")
    HookRegistry.get_or_create(second).register_hook("hook", hook)
    assert hook.fn_ref.original_forward is second._omni_original_forward


def test_absent_names_change_nothing(block: Block) -> None:
    before = dict(block.__dict__)
    registry = HookRegistry.get_or_create(block)
    assert registry.remove_hook("none") is False
    assert registry.reset_hook("none") is False
    assert registry.get_hook("none") is None
    assert same_attributes(block, before)


def test_reset_detach_and_refused_removal(block: Block) -> None:
    calls: list[str] = []

    class Hook(ModelHook):
        refuse = True

        def reset_state(self, module: Any) -> Any:
            calls.append("reset")

        def detach_hook(self, module: Any) -> Any:
            if self.refuse:
                raise RuntimeError("not now")
            calls.append("detach")

    registry = HookRegistry.get_or_create(block)
    registry.register_hook("hook", hook := Hook())
    assert registry.reset_hook("hook") is True
    with pytest.raises(RuntimeError, match="not now"):
        registry.remove_hook("hook")
    assert registry.get_hook("hook") is hook
    hook.refuse = False
    assert registry.remove_hook("hook") is True
    assert calls == ["reset", "detach"]


def test_an_assigned_fn_ref_stays(block: Block) -> None:
    registry = HookRegistry.get_or_create(block)
    registry.register_hook("hook", hook := Doubler())
    hook.fn_ref.original_forward = custom = lambda x: x
    registry.register_hook("other", Adder(), phase="cache")
    assert hook.fn_ref.original_forward is custom
    assert torch.equal(block(inputs()), inputs() * 2 + 1)


def test_a_foreign_wrapper_on_top_is_not_deleted(block: Block, caplog: pytest.LogCaptureFixture) -> None:
    x, registry = inputs(), HookRegistry.get_or_create(block)
    before, expected = dict(block.__dict__), block(x)
    registry.register_hook("hook", Doubler())
    inner = block.forward
    block.forward = wrapper = lambda *args: inner(*args) + 7
    with caplog.at_level(logging.WARNING):
        registry.remove_hook("hook")
    assert "passing through" in caplog.text
    assert block.forward is wrapper
    assert torch.equal(block(x), expected + 7)
    registry.register_hook("again", Doubler())
    assert torch.equal(block(x), expected * 2 + 7)
    block.forward = inner  # the other library takes its wrapper away
    registry.remove_hook("again")
    assert same_attributes(block, before)


def test_a_foreign_original_forward_is_refused(block: Block) -> None:
    block._omni_original_forward = block.forward
    with pytest.raises(HookError, match="not ours"):
        HookRegistry.get_or_create(block).register_hook("hook", Doubler())
    assert "forward" not in block.__dict__


def test_an_assigned_original_forward_is_called_from_then_on(block: Block) -> None:
    registry = HookRegistry.get_or_create(block)
    registry.register_hook("hook", hook := Doubler())
    block._omni_original_forward = mine = lambda x: x
    assert hook.fn_ref.original_forward is mine
    assert torch.equal(block(inputs()), inputs() * 2)
    registry.remove_hook("hook")
    assert block.forward is mine


def test_x2_a_class_swap_below_a_hook_is_not_bypassed(block: Block) -> None:
    """A wrapper that captured the original forward must not outlive a swap of the module's class."""

    class Swapped(Block):
        def forward(self, hidden_states: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return hidden_states * 10

    registry = HookRegistry.get_or_create(block)
    registry.register_hook("cast", Doubler(), phase="cast")
    block(inputs())
    block.__class__ = Swapped
    assert torch.equal(block(inputs()), inputs() * 20)
    assert registry.get_hook("cast").fn_ref.original_forward is block._omni_original_forward
    registry.remove_hook("cast")
    assert "forward" not in block.__dict__
    assert torch.equal(block(inputs()), inputs() * 10)


def test_a_registry_dies_with_its_module() -> None:
    block = model(blocks=1).blocks[0]
    registry = HookRegistry.get_or_create(block)
    registry.register_hook("hook", Doubler())
    alive = weakref.ref(registry), weakref.ref(block)
    del block, registry
    gc.collect()
    assert [ref() for ref in alive] == [None, None]
