"""Small modules, hooks and a counting compiler backend for the tests of hooks and compilation."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from omniloom.diffusion.hooks import ModelHook


class Block(nn.Module):
    """A repeated block with a signature worth keeping."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, hidden_states: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return hidden_states + self.norm(self.linear(hidden_states)) * scale


class OtherBlock(Block):
    def forward(self, hidden_states: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return hidden_states * 0.5 + torch.tanh(self.linear(hidden_states)) * scale


class Model(nn.Module):
    """Two kinds of repeated blocks and a head that is none."""

    _repeated_blocks = ["Block", "OtherBlock"]

    def __init__(self, blocks: int = 3, others: int = 0, width: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.others = nn.ModuleList([OtherBlock(width) for _ in range(others)])
        self.head = nn.Linear(width, width)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        for block in [*self.blocks, *self.others]:
            hidden_states = block(hidden_states)
        return self.head(hidden_states)


def model(**sizes: int) -> Model:
    """The same small model each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Model(**sizes).eval().requires_grad_(False)


def inputs(rows: int = 2, length: int = 5, width: int = 4, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, length, width, generator=torch.Generator().manual_seed(seed))


class Recorder(ModelHook):
    """Notes that it was called, and whether a compiler traced it."""

    def __init__(self, name: str = "hook", log: list[str] | None = None) -> None:
        self.name = name
        self.log: list[str] = [] if log is None else log

    def note(self, what: str) -> None:
        traced = torch.compiler.is_compiling()
        self.log.append(f"{self.name}.{what}" + (" TRACED" if traced else ""))

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.note("pre")
        return args, kwargs

    def post_forward(self, module: Any, output: Any) -> Any:
        self.note("post")
        return output


class Doubler(ModelHook):
    """Replaces the forward: twice what comes next."""

    def new_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        return self.fn_ref.original_forward(*args, **kwargs) * 2


class Adder(ModelHook):
    """Replaces the forward: what comes next plus one. Its operation is one that no block uses."""

    def new_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        return torch.logaddexp(self.fn_ref.original_forward(*args, **kwargs), torch.tensor(-1e4)) + 1


class Raiser(ModelHook):
    """Raises after the call, when told to."""

    armed = False

    def post_forward(self, module: Any, output: Any) -> Any:
        if self.armed:
            raise RuntimeError("the hook failed")
        return output


class Graphs:
    """A compiler backend that keeps the graphs it was given and counts their runs."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []
        self.runs = 0

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        self.graphs.append(graph)

        def run(*args: Any) -> Any:
            self.runs += 1
            return graph.forward(*args)

        return run

    @property
    def operations(self) -> set[str]:
        """Names of all operations in all graphs."""
        names = (getattr(n.target, "__name__", str(n.target)) for g in self.graphs for n in g.graph.nodes)
        return {name.removeprefix("_") for name in names}


def same_attributes(module: nn.Module, before: dict[str, Any]) -> bool:
    """Whether ``module.__dict__`` is what it was, object by object."""
    now = module.__dict__
    return now.keys() == before.keys() and all(now[key] is before[key] for key in now)
