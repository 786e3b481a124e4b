"""The order of samples: a permutation, the same for any number of ranks, continued exactly."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.errors import CheckpointError, ConfigError
from braid.programs.sampling import OrderedSampler, Permutation, SampleOrder, SamplerState, share_of


@given(n=st.integers(1, 400), seed=st.integers(0, 2**40), epoch=st.integers(0, 9))
def test_every_element_appears_once(n, seed, epoch):
    permutation = Permutation(n, (seed, epoch))
    assert sorted(permutation[i] for i in range(n)) == list(range(n))


def test_a_hundred_million_elements_cost_no_memory():
    permutation = Permutation(100_000_000, (1,))
    found = [permutation[i] for i in range(0, 100_000_000, 1_000_000)]
    assert len(set(found)) == 100
    assert all(0 <= x < 100_000_000 for x in found)


def test_neighbours_are_scattered():
    n = 1000
    permutation = Permutation(n, (7, 0))
    shuffled = [permutation[i] for i in range(n)]
    # a random permutation moves an element by n/3 on average, with a standard error of about n/130
    distance = sum(abs(x - i) for i, x in enumerate(shuffled)) / n
    assert abs(distance - n / 3) < 5 * n / 130
    gaps = sum(abs(a - b) for a, b in itertools.pairwise(shuffled)) / (n - 1)
    assert abs(gaps - n / 3) < 5 * n / 130


def test_a_small_set_takes_every_order_about_equally_often():
    counts: dict[tuple[int, ...], int] = {}
    for key in range(2400):
        permutation = Permutation(4, (key,))
        order = tuple(permutation[i] for i in range(4))
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    # chi-square with 23 degrees of freedom: mean 23, standard deviation 6.8; 60 is beyond 5 of them
    assert sum((count - 100) ** 2 / 100 for count in counts.values()) < 60


def test_epochs_and_seeds_have_different_orders():
    orders = {
        tuple(SampleOrder(num_samples=64, batch_size=64, seed=seed).batch(SamplerState(epoch)))
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 9


def test_the_order_never_changes_between_versions():
    order = SampleOrder(num_samples=1000, batch_size=6, seed=1)
    assert order.batch(SamplerState(2, 5)) == [404, 981, 962, 222, 240, 727]


@given(
    st.integers(1, 6), st.integers(1, 6), st.integers(1, 5), st.integers(0, 20), st.integers(0, 99)
)
def test_any_number_of_ranks_sees_the_same_global_batches(n, m, per_rank, done, seed):
    order = SampleOrder(
        num_samples=n * m * per_rank * 3 + 1, batch_size=n * m * per_rank, seed=seed
    )

    def batches(size: int, state: dict[str, int] | None = None) -> list[list[int]]:
        ranks = [OrderedSampler(order, rank=r, num_replicas=size) for r in range(size)]
        if state is not None:
            for sampler in ranks:
                sampler.load_state_dict(state)
        return [[i for s in ranks for i in s.next_batch()] for _ in range(4)]

    first = OrderedSampler(order)
    for _ in range(done):
        first.next_batch()
    state = first.state_dict()
    following = [first.next_batch() for _ in range(4)]
    assert batches(1, state) == batches(n, state) == batches(m, state) == following


def test_an_epoch_ends_and_the_next_begins():
    sampler = OrderedSampler(SampleOrder(num_samples=7, batch_size=2))
    assert len(list(sampler)) == len(sampler) == 6
    assert sampler.state == SamplerState(1, 0)
    sampler.set_epoch(5)
    assert sampler.state == SamplerState(5, 0)


def test_a_batch_that_cannot_be_shared_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"batch of 10 samples .* 4 ranks.* such as 8 or 12"):
        OrderedSampler(SampleOrder(num_samples=100, batch_size=10), num_replicas=4)
    with pytest.raises(ConfigError, match=r"batch of 2 samples .* 3 ranks.* such as 3 or 6"):
        share_of([1, 2], 0, 3)
    with pytest.raises(ConfigError, match=r"rank must be from 0 to 1, got 2"):
        share_of([1, 2], 2, 2)


@pytest.mark.parametrize("batch", [0, 11])
def test_a_batch_larger_than_the_data_is_refused(batch):
    with pytest.raises(ConfigError, match=f"1 to 10 .* got {batch}"):
        SampleOrder(num_samples=10, batch_size=batch)


def test_a_state_of_another_order_lists_every_difference():
    state = OrderedSampler(SampleOrder(num_samples=10, batch_size=2, seed=1)).state_dict()
    other = OrderedSampler(SampleOrder(num_samples=12, batch_size=2, seed=3))
    with pytest.raises(CheckpointError, match=r"num_samples 10 \(here 12\), seed 1 \(here 3\)"):
        other.load_state_dict(state)
    with pytest.raises(CheckpointError, match="no valid epoch and step"):
        other.load_state_dict({**other.state_dict(), "step": 6})
