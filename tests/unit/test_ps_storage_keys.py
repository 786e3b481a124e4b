"""Ids: all of 64 bits, spread evenly over shards; a hash index like a dict; rows by id alone."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braid.errors import ConfigError
from braid.ps.storage import Constant, Normal, Uniform, shard_of, to_signed, to_unsigned
from braid.ps.storage.hash_index import HashIndex
from braid.ps.storage.initial_rows import initial_rows, normal_quantiles
from braid.ps.storage.keys import mix

EXTREMES = [0, 1, -1, 2**63 - 1, -(2**63), 2**31, -(2**31), 2**32, 2**62]
MASK = 2**64 - 1
ids_of_64_bits = st.one_of(
    st.sampled_from(EXTREMES), st.integers(-(2**63), 2**63 - 1), st.integers(0, 9)
)


def splitmix64(value):
    """The generator's reference code, in Python's integers."""
    z = (value + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


@given(st.lists(ids_of_64_bits, max_size=20))
def test_hashes_are_those_of_splitmix64(ids):
    own = [each & MASK for each in mix(torch.tensor(ids, dtype=torch.int64)).tolist()]
    assert own == [splitmix64(each & MASK) for each in ids]


def test_the_first_number_of_splitmix64_is_the_published_one():
    assert mix(torch.tensor([1234567])).item() & MASK == 6457827717110365317


def test_unsigned_keys_keep_their_order_and_come_back():
    keys = torch.tensor([0, 1, 2**63 - 1, 2**63, 2**64 - 1], dtype=torch.uint64)
    ids = to_signed(keys)
    assert ids.tolist() == [-(2**63), 1 - 2**63, -1, 0, 2**63 - 1]
    assert torch.equal(to_unsigned(ids), keys)


@pytest.mark.parametrize("num_shards", [1, 2, 3, 64, 1000])
def test_small_consecutive_ids_spread_over_all_shards(num_shards):
    shards = shard_of(torch.arange(100 * num_shards), num_shards)
    counts = torch.bincount(shards, minlength=num_shards)
    assert len(counts) == num_shards
    # 100 each, with a standard deviation of 10
    assert counts.min() > 50
    assert counts.max() < 150


@given(st.lists(ids_of_64_bits), st.sampled_from([1, 2, 3, 7, 1024, 2**31]))
def test_each_id_has_a_shard(ids, num_shards):
    shards = shard_of(torch.tensor(ids, dtype=torch.int64), num_shards).tolist()
    assert shards == [(splitmix64(each & MASK) >> 32) * num_shards >> 32 for each in ids]


def test_ids_of_one_shard_do_not_share_buckets():
    ids = torch.arange(100_000)
    ids = ids[shard_of(ids, 64) == 17]
    buckets = mix(ids) & 4095
    assert len(torch.unique(buckets)) > 1200  # of 1560; 1300 are expected


def test_a_number_of_shards_out_of_range_is_named():
    for wrong in (0, -1, 2**31 + 1):
        with pytest.raises(ConfigError, match=f"from 1 to 2\\^31, got {wrong}"):
            shard_of(torch.arange(3), wrong)


@given(st.lists(st.tuples(st.booleans(), st.lists(ids_of_64_bits, max_size=60)), max_size=12))
def test_the_index_is_a_dict(batches):
    index, expected = HashIndex(), {}
    ids_of_slots = torch.zeros(1000, dtype=torch.int64)
    for removes, batch in batches:
        ids = [each for each in dict.fromkeys(batch) if (each in expected) == removes]
        if removes:
            index.remove(torch.tensor(ids, dtype=torch.int64), ids_of_slots)
            for each in ids:
                del expected[each]
        else:
            slots = [k for k in range(1000) if k not in expected.values()][: len(ids)]
            expected.update(zip(ids, slots, strict=True))
            ids_of_slots[slots] = torch.tensor(ids, dtype=torch.int64)
            if index.has_room(len(ids)):
                index.insert(
                    torch.tensor(ids, dtype=torch.int64), torch.tensor(slots, dtype=torch.int64)
                )
            else:
                live = torch.tensor(list(expected.values()))
                index.rebuild(ids_of_slots[live], live)
        queries = [*expected, *EXTREMES, *range(20)]
        slots = index.find(torch.tensor(queries), ids_of_slots).tolist()
        assert slots == [expected.get(each, -1) for each in queries]


def test_ids_that_all_want_one_bucket_are_all_there(monkeypatch):
    monkeypatch.setattr("braid.ps.storage.hash_index.mix", torch.zeros_like)
    index, ids = HashIndex(), torch.arange(32) * 5
    index.insert(ids, torch.arange(32))
    assert index.find(ids.flip(0), ids).tolist() == list(range(31, -1, -1))
    assert index.find(torch.tensor([1, 160]), ids).tolist() == [-1, -1]


@given(
    st.lists(ids_of_64_bits, min_size=1, max_size=20),
    st.sampled_from([Normal(1, 2), Uniform(-1, 3)]),
)
def test_an_initial_row_depends_on_nothing_but_its_id(ids, init):
    together = initial_rows(init, 7, "emb", torch.tensor(ids), 5, torch.float32)
    for each, row in zip(ids, together, strict=True):
        assert torch.equal(
            initial_rows(init, 7, "emb", torch.tensor([each]), 5, torch.float32)[0], row
        )


def test_seed_and_table_make_other_rows():
    rows = [
        initial_rows(Normal(), seed, table, torch.arange(4), 3, torch.float64)
        for seed, table in ((0, "a"), (1, "a"), (0, "b"))
    ]
    assert len({each.item() for each in torch.cat(rows).flatten()}) == 36


def test_initial_rows_have_their_distributions():
    ids = torch.arange(20_000)
    normal = initial_rows(Normal(1.0, 2.0), 0, "emb", ids, 8, torch.float32)
    uniform = initial_rows(Uniform(-1.0, 3.0), 0, "emb", ids, 8, torch.float32)
    constant = initial_rows(Constant(0.5), 0, "emb", ids, 8, torch.bfloat16)
    # 160,000 numbers: five standard errors of each mean and deviation
    assert normal.mean().item() == pytest.approx(1.0, abs=0.025)
    assert normal.std().item() == pytest.approx(2.0, abs=0.018)
    assert uniform.mean().item() == pytest.approx(1.0, abs=0.015)
    assert uniform.min() > -1.0
    assert uniform.max() < 3.0
    assert constant.dtype == torch.bfloat16
    assert constant.unique().tolist() == [0.5]


def test_quantiles_are_those_of_the_normal_distribution():
    p = torch.tensor(
        [2.0**-25, 1e-6, 0.01, 0.0749, 0.0751, 0.3, 0.5, 0.51, 0.9, 0.9251, 1 - 2.0**-25],
        dtype=torch.float64,
    )
    expected = [statistics.NormalDist().inv_cdf(each) for each in p.tolist()]
    assert normal_quantiles(p).tolist() == pytest.approx(expected, rel=1e-6)


def test_wrong_distributions_are_named():
    with pytest.raises(ConfigError, match=r"low <= high, got 1.0, 0.0"):
        Uniform(1.0, 0.0)
    with pytest.raises(ConfigError, match=r"std >= 0, got 0.0, -1.0"):
        Normal(0.0, -1.0)
