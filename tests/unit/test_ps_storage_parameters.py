"""Shards of several parameters: those without a gradient rest, on any number of shards."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from braid.errors import ConfigError
from braid.ps.storage import (
    Adam,
    ParameterStorage,
    join_shards,
    parts_in,
    ranges_of_shards,
    split_state,
)

OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1, dampening=0.5),
    "AdamW": partial(torch.optim.AdamW, lr=0.1),
    "NAdam": partial(torch.optim.NAdam, lr=0.1),
    "plain": partial(torch.optim.SGD, lr=0.1),
}
WORKERS = 2


def numbers(numel, seed):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


class Table:
    """A table of some shards."""

    def __init__(self, make, sizes, num_shards):
        self.make, self.sizes = make, sizes
        numel = sum(sizes)
        self.ranges = ranges_of_shards(numel, num_shards)
        self.inside = [parts_in(sizes, own) for own in self.ranges]
        self.shards = [
            ParameterStorage(
                numbers(numel, 0)[own], make, [length for _, length in inside], table="w"
            )
            for own, inside in zip(self.ranges, self.inside, strict=True)
        ]

    def step(self, step, used):
        grads = grads_of(self.sizes, step, used)
        for storage, own, inside in zip(self.shards, self.ranges, self.inside, strict=True):
            pushes = []
            for worker, has in enumerate(used):
                flags = torch.tensor([has[n] for n, _ in inside], dtype=torch.uint8)
                grad = torch.cat(grads[worker])[own]
                pushes.append((grad, flags) if inside else (grad,))
                storage.check(pushes[-1])
            storage.apply(storage.merge(pushes, 1 / WORKERS))

    def values(self):
        return torch.cat([shard.read(())[0] for shard in self.shards])


def grads_of(sizes, step, used):
    return [
        [
            numbers(size, 100 * step + 10 * n + worker) * float(has[n])
            for n, size in enumerate(sizes)
        ]
        for worker, has in enumerate(used)
    ]


@given(
    name=st.sampled_from(sorted(OPTIMIZERS)),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    shards=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    data=st.data(),
)
def test_parameters_without_a_gradient_rest_with_their_state(name, sizes, shards, data):
    make = OPTIMIZERS[name]
    some = st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes))
    has = st.one_of(st.just([True] * len(sizes)), some)
    steps = data.draw(st.lists(st.tuples(has, has), min_size=2, max_size=6))
    params = [nn.Parameter(part.clone()) for part in numbers(sum(sizes), 0).split(sizes)]
    optimizer = make(params)
    table = Table(make, sizes, shards[0])
    for step, used in enumerate(steps):
        if step == len(steps) // 2:  # the state goes to another number of shards
            moved = Table(make, sizes, shards[1])
            whole = join_shards([shard.export() for shard in table.shards])
            for shard, state in zip(moved.shards, split_state(whole, shards[1]), strict=True):
                shard.load(state)
            table = moved
        table.step(step, used)
        grads = grads_of(sizes, step, used)
        for n, param in enumerate(params):
            some = any(flags[n] for flags in used)
            param.grad = (grads[0][n] + grads[1][n]) * (1 / WORKERS) if some else None
        optimizer.step()
    assert torch.equal(table.values(), torch.cat([p.detach() for p in params]))


def test_a_push_without_flags_has_all_gradients():
    storage = ParameterStorage(torch.ones(4), Adam(0.1), [3, 1], table="w")
    few = (torch.ones(4), torch.tensor([0, 0], dtype=torch.uint8))
    assert len(storage.merge([few, (torch.ones(4),)], 1.0)) == 1
    (values,) = storage.read(())
    storage.apply(storage.merge([few], 1.0))
    assert torch.equal(storage.read(())[0], torch.ones(4))
    storage.apply((torch.ones(4),))
    assert torch.equal(values, torch.ones(4))  # what was read stays
    assert storage.statistics() == {"num_updates": 2, "num_bytes": 16}
    storage.set_lr(0.5)
    assert storage.lr == 0.5
    with pytest.raises(ConfigError, match="expected has uint8"):
        storage.check((torch.ones(4), torch.ones(3)))
    with pytest.raises(ConfigError, match="got 1 "):
        storage.load({"values": torch.ones(4)})
