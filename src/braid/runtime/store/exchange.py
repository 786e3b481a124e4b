"""Exchange of one value per rank through a store."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from braid.errors import CommTimeout
from braid.runtime.clock import Clock, MonotonicClock
from braid.runtime.store.interface import Store

__all__ = ["RanksMissingError", "exchange", "exchange_numbers"]

LOOK_S = 0.25  # pause between two calls of `check` while ranks are missing


class RanksMissingError(CommTimeout):
    """Some ranks have not published their value within the time-out.

    Attributes:
        ranks: The missing ranks.

    Args:
        topic: Name of the exchange.
        ranks: The missing ranks.
        timeout_s: Time-out in seconds.
    """

    def __init__(self, topic: str, ranks: Sequence[int], timeout_s: float) -> None:
        super().__init__(
            f"ranks {list(ranks)} have not joined the exchange {topic!r} within {timeout_s:g} s: "
            "see their errors, whether they were started, and whether all ranks make their groups "
            "in the same order"
        )
        self.ranks = list(ranks)


def exchange(
    store: Store,
    topic: str,
    rank: int,
    ranks: Sequence[int],
    value: bytes,
    *,
    timeout_s: float,
    clock: Clock | None = None,
    check: Callable[[], None] | None = None,
) -> list[bytes]:
    """Publish a value to `ranks` and return their values, in the order of `ranks`.

    Args:
        store: Store that all ranks use.
        topic: Name of the exchange, the same on all ranks; used only once.
        rank: This rank, one of `ranks`.
        ranks: Ranks that take part.
        value: Value of this rank.
        timeout_s: Seconds to wait for the other ranks.
        clock: Clock for the deadline; the host's when None.
        check: Called while ranks are missing; raises if they cannot come any more.

    Raises:
        RanksMissingError: Some ranks have not published their value within the time-out.
    """
    store.set(f"{topic}/{rank}", value)
    wait_for_ranks(store, topic, ranks, timeout_s=timeout_s, clock=clock, check=check)
    return store.multi_get([f"{topic}/{other}" for other in ranks])


def exchange_numbers(
    store: Store,
    topic: str,
    rank: int,
    ranks: Sequence[int],
    number: int,
    *,
    timeout_s: float,
    check: Callable[[], None],
) -> list[int]:
    """Publish a number to `ranks` and return their numbers, as `exchange` does."""
    value = str(number).encode()
    values = exchange(store, topic, rank, ranks, value, timeout_s=timeout_s, check=check)
    return [int(value) for value in values]


def wait_for_ranks(
    store: Store,
    topic: str,
    ranks: Sequence[int],
    *,
    timeout_s: float,
    clock: Clock | None = None,
    check: Callable[[], None] | None = None,
) -> None:
    """Wait until all `ranks` have published; see `exchange` for arguments and errors."""
    clock = clock or MonotonicClock()
    keys = [f"{topic}/{rank}" for rank in ranks]
    deadline_ns = clock.after_ns(timeout_s)
    while True:
        left_s = (deadline_ns - clock.now_ns()) / 1e9
        try:
            store.wait(keys, max(1e-3, left_s if check is None else min(left_s, LOOK_S)))
        except CommTimeout:
            if check is not None:
                check()
            if left_s <= LOOK_S or check is None:
                missing = [
                    rank for rank, key in zip(ranks, keys, strict=True) if not store.check([key])
                ]
                if not missing:  # the last came after the wait
                    return
                raise RanksMissingError(topic, missing, timeout_s) from None
        else:
            return
