"""One forward at a time, in order, released whatever happens."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from omniloom.diffusion.hooks import HookRegistry, Lease
from omniloom.errors import Cancelled
from tests.diffusion.blocks import inputs, model


def until(condition: Any) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def run(*targets: Any) -> list[threading.Thread]:
    threads = [threading.Thread(target=target) for target in targets]
    for thread in threads:
        thread.start()
    return threads


def test_one_forward_at_a_time_through_weights_bound_per_module() -> None:
    """The case that the lease is for: each call binds weights first, and another must not bind its own meanwhile."""
    net = model(blocks=1)
    weights = [torch.randn(4, 4, generator=torch.Generator().manual_seed(n)) for n in range(4)]
    number, wrong = threading.local(), []

    def bind(call_next: Any, module: Any, /, *args: Any) -> Any:
        module.head.weight.data = weights[number.value]
        time.sleep(0.0002)
        return call_next(*args)

    registry = HookRegistry.get_or_create(net)
    registry.install("bind", bind, phase="placement")
    registry.install("lease", lease := Lease())
    assert list(registry.hooks) == ["lease", "bind"]
    hidden = net.blocks[0](inputs())

    def work(n: int) -> None:
        number.value = n
        expected = torch.nn.functional.linear(hidden, weights[n], net.head.bias)
        wrong.extend(n for _ in range(40) if not torch.equal(net(inputs()), expected))

    for thread in run(*(lambda n=n: work(n) for n in range(4))):
        thread.join()
    assert wrong == []
    assert not lease.held and lease.waiting == 0


def test_first_come_first_served() -> None:
    lease, order = Lease(), []

    def take(name: int) -> None:
        with lease.hold():
            order.append(name)

    threads = []
    with lease.hold():
        for name in range(5):
            threads += run(lambda name=name: take(name))
            until(lambda name=name: lease.waiting == name + 1)
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3, 4]


def test_released_when_the_forward_raises() -> None:
    net = model(blocks=1)
    HookRegistry.get_or_create(net).install("lease", lease := Lease())
    with pytest.raises(RuntimeError):
        net(torch.zeros(3))
    assert not lease.held
    assert net(inputs()).shape == inputs().shape


def test_the_holder_may_call_again_inside() -> None:
    lease = Lease()
    with lease.hold():
        with lease.hold():
            pass
        assert lease.held
    assert not lease.held


def test_a_waiting_request_can_be_cancelled() -> None:
    cancelled = threading.Event()

    def check() -> None:
        if cancelled.is_set():
            raise Cancelled("stop")

    lease, errors = Lease(check, interval=0.005), []

    def wait() -> None:
        try:
            with lease.hold():
                errors.append("taken")
        except Cancelled as error:
            errors.append(str(error))

    with lease.hold():
        [thread] = run(wait)
        until(lambda: lease.waiting == 1)
        cancelled.set()
        thread.join()
        assert lease.waiting == 0
    assert errors == ["stop"]
    cancelled.clear()
    with lease.hold(timeout=0):
        pass


def test_a_wait_with_a_timeout_ends() -> None:
    lease, errors = Lease(), []

    def wait() -> None:
        try:
            with lease.hold(timeout=0.02):
                pass
        except TimeoutError as error:
            errors.append(str(error))

    with lease.hold():
        [thread] = run(wait)
        thread.join()
        assert lease.waiting == 0
    assert errors == ["the lease was not free within 0.02 s"]
