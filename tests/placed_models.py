"""Models for tests of placed models: random ones, and one step of each in one process."""

from __future__ import annotations

import copy
import random
from typing import Any

import networkx as nx
import torch
from torch import nn
from torch.nn import functional

from braid.parallel.graph import CapturedGraph
from braid.strategies.placed.constraints import colocations_of

WIDTH = 4
NUM_DEVICES = 3
OPERATIONS = (
    *("linear", "linear", "again", "tanh", "add", "mul", "split", "turned", "frozen"),
    *("bfloat16", "in place", "buffer", "three", "none"),
)


class Scale(nn.Module):
    """Multiplies by a parameter; returns a dict with a None and an integer tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"x": x * self.scale, "rest": None, "count": torch.tensor([3])}


class RandomModel(nn.Module):
    """A random graph of modules and operations."""

    def __init__(self, seed: int, length: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.embedding = nn.Embedding(7, WIDTH)
        self.layers = nn.ModuleDict()
        self.shift = nn.Parameter(torch.rand(WIDTH))
        self.register_buffer("count", torch.zeros(WIDTH))
        self.operations: list[tuple[str, int, int, str]] = []
        for number in range(length):
            kind = draw.choice(OPERATIONS)
            name = f"layer{number}"
            if kind == "linear":
                self.layers[name] = nn.Linear(WIDTH, WIDTH)
            elif kind == "none":
                self.layers[name] = Scale()
            elif kind == "buffer":
                self.layers[name] = nn.BatchNorm1d(WIDTH)
            elif kind == "again":
                linears = [each for each, x in self.layers.items() if isinstance(x, nn.Linear)]
                kind, name = ("linear", draw.choice(linears)) if linears else ("tanh", "")
            self.operations.append((kind, draw.randrange(10**6), draw.randrange(10**6), name))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values = [x, self.embedding(ids)]
        for kind, first, second, name in self.operations:
            a = values[-1 - first % min(len(values), 4)]
            b = values[-1 - second % min(len(values), 4)]
            if name in self.layers:
                made = self.layers[name](a)
                values.append(made["x"] + made["count"] if kind == "none" else made)
                continue
            values.append(self.computed(kind, a, b))
        return values[-1] + self.shift, values[-2]

    def computed(self, kind: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:  # noqa: PLR0911 - one for each kind
        """Return the result of an operation without a module."""
        match kind:
            case "tanh":
                return torch.tanh(a)
            case "add":
                return a + b * 0.5
            case "mul":
                return torch.sigmoid(a) * b
            case "split":
                left, right = a.chunk(2, dim=1)
                return torch.cat([right, left], dim=1)
            case "turned":
                return (a.t() @ b).t().expand(WIDTH, WIDTH)[:1] + a
            case "frozen":
                with torch.no_grad():
                    frozen = a * 2
                return frozen + b
            case "bfloat16":
                return a.to(torch.bfloat16).float() + self.shift
            case "in place":
                new = a * 1.0
                self.count.add_(1)
                return new.mul_(b).add_(1)
            case _:
                return a * a + torch.sin(a) * 0.25 + b


def loss_of(output: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    """Return the loss of a random model."""
    last, other = output
    return functional.mse_loss(last, target) + other.square().mean()


def make_random(seed: int, length: int) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """Return a random model and its example."""
    torch.manual_seed(seed)
    return RandomModel(seed, length), batch_of(seed)[0]


def batch_of(seed: int) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return inputs and a target."""
    generator = torch.Generator().manual_seed(seed)
    x, target = (torch.randn(5, WIDTH, generator=generator) for _ in range(2))
    return (x, torch.randint(0, 7, (5,), generator=generator)), target


class OneProcess:
    """The same model in one process, without braid."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), **options)

    def step(self, inputs: Any, target: Any, loss: Any) -> torch.Tensor:
        """Return the loss of a step."""
        value = loss(self.model(*inputs), target)
        value.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return value.detach()


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether tensors have equal elements, NaN included, and dtypes."""
    return x.dtype == y.dtype and torch.allclose(x, y, rtol=0, atol=0, equal_nan=True)


def is_equal(state: dict[str, torch.Tensor], model: nn.Module) -> bool:
    """Return whether a state has the bits of a model's."""
    other = model.state_dict()
    return list(state) == list(other) and all(same_bits(state[k], x) for k, x in other.items())


def random_devices(graph: CapturedGraph, seed: int) -> dict[str, str]:
    """Return a random device for each group of nodes that must have one device."""
    draw, labels = random.Random(seed), graph.labels()
    together = nx.Graph([(first, second) for first, second, _ in colocations_of(graph)])
    together.add_nodes_from(range(len(labels)))
    devices = {}
    for group in sorted(map(sorted, nx.connected_components(together))):
        device = f"/device:cpu:{draw.randrange(NUM_DEVICES)}"
        devices |= {labels[position]: device for position in group}
    return devices
