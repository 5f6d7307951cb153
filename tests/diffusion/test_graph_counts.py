"""How many graphs real models cost, over sizes, texts and batches: one per class of block and kind of its inputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from omniloom.diffusion.compile import CompilePolicy, compile_model, compile_report
from tests.diffusion.blocks import Graphs
from tests.fixtures.reference import load, run
from tests.fixtures.tiny import FAMILIES

SIZES = list(itertools.product((32, 48, 64, 80), (32, 64, 96)))
KINDS = {
    "flux": {"FluxTransformerBlock": 1, "FluxSingleTransformerBlock": 1},
    "qwen-image": {"QwenImageTransformerBlock": 1},
    "z-image": {"ZImageTransformerBlock": 2},  # the blocks that refine the text have no modulation: other code
    "wan22-t2v": {"WanTransformerBlock": 1},  # of both transformers
}
BUILD = {"flux": {"double": 2, "single": 3}}


class Counted:
    """A compiled tiny pipeline and the graphs it has cost."""

    def __init__(self, folder: Callable[..., Any], family: str, dynamic: bool | None) -> None:
        self.family, self.graphs = FAMILIES[family], Graphs()
        self.pipe = load(folder(family, **BUILD.get(family, {})))
        self.nets = [self.pipe.components[n] for n in ("transformer", "transformer_2") if self.pipe.components.get(n)]
        for net in self.nets:
            compile_model(net, CompilePolicy(budget=8), backend=self.graphs, dynamic=dynamic)

    def run(self, size: tuple[int, int] = (32, 32), seed: Any = 1, **changes: Any) -> dict[str, int]:
        if self.family.name in ("flux", "z-image"):  # Wan's two experts need their steps, Qwen's schedule two
            changes["num_inference_steps"] = 1
        run(self.pipe, seed=seed, **self.family.request(size, **changes))
        found: dict[str, int] = {}
        for name, record in itertools.chain(*(compile_report(net).items() for net in self.nets)):
            assert (record.status, record.fallbacks, record.graph_breaks) == ("compiled", 0, 0)
            found[name] = found.get(name, 0) + record.graphs
        assert sum(found.values()) == len(self.graphs.graphs)
        return found

    def several(self, count: int, size: tuple[int, int] = (32, 32)) -> dict[str, int]:
        return self.run(size, list(range(count)), **{self.family.n_kwarg: count})


@pytest.mark.parametrize("family", KINDS)
def test_one_graph_per_kind_of_block(tiny_folder: Callable[..., Any], family: str) -> None:
    """12 sizes, short and long texts, more frames: none more. Several pictures instead of one: at most one more."""
    counted = Counted(tiny_folder, family, dynamic=True)
    for size in [*SIZES, SIZES[0]]:
        assert counted.run(size) == KINDS[family]
    for text in ("a", "a long text about a fox"):
        assert counted.run(prompt=text) == KINDS[family]
    if FAMILIES[family].frames:
        assert counted.run(num_frames=9) == KINDS[family]
    # Z-Image's guidance makes two rows of one picture, so the graph of several rows is there.
    more = 0 if family == "z-image" else 1
    for count, size in ((2, (32, 32)), (3, (48, 32))):
        assert counted.several(count, size) == {name: number + more for name, number in KINDS[family].items()}


@pytest.mark.slow
@pytest.mark.parametrize("family", KINDS)
def test_left_to_dynamo_each_kind_costs_one_more(tiny_folder: Callable[..., Any], family: str) -> None:
    """dynamic=None: the first size is compiled as it is, the second anew with sizes left open, and then none."""
    counted = Counted(tiny_folder, family, dynamic=None)
    counted.run()
    second = counted.run((48, 80))
    # Qwen-Image's texts of two lengths open the text's size first, another size then the picture's.
    open_sizes = 2 if family == "qwen-image" else 1
    assert all(second[name] <= number + open_sizes for name, number in KINDS[family].items())
    for size in SIZES:
        assert counted.run(size) == second


def test_as_many_tokens_as_the_model_is_wide(tiny_folder: Callable[..., Any]) -> None:
    """FLUX at 768 by 1024 pixels has 3072 tokens and is 3072 wide. Here: 32 of each."""
    counted = Counted(tiny_folder, "flux", dynamic=True)
    for size in ((32, 64), (64, 64)):  # 32 tokens
        assert counted.run(size) == KINDS["flux"]
