"""Any module: shared, unused, frozen and nested parts in any order give the gradients of the ordered loop, and one copy of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from braid.comm import Group
from braid.parallel.data_parallel import DistributedDataParallel, accumulate
from support.seeded import filled
from support.worlds import run_threads

WIDTH = 3
STEPS = 2


class Graph(NamedTuple):
    """A random module.

    Attributes:
        layers: Number of layers.
        path: Which of them each rank's forward uses, in order, at even and at odd steps; any of them again, or not at all.
        frozen: Layers that are not trained.
        nested: Layers that lie in a module inside of the module.
        cap: Bytes of a bucket.
    """

    layers: int
    path: tuple[tuple[int, ...], ...]
    frozen: frozenset[int]
    nested: frozenset[int]
    cap: int


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    layers = draw(st.integers(1, 5))
    which = st.integers(0, layers - 1)
    trained = draw(which)
    used = st.lists(which, max_size=5).map(lambda found: (*found, trained))
    return Graph(
        layers,
        tuple(draw(st.lists(used, min_size=4, max_size=4))),
        frozenset(draw(st.sets(which))) - {trained},
        frozenset(draw(st.sets(which))),
        draw(st.integers(1, 200)),
    )


class Net(nn.Module):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.inner = nn.ModuleDict()
        self.outer = nn.ModuleDict()
        self.layers: list[nn.Module] = []
        for number in range(graph.layers):
            layer = filled(nn.utils.skip_init(nn.Linear, WIDTH, WIDTH), number)
            layer.requires_grad_(number not in graph.frozen)
            home = self.inner if number in graph.nested else self.outer
            home[f"layer{number}"] = layer
            self.layers.append(layer)

    def forward(self, x: torch.Tensor, path: tuple[int, ...]) -> torch.Tensor:
        for number in path:
            x = torch.tanh(self.layers[number](x))
        return x.square().mean()


def share(rank: int, step: int) -> torch.Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def path_of(graph: Graph, rank: int, step: int) -> tuple[int, ...]:
    return graph.path[2 * rank + step % 2]


def _train(group: Group, graph: Graph) -> tuple[list[torch.Tensor | None], int, int]:
    net = Net(graph)
    wrapped = DistributedDataParallel(
        net,
        process_group=group,
        bucket_cap_mb_list=[graph.cap / (1 << 20)],
        find_unused_parameters=True,
    )
    for step in range(STEPS):
        wrapped.zero_grad()
        wrapped(share(group.rank, step), path_of(graph, group.rank, step)).backward()
    found = [param.grad for param in net.parameters()]
    places = {grad.data_ptr() for grad in found if grad is not None}
    buckets = wrapped._reducer.buckets
    own = {view.data_ptr() for bucket in buckets for view in bucket.views.values()}
    copies = [None if grad is None else grad.clone() for grad in found]
    return copies, len(places - own), sum(buckets.sizes_bytes)


@given(graphs())
def test_any_module_has_the_gradients_of_the_ordered_loop_and_one_copy_of_them(graph):
    net = Net(graph)
    for step in range(STEPS):
        accumulate(
            net,
            [lambda r=rank, s=step: net(share(r, s), path_of(graph, r, s)) for rank in range(2)],
        )
    trained = sum(p.numel() * 4 for p in net.parameters() if p.requires_grad)
    for found, elsewhere, nbytes in run_threads(2, _train, graph):
        assert (elsewhere, nbytes) == (0, trained)
        for a, b in zip(found, [param.grad for param in net.parameters()], strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)
