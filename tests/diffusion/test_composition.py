"""Hooks and compilation in any order: equal outputs, and attributes that depend on (hooked, compiled) alone."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omniloom.diffusion.compile import compile_report, regionally_compile, uncompile
from omniloom.diffusion.compile.compiled import Compiled
from omniloom.diffusion.hooks import HookRegistry, ModelHook, Phase, transaction
from omniloom.diffusion.hooks.dispatcher import Dispatcher
from tests.diffusion.blocks import Adder, Doubler, Graphs, Model, Raiser, Recorder, inputs, model

MAKE: dict[str, Any] = {"add": Adder, "double": Doubler, "raise": Raiser, "record": Recorder}
NAMES = list(MAKE)
BACKEND = Graphs()
OURS = ("forward", "_omni_original_forward", "_hook_registry")


class Subject:
    """A model of two blocks of which the first gets hooks, and what is to be expected of it."""

    def __init__(self) -> None:
        self.model: Model = model(blocks=2)
        self.block = self.model.blocks[0]
        self.block.foreign_key = object()
        self.before = dict(self.block.__dict__)
        self.registry = HookRegistry.get_or_create(self.block)
        self.bare = self.block(inputs())
        self.hooks: dict[str, tuple[Phase, ModelHook]] = {}
        self.compiled = False

    def run(self, steps: list[tuple[str, ...]]) -> Subject:
        for name, *arguments in steps:
            getattr(self, name)(*arguments)
        return self

    def register(self, name: str, phase: Phase = Phase.COMPUTE) -> None:
        hook = MAKE[name]()
        self.registry.register_hook(name, hook, phase=phase)
        self.hooks[name] = (phase, hook)

    def remove(self, name: str) -> None:
        assert self.registry.remove_hook(name) is (name in self.hooks)
        self.hooks.pop(name, None)

    def compile(self) -> None:
        regionally_compile(self.model, backend=BACKEND)
        self.compiled = True

    def uncompile(self) -> None:
        uncompile(self.model)
        self.compiled = False

    def order(self) -> list[str]:
        return sorted(self.hooks, key=lambda name: (self.hooks[name][0], name))

    def check(self) -> None:
        expected = self.bare
        for name in reversed(self.order()):
            expected = {"add": expected + 1, "double": expected * 2}.get(name, expected)
        runs = BACKEND.runs
        assert torch.equal(self.block(inputs()), expected)
        assert BACKEND.runs - runs == self.compiled
        if "raise" in self.hooks:
            hook: Any = self.hooks["raise"][1]
            hook.armed = True
            with pytest.raises(RuntimeError, match="the hook failed"):
                self.block(inputs())
            hook.armed = False
        for name, (_, hook) in self.hooks.items():
            innermost = hook.fn_ref.original_forward is self.block._omni_original_forward
            assert innermost is (name == self.order()[-1])
        self.check_attributes()

    def check_attributes(self) -> None:
        attributes = self.block.__dict__
        assert {k: v for k, v in attributes.items() if k not in OURS} == self.before
        kinds = {key: type(attributes[key]) for key in OURS if key in attributes}
        if self.hooks:
            assert list(kinds.items()) == [
                ("forward", Dispatcher),
                ("_omni_original_forward", Compiled if self.compiled else type(self.check)),
                ("_hook_registry", HookRegistry),
            ]
        else:
            assert kinds == ({"forward": Compiled} if self.compiled else {})
        assert ("Block" in compile_report(self.model)) is self.compiled


@pytest.mark.parametrize("position", range(9))
def test_all_orders_of_register_compile_uncompile_remove(position: int) -> None:
    removals = list(itertools.permutations(NAMES))
    for registering, undo in itertools.product(removals, range(position, 9)):
        removing = removals[(removals.index(registering) * 7 + position * 9 + undo) % len(removals)]
        steps: list[tuple[str, ...]] = [("register", n) for n in registering] + [("remove", n) for n in removing]
        steps.insert(undo, ("uncompile",))
        steps.insert(position, ("compile",))
        subject = Subject().run(steps)
        subject.check()
        assert subject.block.__dict__ == subject.before


@pytest.mark.parametrize("position", [0, 2, 4, 6])
def test_every_removal_order_leaves_what_compiling_an_unhooked_block_leaves(position: int) -> None:
    plain = Subject().run([("compile",)])
    for removing in itertools.permutations(NAMES):
        steps: list[tuple[str, ...]] = [("register", n) for n in NAMES] + [("remove", n) for n in removing]
        steps.insert(position, ("compile",))
        subject = Subject().run(steps)
        subject.check()
        assert set(subject.block.__dict__) == set(plain.block.__dict__)
        assert type(subject.block.forward) is type(plain.block.forward)


OPERATIONS = st.one_of(
    st.tuples(st.just("register"), st.sampled_from(NAMES), st.sampled_from([Phase.CACHE, Phase.CAST, Phase.COMPUTE])),
    st.tuples(st.just("remove"), st.sampled_from(NAMES)),
    st.tuples(st.just("compile")),
    st.tuples(st.just("uncompile")),
    st.tuples(st.just("copy")),
    st.tuples(st.just("undone")),
)


@given(st.lists(OPERATIONS, max_size=12))
@settings(max_examples=100)
def test_any_sequence_of_operations(operations: list[tuple[Any, ...]]) -> None:
    subject = Subject()
    for name, *arguments in operations:
        if name == "register" and arguments[0] in subject.hooks:
            with pytest.raises(ValueError, match="is there already"):
                subject.registry.register_hook(arguments[0], ModelHook())
        elif name == "copy":
            expected = subject.block(inputs())
            twin = copy.deepcopy(subject.model)
            runs = BACKEND.runs
            assert torch.equal(twin.blocks[0](inputs()), expected)
            assert BACKEND.runs == runs
            assert set(HookRegistry.get_or_create(twin.blocks[0]).hooks) == set(subject.hooks)
        elif name == "undone":
            with pytest.raises(KeyError), transaction(subject.model):
                for other in NAMES:
                    subject.registry.remove_hook(other)
                subject.registry.register_hook("new", Doubler())
                (uncompile if subject.compiled else regionally_compile)(subject.model)
                raise KeyError
        else:
            getattr(subject, name)(*arguments)
        subject.check()
