"""Inputs that differ only in how they lie in memory, or in which sizes happen to be equal, share a graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from omniloom.diffusion.compile import compile_report, regionally_compile
from omniloom.diffusion.compile.keys import shape_key
from omniloom.diffusion.compile.layout import alike, packed, write_back
from tests.diffusion.blocks import Graphs, model


def test_a_row_of_a_longer_sequence_has_the_stride_of_a_row() -> None:
    whole = torch.arange(40.0).view(1, 10, 4)
    part = whole[:, 6:]
    assert part.stride() == (40, 4, 1)
    row = alike(part)
    assert row.stride() == (16, 4, 1) and torch.equal(row, part) and row.data_ptr() == part.data_ptr()
    for same in (
        whole,
        torch.zeros(2, 10, 4)[:, :5],
        whole.transpose(1, 2),
        torch.zeros(1),
        torch.tensor(1.0),
        3,
        [part],
        {"a": part},
    ):
        assert alike(same) is same


def test_without_gradients_a_view_is_no_view() -> None:
    whole = torch.arange(24.0)
    view = whole.view(2, 3, 4)
    assert alike(view) is view
    with torch.no_grad():
        seen, (inner, number) = alike((view, (view.transpose(0, 1), 3)))
        assert not seen._is_view() and seen.data_ptr() == whole.data_ptr()
        assert inner.stride() == (4, 12, 1) and not inner._is_view() and number == 3
        assert alike(whole) is whole
        learning = torch.zeros(4, requires_grad=True)
        assert alike(learning) is learning
    with torch.inference_mode():
        view = torch.zeros(24).view(4, 6)
        assert alike(view) is view  # there views are not kept track of


def test_rows_that_lie_apart_are_copied_together() -> None:
    whole = torch.arange(48.0).view(2, 6, 4)
    with torch.no_grad():
        part = whole[:, 2:]
        args, kwargs, pairs = packed((part, 3), {"x": whole, "y": whole[:, :2]})
        assert args[0].is_contiguous() and torch.equal(args[0], part) and args[1] == 3
        assert kwargs["x"] is whole and kwargs["y"].stride() == (8, 4, 1) and len(pairs) == 2
        args[0].add_(1)
        write_back(pairs)
        assert torch.equal(whole[:, 2:], torch.arange(48.0).view(2, 6, 4)[:, 2:] + 1)
        assert packed((whole, whole.transpose(1, 2), whole[..., :2]), {}) is None  # other layouts stay as they are
    assert packed((part,), {}) is None
    with torch.inference_mode():
        assert packed((part,), {}) is None


class Halves(nn.Module):
    """A block of FLUX's kind: two sequences in, slices of the joined one out. ``writes``: into its input."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.writes = writes

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        joined = torch.tanh(self.linear(torch.cat([a, b], dim=1)))
        if self.writes:
            b.add_(1)
        return joined[:, : a.shape[1]], joined[:, a.shape[1] :]


def halves(writes: bool) -> Any:
    torch.manual_seed(0)
    net = nn.ModuleList([Halves(writes) for _ in range(3)])
    net._repeated_blocks = ["Halves"]
    return net


def run(net: Any, rows: int, length: int, kept: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    a, b = (torch.randn(rows, length + n, 4, generator=generator) for n in (0, 3))
    for block in net:
        kept.append(b)
        a, b = block(a, b)
    return a, b


def test_slices_of_a_joined_sequence_need_no_graph_of_their_own() -> None:
    """One graph for one row and one for several, whatever the lengths; writes into a slice arrive."""
    for writes in (False, True):
        net, graphs = halves(writes), Graphs()
        regionally_compile(net, backend=graphs, dynamic=True)
        seen = []
        with torch.no_grad():
            for rows, length in ((1, 5), (1, 7), (2, 7), (3, 9), (1, 9)):
                kept: list[torch.Tensor] = []
                expected_kept: list[torch.Tensor] = []
                result, expected = run(net, rows, length, kept), run(halves(writes), rows, length, expected_kept)
                for got, wanted in zip([*result, *kept], [*expected, *expected_kept], strict=True):
                    torch.testing.assert_close(got, wanted)
                seen.append(len(graphs.graphs))
        assert seen == [1, 1, 2, 2, 2]
        assert compile_report(net)["Halves"].fallbacks == 0
        torch._dynamo.reset()


def test_where_all_blocks_get_slices_nothing_is_copied() -> None:
    net, graphs = model(blocks=3), Graphs()
    regionally_compile(net, backend=graphs, dynamic=True)
    with torch.no_grad():
        whole = torch.randn(2, 6, 4)
        for block in net.blocks:
            block(whole[:, 2:])
        assert len(graphs.graphs) == 1
        assert compile_report(net)["Block"].seen == {shape_key((whole[:, 2:],), {})}


def test_a_view_needs_no_graph_of_its_own() -> None:
    """What a Linear returned is a view, what a block returned is none, and dynamo guards the base of a view."""
    net, graphs = model(blocks=3), Graphs()
    regionally_compile(net, backend=graphs, dynamic=True)
    with torch.no_grad():
        for length in (5, 7, 9):
            first = net.head(torch.randn(2, length, 4))
            assert first._is_view()
            torch.testing.assert_close(net(first), model(blocks=3)(first), rtol=1e-4, atol=1e-5)
    assert (len(graphs.graphs), compile_report(net)["Block"].recompiles) == (1, 0)


def test_sizes_that_happen_to_be_equal_are_no_condition() -> None:
    """A sequence as long as the model is wide, or two of one length, and then others."""
    net, graphs = halves(False), Graphs()
    regionally_compile(net, backend=graphs, dynamic=True)
    with torch.no_grad():
        for a, b in ((4, 4), (4, 5), (6, 6), (7, 9)):
            net[0](torch.randn(1, a, 4), torch.randn(1, b, 4))
    assert len(graphs.graphs) == 1
    assert torch.fx.experimental._config.use_duck_shape is True
