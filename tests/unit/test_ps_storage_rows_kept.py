"""Admission and eviction: rows of ids that come back, alike on all replicas, and counted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braid.errors import ConfigError
from braid.ps.storage import SGD, Admission, Constant, Eviction, Normal, SparseStorage

ids_of_updates = st.lists(st.lists(st.integers(-3, 9), unique=True, max_size=6), max_size=25)


def table(admit=None, evict=None, init=Constant(0.0)):  # noqa: B008
    return SparseStorage(2, init, SGD(1.0), seed=0, table="emb", admit=admit, evict=evict)


def update(storage, *ids):
    push = (torch.tensor(sorted(ids), dtype=torch.int64), -torch.ones(len(ids), 2))
    storage.apply(storage.merge([push], 1.0))


def rows_of(storage):
    state = storage.export()
    return dict(zip(state["ids"].tolist(), state["values"][:, 0].tolist(), strict=True))


def counts_of(storage):
    numbers = storage.statistics()
    return tuple(numbers[f"num_{name}"] for name in ("admitted", "dropped", "evicted"))


def same(left, right):
    return left.keys() == right.keys() and all(
        torch.equal(each, right[name]) for name, each in left.items()
    )


def test_an_id_gets_its_row_with_the_nth_update():
    storage = table(Admission(min_pushes=3))
    update(storage, 5, 17)
    update(storage, 17)
    assert rows_of(storage) == {}
    update(storage, 5, 17)
    assert rows_of(storage) == {17: 1.0}
    update(storage, 5, 17)
    assert rows_of(storage) == {5: 1.0, 17: 2.0}
    assert counts_of(storage) == (2, 4, 0)
    assert storage.statistics()["num_candidates"] == 0


def test_an_id_that_is_not_admitted_reads_its_initial_row():
    storage, ids = table(Admission(min_pushes=2), init=Normal()), torch.tensor([1, 2])
    (before,) = storage.read((ids,))
    update(storage, 1, 2)
    assert torch.equal(storage.read((ids,))[0], before)


def test_candidates_that_are_pushed_least_recently_are_forgotten_first():
    storage = table(Admission(min_pushes=2, max_candidates=2))
    update(storage, 1, 2)
    update(storage, 3)  # forgets 1, the lowest id of the oldest update
    update(storage, 1, 2)
    assert rows_of(storage) == {2: 1.0}
    assert storage.statistics()["num_candidates"] == 2


def test_rows_without_updates_are_removed():
    storage = table(evict=Eviction(unused_updates=3))
    update(storage, 1, 2)
    update(storage, 2)
    update(storage)
    assert rows_of(storage) == {1: 1.0, 2: 2.0}
    update(storage)
    assert rows_of(storage) == {2: 2.0}
    update(storage, 1)
    assert rows_of(storage) == {1: 1.0}
    assert counts_of(storage) == (3, 0, 2)


def test_passes_over_rows_are_rare():
    storage = table(evict=Eviction(unused_updates=32))
    update(storage, 1)
    for _ in range(32):
        update(storage)
    assert rows_of(storage) == {1: 1.0}
    update(storage)  # the 34th, and each second one makes a pass
    assert rows_of(storage) == {}


def test_the_least_recently_updated_rows_make_room():
    storage = table(evict=Eviction(max_rows=3))
    update(storage, 1, 2, 3)
    update(storage, 2)
    update(storage, 4)  # in place of 1, the lowest id of the oldest update
    assert rows_of(storage) == {2: 2.0, 3: 1.0, 4: 1.0}
    update(storage, 10, 11, 12, 13)
    assert rows_of(storage) == {11: 1.0, 12: 1.0, 13: 1.0}
    assert counts_of(storage) == (8, 0, 5)


def test_a_sixteenth_of_many_rows_is_removed_at_once():
    storage = table(evict=Eviction(max_rows=160))
    update(storage, *range(161))
    assert sorted(rows_of(storage)) == list(range(11, 161))


def test_slots_are_used_again():
    storage = table(evict=Eviction(max_rows=16))
    num_bytes = storage.statistics()["num_bytes"]
    for step in range(100):
        update(storage, *range(10 * step, 10 * step + 10))
    assert storage.statistics()["num_rows"] <= 16
    # at most 26 rows and a hash index, which both double
    assert storage.statistics()["num_bytes"] < 4 * num_bytes


class DictOfRows:
    """The reference, by definition: dicts of values, last updates and counts."""

    def __init__(self, min_pushes, unused_updates, max_rows):
        self.min_pushes, self.unused_updates, self.max_rows = min_pushes, unused_updates, max_rows
        self.rows, self.last, self.counts, self.step = {}, {}, {}, 0

    def update(self, ids):
        self.step += 1
        for each in ids:
            if each not in self.rows:
                count, _ = self.counts.get(each, (0, 0))
                self.counts[each] = (count + 1, self.step)
                if count + 1 < self.min_pushes:
                    continue
                del self.counts[each]
            self.rows[each] = self.rows.get(each, 0.0) + 1.0
            self.last[each] = self.step
        self.counts = {
            k: v for k, v in self.counts.items() if v[1] > self.step - self.unused_updates
        }
        by_age = sorted((last, each) for each, last in self.last.items() if each in self.rows)
        gone = [each for last, each in by_age if last <= self.step - self.unused_updates]
        excess = len(by_age) - len(gone) - self.max_rows
        gone += [each for _, each in by_age[len(gone) :]][: max(0, excess)]
        for each in gone:
            del self.rows[each]


@given(ids_of_updates, st.integers(1, 3), st.integers(1, 6), st.integers(1, 8))
def test_rows_are_those_of_the_definition_and_alike_on_a_replica(updates, min_pushes, unused, rows):
    options = (Admission(min_pushes=min_pushes), Eviction(unused_updates=unused, max_rows=rows))
    storage, replica = table(*options), table(*options)
    reference = DictOfRows(min_pushes, unused, rows)
    for step, ids in enumerate(updates):
        update(storage, *ids)
        reference.update(ids)
        assert rows_of(storage) == reference.rows
        if step == len(updates) // 2:
            replica.load(storage.export())  # whose slots are others from here on
        elif step > len(updates) // 2:
            update(replica, *ids)
            assert same(storage.export(), replica.export())


def test_counts_are_given_up_where_each_id_is_admitted():
    storage, other = table(Admission(min_pushes=3)), table()
    update(storage, 1)
    other.load(storage.export())
    assert other.statistics()["num_candidates"] == 0
    update(other, 1)
    assert rows_of(other) == {1: 1.0}


def test_conditions_that_cannot_be_are_named():
    for make, text in (
        (
            lambda: Admission(min_pushes=0),
            "min_pushes and max_candidates must be at least 1, got 0",
        ),
        (
            Eviction,
            "unused_updates or max_rows must be given, and be at least 1, got None and None",
        ),
        (lambda: Eviction(unused_updates=3, max_rows=0), "got 3 and 0"),
    ):
        with pytest.raises(ConfigError, match=text):
            make()
