"""A failed setup leaves the model as it was, at whichever step it fails."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch

from omniloom.diffusion.compile import regionally_compile, uncompile
from omniloom.diffusion.hooks import HookRegistry, Lease, ModelHook, explain, transaction
from tests.diffusion.blocks import Doubler, Graphs, Model, Recorder, inputs, model


def digest(net: torch.nn.Module) -> str:
    """Everything that makes the model what it is: names, bytes, dtypes, identities, attributes, hooks."""
    found = hashlib.sha256()
    for name, tensor in [*net.named_parameters(), *net.named_buffers()]:
        found.update(f"{name} {id(tensor)} {tensor.dtype} {tensor.requires_grad} {tensor.data_ptr()}".encode())
        found.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    for name, module in net.named_modules():
        attributes = {key: id(value) for key, value in module.__dict__.items()}
        found.update(f"{name} {id(module)} {type(module)} {sorted(attributes.items())}".encode())
        found.update(repr([(k, id(v)) for k, v in module._modules.items()]).encode())
        found.update(repr([(k, id(v)) for k, v in module._forward_pre_hooks.items()]).encode())
        registry = HookRegistry.find(module)
        if registry and registry.hooks:
            found.update(repr([(n, id(h), id(h.fn_ref)) for n, h in registry.hooks.items()]).encode())
    found.update(repr([str(e) for e in explain(net)]).encode())
    return found.hexdigest()


class Initializing(ModelHook):
    """Changes the module when it is registered, as an offload hook does, and counts its detaching."""

    detached = 0

    def initialize_hook(self, module: Any) -> Any:
        module.linear.weight.data = torch.empty(0)
        module.extra = "mine"
        return module

    def detach_hook(self, module: Any) -> Any:
        Initializing.detached += 1
        raise RuntimeError("and this fails as well")


def steps(net: Model) -> list[Any]:
    """A setup that touches everything."""
    get = HookRegistry.get_or_create
    return [
        lambda: net.head.weight.data.mul_(2),
        lambda: net.head.to(torch.float64),
        lambda: get(net).install("lease", Lease()),
        lambda: get(net.blocks[0]).register_hook("double", Doubler()),
        lambda: get(net.blocks[1]).register_hook("initializing", Initializing()),
        lambda: get(net.blocks[2]).remove_hook("old"),
        lambda: get(net.blocks[2]).register_hook("old", Recorder()),
        lambda: regionally_compile(net, backend=Graphs()),
        lambda: get(net.blocks[0]).remove_hook("double"),
        lambda: uncompile(net),
        lambda: regionally_compile(net, backend=Graphs()),
        lambda: net.blocks.append(torch.nn.Identity()),
        lambda: setattr(net.blocks, "1", torch.nn.Identity()),
        lambda: net.head.register_forward_pre_hook(lambda *_: None),
        lambda: net.head.weight.requires_grad_(True),
        lambda: setattr(net.head, "weight", torch.nn.Parameter(torch.zeros(4, 4))),
        lambda: net.register_buffer("new", torch.zeros(2)),
        lambda: setattr(net.blocks[0], "__class__", torch.nn.Identity),
    ]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("fault", range(len(steps(model())) + 1))
def test_a_fault_at_any_step_restores_everything(fault: int, compiled: bool) -> None:
    net = model()
    HookRegistry.get_or_create(net.blocks[2]).register_hook("old", Doubler())
    if compiled:
        regionally_compile(net, backend=Graphs())
    before, expected = digest(net), net(inputs())
    with pytest.raises(ZeroDivisionError), transaction(net):
        for step in steps(net)[:fault]:
            step()
        raise ZeroDivisionError
    assert digest(net) == before
    assert torch.equal(net(inputs()), expected)


def test_hooks_of_an_undone_setup_are_detached() -> None:
    net = model()
    Initializing.detached = 0
    with pytest.raises(KeyError), transaction(net, in_place=False):
        HookRegistry.get_or_create(net.blocks[0]).register_hook("h", Initializing())
        raise KeyError
    assert Initializing.detached == 1
    assert "extra" not in net.blocks[0].__dict__


def test_success_keeps_everything() -> None:
    net = model()
    expected = net(inputs())
    with transaction(net):
        HookRegistry.get_or_create(net).register_hook("double", Doubler())
    assert torch.equal(net(inputs()), expected * 2)


def test_without_a_copy_a_write_in_place_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    net = model()
    with pytest.raises(KeyError), transaction(net, in_place=False):
        net.head.weight.mul_(2)
        raise KeyError
    assert "in_place=False" in caplog.text


def test_shared_parameters_stay_shared() -> None:
    net = model(blocks=2)
    net.blocks[1].linear.weight = net.blocks[0].linear.weight
    with pytest.raises(KeyError), transaction(net):
        net.blocks[1].linear.weight = torch.nn.Parameter(torch.zeros(4, 4))
        raise KeyError
    assert net.blocks[1].linear.weight is net.blocks[0].linear.weight
