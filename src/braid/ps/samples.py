"""Samples that the scheduler deals out: what a dead worker has not finished goes to others.

    for samples in node.samples("train", len(data), shard_size=1000, epochs=2):
        for batch in samples.split(...): ...        # a range of sample numbers

A shard counts as finished when the worker asks for the next one, so finish its pushes before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from braid.errors import ConfigError
from braid.ps.customer import Customer
from braid.ps.messages import Dealt, NextData, check_type
from braid.ps.roles import SCHEDULER
from braid.runtime.message import Delivery

__all__ = ["samples"]


def samples(
    customer: Customer, name: str, num_samples: int, shard_size: int, epochs: int = 1
) -> Iterator[range]:
    """Yield ranges of samples until all workers together have finished all of them.

    Raises:
        ConfigError: A number is less than 1, or the name is no text.
        PeerLostError: The run cannot go on.
    """
    check_type("the name of samples is a text", name, str)
    if min(num_samples, shard_size, epochs) < 1:
        msg = (
            f"num_samples, shard_size and epochs must be at least 1, got {num_samples}, "
            f"{shard_size} and {epochs}"
        )
        raise ConfigError(msg)
    per_epoch = -(-num_samples // shard_size)
    done: tuple[int, ...] = ()
    dealt: list[int] = []

    def build(parts: tuple[int, ...]) -> tuple[NextData, Sequence[memoryview]]:
        del parts
        return NextData(name, per_epoch * epochs, done), ()

    def on_answer(delivery: Delivery, parts: tuple[int, ...]) -> None:
        del parts
        assert isinstance(delivery.message, Dealt), "data is answered with a shard"
        dealt.append(delivery.message.shard)

    while True:
        customer.wait(customer.request([0], lambda _: SCHEDULER, build, on_answer=on_answer))
        shard = dealt.pop()
        if shard < 0:
            return
        begin = shard % per_epoch * shard_size
        yield range(begin, min(begin + shard_size, num_samples))
        done = (shard,)
