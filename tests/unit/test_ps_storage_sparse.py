"""Sparse shards are dicts of rows, whatever the batches, dtypes, ids and replicas."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braid.errors import ConfigError
from braid.ps.storage import SGD, Adagrad, Adam, Constant, Normal, RowWiseAdagrad, SparseStorage
from braid.ps.storage.initial_rows import initial_rows
from braid.ps.storage.steppers import allocate

EXTREMES = [0, 1, -1, 2**63 - 1, -(2**63)]
ids_of_rows = st.lists(st.one_of(st.sampled_from(EXTREMES), st.integers(0, 30)), max_size=12)
RULES = [SGD(0.5), Adagrad(0.1), RowWiseAdagrad(0.1), Adam(0.1)]
NORMAL, DIM = Normal(), 3


def numbers(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def table(rule=RULES[1], dtype=torch.float32, init=NORMAL, dim=DIM, **options):
    return SparseStorage(dim, init, rule, seed=3, table="emb", dtype=dtype, **options)


def ids_of(*ids):
    return torch.tensor(ids, dtype=torch.int64)


def update(storage, *pushes, scale=1.0):
    for push in pushes:
        storage.check(push)
    storage.apply(storage.merge(pushes, scale))


def same(left, right):
    return left.keys() == right.keys() and all(
        torch.equal(each, right[name]) and each.dtype == right[name].dtype
        for name, each in left.items()
    )


class DictOfRows:
    """The reference: a row and its state by id, stepped one by one."""

    def __init__(self, rule, dtype=torch.float32):
        self.rule, self.dtype, self.rows = rule, dtype, {}
        self.wide = torch.promote_types(dtype, torch.float32)

    def first(self, each):
        return initial_rows(Normal(), 3, "emb", ids_of(each), DIM, self.dtype)

    def update(self, pushes, scale):
        sums = {}
        for ids, grads in pushes:
            for each, grad in zip(ids.tolist(), grads, strict=True):
                sums[each] = sums.get(each, 0) + grad.to(self.wide)
        for each, total in sums.items():
            row, state = self.rows.get(each) or (
                self.first(each),
                allocate(self.rule, (1, DIM), self.wide),
            )
            wide, grad = row.to(self.wide), (total * scale).to(self.dtype)
            self.rule.step(wide, grad[None].to(self.wide), state)
            self.rows[each] = (wide.to(self.dtype), state)

    def read(self, ids):
        rows = [
            self.rows[each][0] if each in self.rows else self.first(each) for each in ids.tolist()
        ]
        return torch.cat([torch.empty(0, DIM, dtype=self.dtype), *rows])


@given(
    st.sampled_from(RULES),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.lists(st.lists(ids_of_rows, min_size=1, max_size=3), max_size=6),
    ids_of_rows,
)
def test_a_shard_is_a_dict_of_rows(rule, dtype, updates, query):
    storage, reference = table(rule, dtype), DictOfRows(rule, dtype)
    for step, lists in enumerate(updates):
        pushes = [
            (ids_of(*ids), numbers(len(ids), DIM, seed=10 * step + k, dtype=dtype))
            for k, ids in enumerate(lists)
        ]
        reference.update([(ids, grads.clone()) for ids, grads in pushes], 0.5)
        update(storage, *pushes, scale=0.5)
        everything = ids_of(*query, *EXTREMES, *range(31))
        storage.check_query((everything,))
        assert torch.equal(storage.read((everything,))[0], reference.read(everything))
    state = storage.export()
    assert state["ids"].tolist() == sorted(reference.rows)
    other = table(rule, dtype)
    other.load(state)
    assert same(other.export(), state)


def test_growth_over_many_rehashes_loses_nothing():
    storage = table(SGD(1.0), init=Constant(0.0), dim=2)
    order = torch.randperm(20_000, generator=torch.Generator().manual_seed(0))
    ids = order * (2**49 + 7) - 2**62
    begin, size = 0, 1
    while begin < len(ids):
        part = slice(begin, begin + size)
        grads = torch.stack([order[part], -order[part]], dim=1).float()
        update(storage, (ids[part], grads))
        begin, size = begin + size, size + 7
    (rows,) = storage.read((ids,))
    assert torch.equal(rows, torch.stack([-order, order], dim=1).float())
    assert storage.export()["ids"].tolist() == sorted(ids.tolist())


def test_merged_ids_are_ascending_and_sums_follow_the_order_of_pushes():
    storage = table()
    first, second = numbers(3, DIM, seed=1), numbers(2, DIM, seed=2)
    ids, grads = storage.merge([(ids_of(9, -4, 9), first), (ids_of(9, 5), second)], 0.5)
    assert ids.tolist() == [-4, 5, 9]
    expected = torch.stack([first[1], second[1], (first[0] + first[2]) + second[0]]) * 0.5
    assert torch.equal(grads, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_merging_adds_row_by_row_in_order(dtype):
    storage = table(dtype=dtype, dim=5)
    ids = torch.randint(0, 40, (3000,), generator=torch.Generator().manual_seed(0))
    grads = numbers(3000, 5, seed=1, dtype=dtype)
    sums = torch.zeros(40, 5, dtype=torch.promote_types(dtype, torch.float32))
    for each, grad in zip(ids.tolist(), grads, strict=True):
        sums[each] += grad
    expected = sums.to(dtype)
    for _ in range(3):
        merged, sums = storage.merge([(ids[:1000], grads[:1000]), (ids[1000:], grads[1000:])], 1.0)
        assert merged.tolist() == list(range(40))
        assert torch.equal(sums, expected)


def test_a_push_in_order_is_its_own_merge():
    storage, grads = table(), numbers(3, DIM)
    _, merged = storage.merge([(ids_of(-1, 4, 9), grads)], 0.5)
    assert merged.data_ptr() == grads.data_ptr()
    assert torch.equal(merged, numbers(3, DIM) * 0.5)


def test_an_update_is_not_written_to():
    for rule in RULES:
        storage = table(rule)
        given_ = (ids_of(1, 2), numbers(2, DIM))
        storage.apply(given_)
        storage.apply(given_)
        assert torch.equal(given_[1], numbers(2, DIM))


def test_reading_creates_nothing_and_gives_copies():
    storage = table()
    (before,) = storage.read((ids_of(5, 5, 7),))
    assert storage.export()["ids"].tolist() == []
    update(storage, (ids_of(5), numbers(1, DIM)))
    (after,) = storage.read((ids_of(5, 7),))
    assert torch.equal(after[1], before[2])
    assert not torch.equal(after[0], before[0])
    kept = after.clone()
    update(storage, (ids_of(5, 7), numbers(2, DIM)))
    assert torch.equal(after, kept)


def test_empty_pushes_and_queries_are_as_good_as_others():
    storage = table()
    empty = (ids_of(), torch.empty(0, DIM))
    update(storage, empty)
    update(storage, empty, (ids_of(1), numbers(1, DIM)), empty)
    assert storage.read((ids_of(),))[0].shape == (0, DIM)
    state = storage.export()
    assert (state["ids"].tolist(), int(state["updates"])) == ([1], 2)


def test_tensors_may_have_gaps_in_memory():
    storage, other = table(), table()
    ids, grads = ids_of(4, 0, 2, 0, 9, 0)[::2], numbers(DIM, 3).T
    update(storage, (ids, grads))
    update(other, (ids.clone(), grads.contiguous()))
    query = ids_of(2, 0, 9, 0)[::2]
    assert torch.equal(storage.read((query,))[0], other.read((query.clone(),))[0])


def test_the_learning_rate_is_part_of_the_state():
    storage, other = table(SGD(1.0), init=Constant(0.0)), table(SGD(1.0), init=Constant(0.0))
    storage.set_lr(0.25)
    other.load(storage.export())
    update(other, (ids_of(1), torch.ones(1, DIM)))
    assert other.read((ids_of(1),))[0].tolist() == [[-0.25] * DIM]
    with pytest.raises(ConfigError, match="lr must be"):
        other.set_lr(-1)


@pytest.mark.parametrize(
    ("push", "text"),
    [
        (
            (torch.zeros(2), torch.zeros(2, 3)),
            r"a push does not match the table: expected ids int64\[n\], got float32\[2\]. Declare the same",
        ),
        ((ids_of(1, 2), torch.zeros(2, 4)), r"expected grads float32\[n, 3\], got float32\[2, 4\]"),
        (
            (ids_of(1, 2), torch.zeros(2, 3).double()),
            r"expected grads float32\[n, 3\], got float64\[2, 3\]",
        ),
        (
            (ids_of(1, 2)[None].int(), torch.zeros(6)),
            r"expected ids int64\[n\], got int32\[1, 2\]; expected grads float32\[n, 3\], got float32\[6\]",
        ),
        (
            (ids_of(1, 2), torch.zeros(3, 3)),
            "needs one gradient for each id, got 2 ids and 3 gradients",
        ),
        (
            (ids_of(1, 2),),
            r"a push has 2 tensors \(ids int64\[n\], grads float32\[n, 3\]\), got 1 \(int64\[2\]\)",
        ),
    ],
)
def test_a_push_that_does_not_fit_is_named(push, text):
    with pytest.raises(ConfigError, match=f"table 'emb': .*{text}"):
        table().check(push)


def test_a_query_that_does_not_fit_is_named():
    with pytest.raises(
        ConfigError,
        match=r"a query does not match the table: expected ids int64\[n\], got uint64\[1\]",
    ):
        table().check_query((torch.zeros(1, dtype=torch.uint64),))


def test_a_table_that_cannot_be_is_named():
    with pytest.raises(ConfigError, match="must be at least 1, got 0"):
        table(dim=0)
    with pytest.raises(ConfigError, match="a floating dtype, got int64"):
        table(dtype=torch.int64)


def test_a_state_that_does_not_fit_changes_nothing():
    storage = table()
    update(storage, (ids_of(1, 2), numbers(2, DIM)))
    state = storage.export()
    wrong = [
        ({}, "lacks candidate.count, .* ids, last_update"),
        (table(Adam(0.1)).export(), "lacks state.sum and has the unknown state.exp_avg"),
        (
            {**state, "values": torch.zeros(2, 4)},
            r"expected values float32\[2, 3\], got float32\[2, 4\]",
        ),
        (
            {**state, "values": torch.zeros(1, 3)},
            r"expected values float32\[2, 3\], got float32\[1, 3\]",
        ),
        ({**state, "lr": torch.tensor(-1.0).double()}, "lr must be"),
    ]
    for each, text in wrong:
        with pytest.raises(ConfigError, match=text):
            storage.load(each)
    assert same(storage.export(), state)
