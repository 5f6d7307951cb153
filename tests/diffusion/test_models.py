"""Real pipelines: hooks and compilation in every order give what plain eager gives."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from omniloom.diffusion.compile import compile_report, regionally_compile, uncompile
from omniloom.diffusion.compile.matching import find_blocks
from omniloom.diffusion.hooks import (
    CallContext,
    HookRegistry,
    Lease,
    Middleware,
    ModelHook,
    Phase,
    StateManager,
    calling,
    validate,
)
from tests.diffusion.blocks import Graphs, Recorder
from tests.fixtures.reference import load, run
from tests.fixtures.tiny import FAMILIES

MODELS = ["flux", "qwen-image", "z-image", "wan22-t2v"]
CLASSES = {"flux": 2, "qwen-image": 1, "z-image": 1, "wan22-t2v": 1}


class Passing(ModelHook):
    """Replaces the forward by the forward."""

    def new_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        return self.fn_ref.original_forward(*args, **kwargs)


class Subject:
    """A pipeline, its denoisers, and what can be done to them."""

    def __init__(self, pipe: Any, family: str, backend: Any) -> None:
        self.pipe, self.family, self.backend = pipe, family, backend
        self.denoisers = [pipe.components[n] for n in ("transformer", "transformer_2") if pipe.components.get(n)]
        self.blocks = [match.module for net in self.denoisers for match in find_blocks(net)]
        self.call = FAMILIES[family].request()

    def run(self, seed: int = 1) -> torch.Tensor:
        output = run(self.pipe, seed=seed, **self.call)
        return output if torch.is_tensor(output) else torch.as_tensor(output)

    def hook(self, name: str = "hook") -> None:
        for net in self.denoisers:
            HookRegistry.get_or_create(net).install(f"lease {name}", Lease())
        for block in self.blocks:
            registry = HookRegistry.get_or_create(block)
            registry.register_hook(f"record {name}", Recorder(), phase=Phase.PLACEMENT)
            registry.register_hook(f"pass {name}", Passing())
            registry.install(f"native {name}", Middleware(), phase=Phase.CACHE)

    def unhook(self, name: str = "hook") -> None:
        for net in [*self.denoisers, *self.blocks]:
            registry = HookRegistry.get_or_create(net)
            for kind in ("native", "record", "pass", "lease"):
                registry.remove_hook(f"{kind} {name}")

    def compile(self) -> None:
        for net in self.denoisers:
            regionally_compile(net, backend=self.backend, dynamic=True)

    def uncompile(self) -> None:
        for net in self.denoisers:
            uncompile(net)

    def attributes(self) -> list[dict[str, Any]]:
        ours = [net for denoiser in self.denoisers for net in denoiser.modules()]
        return [{k: v for k, v in net.__dict__.items() if k != "_diffusers_hook"} for net in ours]


class Pipes(dict[str, Any]):
    """One loaded pipeline per family for the whole module."""

    def __init__(self, folder: Callable[..., Any]) -> None:
        self.folder = folder

    def __missing__(self, family: str) -> Any:
        self[family] = load(self.folder(family))
        return self[family]


@pytest.fixture(scope="module")
def opened(tiny_folder: Callable[..., Any]) -> Pipes:
    return Pipes(tiny_folder)


@pytest.fixture(autouse=True)
def leave_nothing(opened: Pipes) -> Iterator[None]:
    """The pipelines are shared: whatever a test did to them is taken away."""
    yield
    for pipe in opened.values():
        for name in ("transformer", "transformer_2"):
            net = pipe.components.get(name)
            if net is not None:
                uncompile(net)
                for module in net.modules():
                    registry = HookRegistry.find(module)
                    for hook in registry.hooks if registry else ():
                        registry.remove_hook(hook)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


ORDERS = [("hook", "compile"), ("compile", "hook")]


@pytest.mark.parametrize("family", MODELS)
def test_hooks_and_compilation_in_every_order(opened: Pipes, family: str) -> None:
    graphs = Graphs()
    subject = Subject(opened[family], family, graphs)
    before = subject.attributes()
    plain = subject.run()
    subject.hook()
    assert torch.equal(subject.run(), plain)  # eager: bit for bit
    subject.unhook()
    assert subject.attributes() == before
    for first, second in ORDERS:
        for step in (first, second):
            getattr(subject, step)()
        assert relative(subject.run(), plain) <= 1e-4
        assert graphs.runs > 0
        for block in subject.blocks:
            log = HookRegistry.get_or_create(block).get_hook("record hook").log
            assert log and not any("TRACED" in line for line in log)
        for net in subject.denoisers:
            assert validate(net, strict=True) == []
            assert all(r.status == "compiled" and r.fallbacks == 0 for r in compile_report(net).values())
            assert len(compile_report(net)) == CLASSES[family]
        for step in (f"un{first}", f"un{second}"):
            getattr(subject, step)()
            assert relative(subject.run(), plain) <= 1e-4
        assert subject.attributes() == before
    assert torch.equal(subject.run(), plain)
    assert not {"lease", "record"} & graphs.operations


@pytest.mark.parametrize("family", ["flux", pytest.param("z-image", marks=pytest.mark.slow)])
def test_rb_01_three_requests_off_and_on_again(opened: Pipes, family: str) -> None:
    """Requests, hooks off, request, on again, request, in one process, in place: nothing adds up, nothing is lost."""
    subject = Subject(opened[family], family, Graphs())
    eager = [subject.run(seed) for seed in range(5)]
    before = subject.attributes()
    subject.compile()
    compiled = subject.attributes()
    for seed in range(2):
        assert relative(subject.run(seed), eager[seed]) <= 1e-4
    reference = [subject.run(seed) for seed in range(5)]
    for _ in range(2):
        subject.hook("offload")
        for seed in range(3):
            assert torch.equal(subject.run(seed), reference[seed])
        subject.unhook("offload")
        assert torch.equal(subject.run(3), reference[3])
        assert [a.keys() for a in subject.attributes()] == [a.keys() for a in compiled]
    subject.uncompile()
    assert subject.attributes() == before
    assert torch.equal(subject.run(4), eager[4])


def test_rb_02_twelve_image_sizes(opened: Pipes) -> None:
    """Each size costs no compilation once the dynamic graph is there, and the first size works as before."""
    graphs = Graphs()
    subject = Subject(opened["flux"], "flux", graphs)
    sizes = [(16 * h, 16 * w) for h, w in itertools.islice(itertools.product((2, 3, 4, 5), repeat=2), 12)]
    expected = []
    for height, width in sizes:
        subject.call = FAMILIES["flux"].request((height, width), num_inference_steps=1)
        expected.append(subject.run())
    subject.compile()
    seen = []
    for number in [*range(12), 0]:
        subject.call = FAMILIES["flux"].request(sizes[number], num_inference_steps=1)
        assert relative(subject.run(), expected[number]) <= 1e-4
        seen.append(len(graphs.graphs))
    assert seen[-1] == seen[1] <= 4
    for record in compile_report(subject.denoisers[0]).values():
        assert (record.status, record.fallbacks) == ("compiled", 0)
        assert record.recompiles <= 1


def test_x1_a_hook_from_before_compilation_calls_the_compiled_block(opened: Pipes) -> None:
    """Compiled calls per step are the same in both orders."""
    runs = []
    for order in ORDERS:
        torch._dynamo.reset()
        graphs = Graphs()
        subject = Subject(opened["flux"], "flux", graphs)
        for step in order:
            getattr(subject, step)()
        subject.run()
        runs.append(graphs.runs)
        assert graphs.runs % len(subject.blocks) == 0 < graphs.runs
        subject.unhook()
        subject.uncompile()
    assert runs[0] == runs[1]


def test_x3_offload_code_stays_out_of_the_graph(opened: Pipes) -> None:
    """A hook that rebinds weights around each block call, as streaming does: no trace of it, no compilation anew."""

    class Rebind(ModelHook):
        def __init__(self, block: torch.nn.Module) -> None:
            self.kept = {name: parameter.data for name, parameter in block.named_parameters()}

        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            for name, parameter in module.named_parameters():
                parameter.data = self.kept[name].clone()
            return args, kwargs

        def post_forward(self, module: Any, output: Any) -> Any:
            for parameter in module.parameters():
                parameter.data = torch.empty(0)
            return output

    graphs = Graphs()
    subject = Subject(opened["flux"], "flux", graphs)
    plain = subject.run()
    for net in subject.denoisers:
        net.requires_grad_(False)
    hooks = {block: Rebind(block) for block in subject.blocks}
    try:
        for block, hook in hooks.items():
            HookRegistry.get_or_create(block).register_hook("rebind", hook)
        subject.compile()
        for _ in range(2):
            assert relative(subject.run(), plain) <= 1e-4
        assert not {"clone", "empty"} & graphs.operations
        assert all(r.recompiles == 0 and r.graph_breaks == 0 for r in compile_report(subject.denoisers[0]).values())
    finally:
        subject.uncompile()
        for block, hook in hooks.items():
            HookRegistry.get_or_create(block).remove_hook("rebind")
            for name, parameter in block.named_parameters():
                parameter.data = hook.kept[name]
    assert torch.equal(subject.run(), plain)


def test_a_second_thread_with_another_request_has_its_own_state(opened: Pipes) -> None:
    """Two requests in one denoiser at the same time, each with a hook that counts its calls in its own state."""

    class Count:
        calls = 0

    class Counting(ModelHook):
        def __init__(self) -> None:
            self.states = StateManager(Count)

        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            state = self.states.get_state()
            if state is not None:
                state.calls += 1
            return args, kwargs

    subject = Subject(opened["flux"], "flux", Graphs())
    net, block, seen = subject.denoisers[0], subject.blocks[0], []
    HookRegistry.get_or_create(net).install("lease", Lease())
    HookRegistry.get_or_create(block).register_hook("count", hook := Counting())
    grab: dict[str, Any] = {}
    catching = net.register_forward_pre_hook(lambda _, a, k: grab.update(args=a, kwargs=k), with_kwargs=True)
    subject.run()
    catching.remove()
    subject.compile()
    barrier = threading.Barrier(2)

    def request(name: str, calls: int) -> None:
        barrier.wait()
        with torch.no_grad():
            for _ in range(calls):
                with calling(CallContext(name, "cond", "transformer")):
                    net(*grab["args"], **grab["kwargs"])
        with calling(CallContext(name, "cond", "transformer")):
            seen.append((name, hook.states.get_state().calls))

    threads = [threading.Thread(target=request, args=a) for a in (("first", 3), ("second", 5))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    subject.uncompile()
    HookRegistry.get_or_create(net).remove_hook("lease")
    HookRegistry.get_or_create(block).remove_hook("count")
    assert sorted(seen) == [("first", 3), ("second", 5)]


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_hooks_and_inductor(opened: Pipes, family: str, order: tuple[str, str]) -> None:
    subject = Subject(opened[family], family, "inductor")
    plain = subject.run()
    for step in order:
        getattr(subject, step)()
    try:
        first = subject.run()
        assert relative(first, plain) <= 1e-4
        assert torch.equal(subject.run(), first)
        for net in subject.denoisers:
            assert all(r.status == "compiled" for r in compile_report(net).values())
    finally:
        subject.unhook()
        subject.uncompile()
    assert torch.equal(subject.run(), plain)


@pytest.mark.slow
def test_aot_eager(opened: Pipes) -> None:
    subject = Subject(opened["z-image"], "z-image", "aot_eager")
    plain = subject.run()
    subject.hook()
    subject.compile()
    assert relative(subject.run(), plain) <= 1e-4
    subject.unhook()
    subject.uncompile()
    assert torch.equal(subject.run(), plain)
