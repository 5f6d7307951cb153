"""State belongs to (request, branch, stack); what is not identified has none."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest

from omniloom.diffusion.hooks import (
    CallContext,
    Middleware,
    ModelHook,
    Rows,
    StateManager,
    calling,
    current_call,
    current_rows,
    held,
    is_joinable,
    joint,
    release,
)


class State:
    def __init__(self, start: int = 0, step: int = 1) -> None:
        self.value, self.step = start, step


@pytest.fixture
def states() -> StateManager:
    return StateManager(State, (5,), {"step": 2})


def test_an_unknown_context_has_no_state(states: StateManager) -> None:
    assert current_call() is None
    assert states.get_state() is None
    with calling(CallContext("r", None)):
        assert states.get_state() is None
    assert states.kept() == []


def test_state_per_request_branch_and_stack(states: StateManager) -> None:
    made = {}
    for request in "rs":
        for branch in ("cond", "uncond"):
            for component in ("transformer", "transformer_2"):
                with calling(CallContext(request, branch, component)):
                    for stack in ("", "single"):
                        state = made[request, branch, component, stack] = states.get_state(stack)
                        assert (state.value, state.step) == (5, 2)
                        assert states.get_state(stack) is state
    assert len({id(state) for state in made.values()}) == len(made) == 16
    states.release("r")
    assert {key.request for key in states.kept()} == {"s"}


def test_the_familiar_face(states: StateManager) -> None:
    assert states._current_context is None
    states.set_context("cond")
    assert states._current_context == "cond"
    first = states.get_state()
    states.set_context("uncond")
    assert states.get_state() is not first
    states.set_context("cond")
    assert states.get_state() is first
    states.set_context("")
    assert states.get_state() is None
    states.set_context("cond")
    states.reset()
    assert states._current_context is None
    assert states.kept() == []


def test_a_set_context_wins_over_the_branch_of_the_call(states: StateManager) -> None:
    with calling(CallContext("r", "cond")):
        states.set_context("special")
        states.get_state()
    assert [(key.request, key.branch) for key in states.kept()] == [("r", "special")]


def test_a_second_thread_with_another_request_sees_its_own_state(states: StateManager) -> None:
    barrier = threading.Barrier(2)
    seen: dict[str, list[int]] = {}

    def run(request: str, named: bool) -> None:
        call = None if named else CallContext(request, "cond")
        with calling(call):
            if named:
                states.set_context("cond")
            for step in range(20):
                barrier.wait()
                state = states.get_state()
                state.value += 1
                barrier.wait()
                seen.setdefault(request, []).append(state.value - 5 - step)

    for named in (False, True):
        threads = [threading.Thread(target=run, args=(f"{name}{named}", named)) for name in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(seen) == 4 and all(counts == [1] * 20 for counts in seen.values())
    assert states.get_state() is None


def test_nothing_is_held_after_the_request(states: StateManager) -> None:
    other = StateManager(dict)
    with calling(CallContext("request-1", "cond")):
        states.get_state()
        other.get_state()["big"] = object()
    assert {key.request for key in held()} >= {"request-1"}
    release("request-1")
    assert "request-1" not in {key.request for key in held()}


def test_a_copy_starts_empty(states: StateManager) -> None:
    with calling(CallContext("r", "cond")):
        states.get_state().value = 9
        assert copy.deepcopy(states).get_state().value == 5


def test_row_map_of_joint_forwards(states: StateManager) -> None:
    rows = (Rows("r", "cond", 0, 1), Rows("s", "cond", 1, 3), Rows("s", None, 3, 4))
    with calling(CallContext("r", "cond")):
        alone = states.get_state()
        with joint(rows):
            assert current_rows() == rows
            assert states.get_state() is None  # the leader's name does not hold for the others' rows
            assert states.get_state(row=rows[0]) is alone
            assert states.get_state(row=rows[1]) is not alone
            assert states.get_state(row=rows[2]) is None
        assert current_rows() == ()
    with calling(CallContext("s", "cond")):
        assert states.get_state() in [states._states[key] for key in states.kept() if key.request == "s"]


@pytest.mark.parametrize("rows", [(Rows("r", None, 1, 2),), (Rows("r", None, 0, 0),), (Rows("r", None, 0, 1),) * 2])
def test_rows_follow_each_other(rows: Any) -> None:
    with pytest.raises(ValueError, match="without a gap"), joint(rows):
        pass


def test_joinable_is_declared_or_follows_from_keeping_state() -> None:
    class Keeps(ModelHook):
        def __init__(self) -> None:
            self.states = StateManager(State)

    class Aware(Keeps):
        joinable = True

    class Shy(Middleware):
        joinable = False

    assert [is_joinable(x) for x in (ModelHook(), Keeps(), Aware(), Middleware(), Shy(), len)] == [
        True,
        False,
        True,
        True,
        False,
        True,
    ]
