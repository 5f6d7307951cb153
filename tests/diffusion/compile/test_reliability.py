"""Compilation that cannot lose a request: failures, budgets, counts, warm-up, threads."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
import torch
from torch import nn

from omniloom.diffusion.compile import (
    Bucket,
    CompilePolicy,
    compile_model,
    compile_report,
    regionally_compile,
    uncompile,
    warm_up,
)
from omniloom.diffusion.hooks import HookRegistry, Lease
from omniloom.errors import Cancelled
from tests.diffusion.blocks import Doubler, Graphs, Model, Recorder, inputs, model

SIZES = [(2, n) for n in (5, 7, 9, 11, 4, 6, 8, 10, 12, 14, 3, 16)]


def counts(net: Model, name: str = "Block") -> dict[str, Any]:
    return compile_report(net)[name].to_dict()


class Failing(Graphs):
    """A compiler that fails for the graphs of its choice."""

    def __init__(self, error: BaseException, at: int = 0) -> None:
        super().__init__()
        self.error, self.at = error, at

    def __call__(self, graph: Any, example_inputs: Any) -> Any:
        if len(self.graphs) >= self.at:
            raise self.error
        return super().__call__(graph, example_inputs)


class TestFailure:
    def test_a_compile_failure_runs_eagerly_with_the_same_inputs(self, caplog: pytest.LogCaptureFixture) -> None:
        net = model()
        get = HookRegistry.get_or_create(net.blocks[0])
        get.register_hook("h", Doubler())
        expected = net(inputs())
        regionally_compile(net, backend=Failing(RuntimeError("no such instruction")))
        for _ in range(2):
            assert torch.equal(net(inputs()), expected)
        report = counts(net)
        assert (report["status"], report["fallbacks"], report["graphs"]) == ("eager", 6, 0)
        assert "no such instruction" in report["closed"] and len(report["failures"]) == 1
        assert caplog.text.count("runs eagerly") == 1

    def test_what_was_compiled_stays_compiled(self) -> None:
        net, backend = model(), Failing(RuntimeError("boom"), at=1)
        regionally_compile(net, backend=backend, dynamic=False)
        for size in ((2, 5), (2, 6), (2, 7), (2, 5)):
            assert torch.isfinite(net(inputs(*size))).all()
        assert backend.runs == 6
        assert (counts(net)["status"], counts(net)["fallbacks"], counts(net)["graphs"]) == ("partly eager", 6, 1)

    def test_fullgraph_refused_by_the_compiler(self) -> None:
        net = model(blocks=2)
        HookRegistry.get_or_create(net.blocks[0].linear).register_hook("h", Recorder())
        expected = net(inputs())
        regionally_compile(net, backend=Graphs(), fullgraph=True)
        assert torch.equal(net(inputs()), expected)
        assert counts(net)["failures"][0].startswith("Unsupported")

    @pytest.mark.parametrize("error", [MemoryError("full"), torch.OutOfMemoryError("full"), Cancelled("stop")])
    def test_out_of_memory_and_cancellation_are_raised_as_they_are(self, error: BaseException) -> None:
        net = model()
        regionally_compile(net, backend=Failing(error))
        with pytest.raises(type(error)) as caught:
            net(inputs())
        assert caught.value is error
        assert (counts(net)["fallbacks"], counts(net)["closed"]) == (0, None)

    def test_a_failure_of_the_block_itself_is_no_compile_failure(self) -> None:
        net = model()
        regionally_compile(net, backend=Graphs())
        with pytest.raises(RuntimeError) as eager:
            model()(torch.zeros(2, 3))
        with pytest.raises(RuntimeError) as compiled:
            net(torch.zeros(2, 3))
        assert type(compiled.value) is type(eager.value)
        assert str(compiled.value) == str(eager.value)
        assert (counts(net)["fallbacks"], counts(net)["closed"]) == (0, None)
        net(inputs())
        assert counts(net)["graphs"] == 1

    def test_an_error_while_a_graph_runs_goes_on(self) -> None:
        def backend(graph: Any, example_inputs: Any) -> Any:
            def run(*args: Any) -> Any:
                raise RuntimeError("device lost")

            return run

        net = model()
        regionally_compile(net, backend=backend)
        with pytest.raises(RuntimeError, match="device lost"):
            net(inputs())
        assert counts(net)["fallbacks"] == 0

    def test_a_lease_around_a_failing_compilation_is_released(self) -> None:
        net = model()
        HookRegistry.get_or_create(net).install("lease", lease := Lease())
        regionally_compile(net, backend=Failing(MemoryError("full")))
        with pytest.raises(MemoryError):
            net(inputs())
        assert not lease.held


class TestBudget:
    def test_over_the_budget_unseen_shapes_run_eagerly_and_seen_ones_compiled(self, caplog: Any) -> None:
        net, graphs = model(), Graphs()
        compile_model(net, CompilePolicy(budget=2), backend=graphs, dynamic=False)
        expected = {size: model()(inputs(*size)) for size in SIZES}
        for size in [*SIZES, SIZES[0]]:
            assert torch.equal(net(inputs(*size)), expected[size])
        report = counts(net)
        assert (report["graphs"], report["recompiles"], len(graphs.graphs)) == (3, 2, 3)
        assert report["fallbacks"] == 3 * (len(SIZES) - 3)
        assert graphs.runs == 3 * (3 + 1)
        assert report["status"] == "partly eager"
        assert "size mismatch" in report["guards"][0]
        assert caplog.text.count("dynamic=True") == 1 and "size mismatch" in caplog.text

    def test_rb_02_many_sizes_with_dynamic_shapes_are_few_graphs(self) -> None:
        for arguments in ({"dynamic": True}, {}):
            net, graphs = model(), Graphs()
            torch._dynamo.reset()
            regionally_compile(net, backend=graphs, **arguments)
            for size in [*SIZES, SIZES[0]]:
                torch.testing.assert_close(net(inputs(*size)), model()(inputs(*size)), rtol=1e-4, atol=1e-5)
            assert len(graphs.graphs) <= 2
            assert counts(net)["status"] == "compiled"
            assert counts(net)["fallbacks"] == 0

    def test_numbers_of_one_graph_for_equal_blocks(self) -> None:
        """24 equal blocks: 1 graph. Another length: +0. Batch 2 to 1: +1, then 3: +0. Rebound weights: +0."""
        net, graphs = model(blocks=24), Graphs()
        regionally_compile(net, backend=graphs, dynamic=True)
        seen = []
        for rows, length in ((2, 5), (2, 7), (1, 7), (3, 9)):
            net(inputs(rows, length))
            seen.append(len(graphs.graphs))
        assert seen == [1, 1, 2, 2]
        slot = torch.empty(4096)
        for number, parameter in enumerate(list(net.parameters())):
            view = slot[(number % 50) * 64 :][: parameter.numel()].view_as(parameter)
            before, parameter.data = parameter.data, torch.empty(0)
            parameter.data = view.copy_(before)
        net(inputs(2, 6))
        assert len(graphs.graphs) == 2
        assert counts(net)["recompiles"] == 1

    def test_a_block_with_other_strides_costs_a_graph(self) -> None:
        net, graphs = model(blocks=4), Graphs()
        net.blocks[2].linear.weight.data = net.blocks[2].linear.weight.data.t().contiguous().t()
        regionally_compile(net, backend=graphs, dynamic=True)
        net(inputs())
        assert (len(graphs.graphs), counts(net)["graphs"], counts(net)["recompiles"]) == (2, 2, 1)

    def test_dynamos_own_limit_is_said_and_counted(self, caplog: pytest.LogCaptureFixture) -> None:
        """The limit belongs to the code, which all models of a process share."""
        limit = torch._dynamo.config.recompile_limit
        for _ in range(limit):
            net = model(blocks=1)
            regionally_compile(net, backend=Graphs())
            net(inputs())
            assert counts(net)["status"] == "compiled"
        net = model(blocks=1)
        regionally_compile(net, backend=Graphs())
        assert torch.equal(net(inputs()), model(blocks=1)(inputs()))
        report = counts(net)
        assert (report["status"], report["fallbacks"]) == ("eager", 1)
        assert f"dynamo allows {limit}" in report["closed"] and "runs eagerly" in caplog.text

    def test_two_models_share_a_graph_and_say_so(self) -> None:
        graphs = Graphs()
        first, second = model(), model()
        for net in (first, second):
            regionally_compile(net, backend=graphs)
            net(inputs())
        assert len(graphs.graphs) == 1 and graphs.runs == 6
        assert (counts(first)["graphs"], counts(second)["graphs"]) == (1, 0)
        assert counts(second)["status"] == "compiled"


def test_the_report_is_plain_and_says_whether_anything_happened() -> None:
    net = model(others=2)
    regionally_compile(net, backend=Graphs())
    assert [record.status for record in compile_report(net).values()] == ["waiting", "waiting"]
    net(inputs())
    plain = {name: record.to_dict() for name, record in compile_report(net).items()}
    assert json.loads(json.dumps(plain)) == plain
    assert all(r["seconds"] > 0 and r["graphs"] == 1 and r["status"] == "compiled" for r in plain.values())


def test_graph_breaks_are_counted() -> None:
    class Breaking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.sin(x)
            torch._dynamo.graph_break()
            return torch.cos(x)

    net = nn.Sequential(Breaking(), Breaking())
    net._repeated_blocks = ["Breaking"]
    regionally_compile(net, backend=Graphs())
    net(inputs())
    report = compile_report(net)["Breaking"]
    assert (report.graphs, report.graph_breaks, report.recompiles) == (2, 1, 0)


def test_warm_up_does_not_spend_the_budget() -> None:
    net, graphs = model(), Graphs()
    compile_model(net, CompilePolicy(budget=0), backend=graphs, dynamic=False)
    buckets = [Bucket(height=8 * n, width=8, text_length=n) for n in (4, 5, 6)]
    costs = warm_up([net], buckets, lambda bucket: net(inputs(2, bucket.text_length)))
    assert [cost.bucket for cost in costs] == buckets
    assert [(cost.graphs, cost.recompiles) for cost in costs] == [(1, 0), (1, 1), (1, 1)]
    assert all(cost.seconds > 0 for cost in costs)
    net(inputs(2, 5))
    assert counts(net)["fallbacks"] == 0
    net(inputs(2, 9))
    assert counts(net)["fallbacks"] == 3


def test_threads_with_different_sizes(caplog: pytest.LogCaptureFixture) -> None:
    net, graphs = model(others=2), Graphs()
    HookRegistry.get_or_create(net.blocks[0]).register_hook("double", Doubler())
    expected = {size: net(inputs(*size)) for size in SIZES[:6]}
    regionally_compile(net, backend=graphs, dynamic=True)
    wrong: list[Any] = []

    def work(size: tuple[int, int]) -> None:
        try:
            for _ in range(10):
                if not torch.allclose(net(inputs(*size)), expected[size], rtol=1e-4, atol=1e-5):
                    wrong.append(size)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(size,)) for size in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert sum(record.graphs for record in compile_report(net).values()) == len(graphs.graphs)
    uncompile(net)
    assert all("forward" not in block.__dict__ for block in [*net.blocks[1:], *net.others])
