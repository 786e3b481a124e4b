"""All ranks tell each other a value through a store."""

from __future__ import annotations

import threading

import pytest

from braid.runtime.store import HashStore, RanksMissingError, exchange


def test_every_rank_gets_the_values_of_all_in_their_order():
    store, ranks = HashStore(), (4, 2, 7)
    outputs: dict[int, list[bytes]] = {}

    def main(rank: int) -> None:
        value = f"of {rank}".encode()
        outputs[rank] = exchange(store, "names", rank, ranks, value, timeout_s=30.0)

    threads = [threading.Thread(target=main, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert outputs == {rank: [b"of 4", b"of 2", b"of 7"] for rank in ranks}


def test_ranks_that_do_not_come_are_named():
    with pytest.raises(
        RanksMissingError, match=r"ranks \[1, 2\] have not joined the exchange 'job/names'"
    ) as caught:
        exchange(HashStore(), "job/names", 0, (0, 1, 2), b"", timeout_s=0.01)
    assert caught.value.ranks == [1, 2]


class _LateStore(HashStore):
    """A store in which the last value comes just after the wait for it has ended."""

    def wait(self, keys, timeout_s):
        try:
            super().wait(keys, timeout_s)
        finally:
            self.set("names/1", b"late")


def test_a_rank_that_comes_in_the_last_moment_is_not_missing():
    values = exchange(_LateStore(), "names", 0, (0, 1), b"early", timeout_s=0.01)
    assert values == [b"early", b"late"]


def test_a_rank_that_cannot_come_any_more_ends_the_wait():
    def check() -> None:
        raise ConnectionError("rank 1 has died")

    with pytest.raises(ConnectionError, match="rank 1 has died"):
        exchange(HashStore(), "names", 0, (0, 1), b"", timeout_s=30.0, check=check)
