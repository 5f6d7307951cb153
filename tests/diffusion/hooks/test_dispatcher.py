"""What stands in ``module.forward``: it cannot be told from the original, and it copies."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle

import pytest
import torch

from omniloom.diffusion.hooks import HookRegistry, ModelHook, Phase
from tests.diffusion.blocks import Block, Doubler, Recorder, inputs, model


def hooked(hook: ModelHook | None = None) -> Block:
    block = model(blocks=1).blocks[0]
    HookRegistry.get_or_create(block).register_hook("hook", hook or Doubler())
    return block


def test_signature_with_annotations_and_return_annotation() -> None:
    plain, block = model(blocks=1).blocks[0], hooked()
    assert inspect.signature(block.forward) == inspect.signature(plain.forward)
    assert inspect.signature(block.forward).return_annotation == inspect.signature(plain.forward).return_annotation
    assert block.forward.__name__ == "forward"
    assert block.forward.__doc__ == plain.forward.__doc__
    assert block.forward.__wrapped__ is block._omni_original_forward
    assert block.forward.__func__ is Block.forward
    assert block.forward.__self__ is block


def test_hashable() -> None:
    block = hooked()
    assert {block.forward: 1}[block.forward] == 1
    assert functools.cache(lambda forward: forward)(block.forward) is block.forward


def test_a_deep_copy_has_its_own_hooks_and_weights() -> None:
    block = model(blocks=1).blocks[0]
    HookRegistry.get_or_create(block).register_hook("a", Recorder("a"))
    HookRegistry.get_or_create(block).register_hook("double", Doubler())
    HookRegistry.get_or_create(block).install("native", passing, phase=Phase.TRACE)
    twin = copy.deepcopy(torch.nn.Sequential(block))[0]
    with torch.no_grad():
        twin.linear.weight.zero_()
    registry = HookRegistry.get_or_create(twin)
    assert registry is twin._hook_registry is not block._hook_registry
    assert twin.forward is registry.dispatcher is not block.forward
    assert registry.get_hook("a") is not block._hook_registry.get_hook("a")
    assert registry.get_hook("double").fn_ref.original_forward is twin._omni_original_forward
    assert list(registry.hooks) == list(block._hook_registry.hooks) == ["native", "a", "double"]
    twin.linear.bias.data.zero_()
    twin.norm.bias.data.zero_()
    assert torch.equal(twin(inputs()), inputs() * 2)
    assert not torch.equal(block(inputs()), inputs() * 2)
    for name in list(registry.hooks):
        registry.remove_hook(name)
    assert "forward" not in twin.__dict__
    assert block.forward is block._hook_registry.dispatcher


def passing(call_next, module, /, *args, **kwargs):
    return call_next(*args, **kwargs)


def test_a_copy_of_a_wrapped_forward_is_bound_to_the_copy() -> None:
    block = model(blocks=1).blocks[0]
    block.forward = functools.partial(Block.forward, block)
    HookRegistry.get_or_create(block).register_hook("hook", Doubler())
    twin = copy.deepcopy(block)
    assert twin._omni_original_forward.args == (twin,)


def test_pickling_a_hooked_module_says_what_to_do() -> None:
    with pytest.raises(TypeError, match="remove the hooks"):
        pickle.dumps(hooked())


def test_keyword_arguments_may_have_any_name() -> None:
    class Odd(torch.nn.Module):
        def forward(self, x, *, call_next=0, entry=0, args=0, kwargs=0):
            return x, call_next, entry, args, kwargs

    module = Odd()
    HookRegistry.get_or_create(module).install("native", passing)
    assert module(1, call_next=2, entry=3, args=4, kwargs=5) == (1, 2, 3, 4, 5)


def test_a_forward_that_is_no_method() -> None:
    class Callable_:
        def __call__(self, x):
            return x + 1

    class Odd(torch.nn.Module):
        forward = Callable_()

    module = Odd()
    HookRegistry.get_or_create(module).register_hook("double", Doubler())
    assert module(1) == module(1) == 4
    HookRegistry.get_or_create(module).remove_hook("double")
    assert module(1) == 2
    assert "forward" not in module.__dict__


def test_a_hook_that_is_copied_alone_is_not_registered() -> None:
    block = hooked(hook := Doubler())
    other = copy.deepcopy(hook)
    assert other.fn_ref is None
    HookRegistry.get_or_create(block).register_hook("other", other)
    assert other.fn_ref.original_forward is block._omni_original_forward
