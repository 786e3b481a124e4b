"""A table's state does not depend on its number of shards, and training goes on with any other."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from braid.errors import ConfigError
from braid.ps.storage import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    Admission,
    DenseStorage,
    Eviction,
    Normal,
    RowWiseAdagrad,
    SparseStorage,
    SumStorage,
    join_shards,
    ranges_of_shards,
    shard_of,
    split_state,
)

NUMEL, DIM = 37, 3
DENSE = {
    "momentum": SGD(0.1, momentum=0.9, weight_decay=0.01),
    "adam": Adam(0.1),
    "ftrl": FTRL(0.1, l1=0.1),
    "torch_adam": partial(torch.optim.Adam, lr=0.1, amsgrad=True),
    "torch_nadam": partial(torch.optim.NAdam, lr=0.1),
    "torch_sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
}


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same(left, right):
    return left.keys() == right.keys() and all(
        torch.equal(each, right[name]) and each.dtype == right[name].dtype
        for name, each in left.items()
    )


class Dense:
    """A dense table of some shards."""

    def __init__(self, num_shards, rule):
        self.ranges = ranges_of_shards(NUMEL, num_shards)
        self.shards = [DenseStorage(numbers(NUMEL)[own], rule, table="w") for own in self.ranges]

    def train(self, steps):
        for step in steps:
            grads = [numbers(NUMEL, seed=10 * step + k) for k in range(3)]
            for storage, own in zip(self.shards, self.ranges, strict=True):
                storage.apply(storage.merge([(grad[own],) for grad in grads], 1 / 3))


class Sparse:
    """A sparse table of some shards."""

    def __init__(self, num_shards, rule):
        self.shards = [
            SparseStorage(
                DIM,
                Normal(),
                rule,
                seed=0,
                table="emb",
                admit=Admission(min_pushes=2),
                evict=Eviction(unused_updates=5),
            )
            for _ in range(num_shards)
        ]

    def train(self, steps):
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            pushes = [
                (
                    torch.randint(5 * step - 30, 5 * step + 30, (25,), generator=generator),
                    numbers(25, DIM, seed=10 * step + k),
                )
                for k in range(3)
            ]
            for shard, storage in enumerate(self.shards):
                own = [shard_of(ids, len(self.shards)) == shard for ids, _ in pushes]
                parts = [
                    (ids[mask], grads[mask]) for (ids, grads), mask in zip(pushes, own, strict=True)
                ]
                storage.apply(storage.merge(parts, 1 / 3))


TABLES = [
    *(pytest.param(partial(Dense, rule=rule), id=f"dense-{name}") for name, rule in DENSE.items()),
    *(
        pytest.param(partial(Sparse, rule=rule), id=f"sparse-{type(rule).__name__}")
        for rule in (
            SGD(0.1, momentum=0.9),
            Adagrad(0.1),
            RowWiseAdagrad(0.1),
            Adam(0.1),
            FTRL(0.1),
        )
    ),
]


def exported(table):
    return [storage.export() for storage in table.shards]


@pytest.mark.parametrize("make", TABLES)
def test_training_goes_on_with_another_number_of_shards_bit_by_bit(make):
    whole, divided = make(1), make(3)
    whole.train(range(8))
    divided.train(range(8))
    state = join_shards(exported(divided))
    assert same(state, whole.shards[0].export())
    whole.train(range(8, 16))
    divided.train(range(8, 16))
    expected = whole.shards[0].export()
    assert same(join_shards(exported(divided)), expected)
    for num_shards in (1, 2, 5):
        others = make(num_shards)
        for storage, part in zip(others.shards, split_state(state, num_shards), strict=True):
            storage.load(part)
        assert same(join_shards(exported(others)), state)
        others.train(range(8, 16))
        assert same(join_shards(exported(others)), expected)


def test_the_sparse_run_above_admits_drops_and_evicts():
    table = Sparse(1, Adagrad(0.1))
    table.train(range(16))
    counts = table.shards[0].statistics()
    assert min(counts[f"num_{name}"] for name in ("admitted", "dropped", "evicted", "rows")) > 10


def test_there_may_be_more_shards_than_elements():
    storage = SumStorage(torch.arange(3.0), table="w")
    parts = split_state(storage.export(), 5)
    assert [part["values"].tolist() for part in parts] == [[], [0.0], [], [1.0], [2.0]]
    assert join_shards(parts)["values"].tolist() == [0.0, 1.0, 2.0]


def test_ages_of_rows_are_kept_where_shards_have_other_numbers_of_updates():
    states = []
    for shard, updates in enumerate((1, 4)):
        storage = SparseStorage(1, Normal(), SGD(0.1), seed=0, table="emb")
        for _ in range(updates):
            storage.apply((torch.tensor([shard]), torch.ones(1, 1)))
        storage.apply((torch.tensor([10 + shard]), torch.ones(1, 1)))
        states.append(storage.export())
    joined = join_shards(states)
    assert int(joined["updates"]) == 5
    assert dict(
        zip(joined["ids"].tolist(), joined["last_update"].flatten().tolist(), strict=True)
    ) == {0: 4, 10: 5, 1: 4, 11: 5}


def test_parts_have_memory_of_their_own():
    state = SumStorage(torch.zeros(4), table="w").export()
    for each in (split_state(state, 1)[0], join_shards([state])):
        each["values"].fill_(1)
    assert state["values"].tolist() == [0.0] * 4


def test_shards_that_do_not_belong_together_are_named():
    dense, sparse = exported(Dense(2, Adam(0.1))), exported(Sparse(2, Adagrad(0.1)))
    table = Dense(2, Adam(0.1))
    table.shards[0].apply((torch.ones(18),))
    rows = SparseStorage(1, Normal(), SGD(0.1), seed=0, table="emb")
    rows.apply((torch.tensor([7]), torch.ones(1, 1)))
    slower = SparseStorage(1, Normal(), SGD(0.2), seed=0, table="emb").export()
    for make, text in (
        (partial(join_shards, []), "at least one shard: pass the state of each shard"),
        (
            partial(join_shards, [dense[0], sparse[1]]),
            "shard 1 and shard 0 belong to different tables or clocks.* one state lacks candidate.count",
        ),
        (
            partial(join_shards, exported(table)),
            "can be joined only after the same update, but .* is 1 on shard 0, 0 on shard 1",
        ),
        (partial(join_shards, [rows.export()] * 2), "id 7 is in the states of several shards"),
        (partial(join_shards, [rows.export(), slower]), "but lr is 0.1 on shard 0, 0.2 on shard 1"),
        (partial(split_state, dense[0], 0), "at least one shard, got 0"),
    ):
        with pytest.raises(ConfigError, match=text):
            make()
