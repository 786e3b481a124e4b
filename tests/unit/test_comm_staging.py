"""Slots of a rank: two steps in a row never share one, and large data passes through several."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from braid.comm.channel.staging import LARGE_BYTES, SLOTS_BYTES, Staging
from braid.runtime.transport import Fabric

SIZES = st.lists(st.integers(0, 22).map(lambda power: 3 << power >> 1), max_size=40)


def _steps(staging: Staging, sizes: list[int]) -> list[torch.Tensor]:
    """Memory of each step, published as a channel does."""
    memory = []
    for size in sizes:
        memory.append(staging.slot(size, torch.uint8))
        staging.turn += staging.nbytes > 0
    return memory


@given(SIZES)
def test_two_steps_in_a_row_never_share_memory(sizes):
    with Fabric(1) as fabric:
        staging = Staging(fabric.transports[0], [1], shares=True)
        for size in sizes:
            first, second = _steps(staging, [size, 1 << 16])
            first.fill_(1)
            second.fill_(2)
            (third,) = _steps(staging, [size])
            third.fill_(3)
            assert (second == 2).all()
        staging.free()
        assert fabric.transports[0].arena.statistics()["used_bytes"] == 0


def test_large_data_passes_through_more_memory_than_a_cache_holds():
    with Fabric(1) as fabric:
        for shares, size, num_slots in (
            (True, LARGE_BYTES - 1, 2),
            (True, LARGE_BYTES, SLOTS_BYTES // LARGE_BYTES),
            (True, 256 << 10, 8),
            (True, SLOTS_BYTES, 2),
            (False, 256 << 10, 2),  # the network copies it
        ):
            staging = Staging(fabric.transports[0], [1], shares=shares)
            places = [x.data_ptr() for x in _steps(staging, [size] * 2 * num_slots)]
            assert len(set(places)) == num_slots
            assert places[:num_slots] == places[num_slots:]
            staging.free()
