"""Native middlewares: short circuits, exceptions, changes during a call."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from omniloom.diffusion.hooks import HookError, HookRegistry, Middleware, ModelHook, Phase
from omniloom.errors import UserError
from tests.diffusion.blocks import Block, Recorder, inputs, model


@pytest.fixture
def registry() -> HookRegistry:
    return HookRegistry.get_or_create(model(blocks=1).blocks[0])


class Noted(Middleware):
    def __init__(self, name: str, log: list[str], answer: Any = None) -> None:
        self.name, self.log, self.answer = name, log, answer

    def __call__(self, call_next: Any, module: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.log.append(f"+{self.name}")
        try:
            return call_next(*args, **kwargs) if self.answer is None else self.answer
        finally:
            self.log.append(f"-{self.name}")


def test_phases_are_ordered_and_leave_room() -> None:
    names = ["TRACE", "CANCEL", "CACHE", "BATCH", "LEASE", "SPLIT", "PLACEMENT", "CAST", "COMPUTE"]
    assert [phase.name for phase in sorted(Phase)] == names
    assert min(b - a for a, b in zip(sorted(Phase), sorted(Phase)[1:], strict=False)) > 1
    assert Phase.of("cache") is Phase.of(Phase.CACHE) is Phase.of(int(Phase.CACHE))
    with pytest.raises(HookError) as caught:
        Phase.of(None)
    assert isinstance(caught.value, UserError) and isinstance(caught.value, ValueError)


def test_many_middlewares_may_answer_themselves(registry: HookRegistry) -> None:
    log: list[str] = []
    for name, phase, answer in (("t", "trace", None), ("c", "cache", 1), ("d", "cache", 2), ("p", "placement", None)):
        registry.install(name, Noted(name, log, answer), phase=phase)
    assert registry.module(inputs()) == 1
    assert log == ["+t", "+c", "-c", "-t"]
    registry.remove_hook("c")
    assert registry.module(inputs()) == 2
    registry.remove_hook("d")
    log.clear()
    assert torch.is_tensor(registry.module(inputs()))
    assert log == ["+t", "+p", "-p", "-t"]


@pytest.mark.parametrize("failing", ["compute", "inner", "outer"])
def test_an_exception_unwinds_all_that_was_entered(registry: HookRegistry, failing: str) -> None:
    log: list[str] = []

    class Hook(ModelHook):
        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            log.append("pre")
            return args, kwargs

        def unwind(self, module: Any, error: BaseException) -> None:
            log.append(f"unwind {error}")

    def fail(call_next: Any, module: Any, /, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(failing)

    registry.install("n", Noted("n", log), phase="cancel")
    registry.register_hook("h", Hook(), phase="cast")
    if failing == "compute":
        registry.module.linear.forward = lambda x: fail(None, None)
    else:
        registry.install("fail", fail, phase="compute" if failing == "inner" else "cache")
    with pytest.raises(RuntimeError, match=failing):
        registry.module(inputs())
    assert log == (["+n", "-n"] if failing == "outer" else ["+n", "pre", f"unwind {failing}", "-n"])


def test_unwind_is_not_called_for_a_hook_that_was_not_entered_or_has_left(registry: HookRegistry) -> None:
    log: list[str] = []

    class Hook(ModelHook):
        where = "pre"

        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            if self.where == "pre":
                raise RuntimeError("pre")
            return args, kwargs

        def post_forward(self, module: Any, output: Any) -> Any:
            raise RuntimeError("post")

        def unwind(self, module: Any, error: BaseException) -> None:
            log.append(str(error))

    registry.register_hook("h", hook := Hook())
    for hook.where in ("pre", "post"):
        with pytest.raises(RuntimeError, match=hook.where):
            registry.module(inputs())
    assert log == []


def test_the_chain_is_composed_when_it_changes_not_per_call(registry: HookRegistry, monkeypatch: Any) -> None:
    registry.install("a", Middleware())
    monkeypatch.setattr(registry, "refresh", lambda: pytest.fail("composed during a call"))
    for _ in range(3):
        registry.module(inputs())


def test_a_hook_may_remove_itself_during_its_call(registry: HookRegistry) -> None:
    class Once(ModelHook):
        def new_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            registry.remove_hook("once")
            return self.fn_ref.original_forward(*args, **kwargs) * 2

    expected = registry.module(inputs())
    registry.register_hook("once", Once())
    assert torch.equal(registry.module(inputs()), expected * 2)
    assert torch.equal(registry.module(inputs()), expected)
    assert "forward" not in registry.module.__dict__


@pytest.mark.parametrize("wrong", [None, 3, ModelHook()])
def test_install_takes_callables(registry: HookRegistry, wrong: Any) -> None:
    with pytest.raises(HookError, match="callable"):
        registry.install("n", wrong)


def test_changes_while_other_threads_call() -> None:
    block: Block = model(blocks=1).blocks[0]
    expected, x = block(inputs()), inputs()
    registry = HookRegistry.get_or_create(block)
    stop, wrong = threading.Event(), []

    def work() -> None:
        while not stop.is_set():
            output = block(x)
            if not torch.equal(output, expected):
                wrong.append(output)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(300):
        registry.register_hook("r", Recorder())
        registry.install("n", Middleware(), phase="cache")
        registry.remove_hook("r" if number % 2 else "n")
        registry.remove_hook("n" if number % 2 else "r")
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert "forward" not in block.__dict__


def test_neighbours_that_share_a_frame_keep_their_places(registry: HookRegistry) -> None:
    log: list[str] = []
    hooks = {name: Recorder(name, log) for name in "abcd"}
    for name, hook in hooks.items():
        registry.register_hook(name, hook)
    registry.install("bb", Noted("bb", log))
    registry.module(inputs())
    whole = ["a.pre", "b.pre", "+bb", "c.pre", "d.pre", "d.post", "c.post", "-bb", "b.post", "a.post"]
    assert log == whole
    log.clear()
    hooks["b"].fn_ref.original_forward(inputs())  # what b calls next: the rest of the chain
    assert log == whole[2:-2]
    log.clear()
    hooks["c"].fn_ref.original_forward(inputs())
    assert log == ["d.pre", "d.post"]
