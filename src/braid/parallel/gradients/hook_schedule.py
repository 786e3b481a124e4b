"""Schedule of communication hooks: calls in the order of buckets, and their steps in turns.

Buckets become full in a different order on every rank, but hooks share the channels of their group.
So a hook is called when its bucket and all buckets before it are full. The steps of all hooks are
taken at the end of backward, one step of each bucket at a time, in the order of buckets. So a hook
may start collectives without regard to the order on other ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from braid.comm import Group
from braid.parallel.gradients.bucket import Awaited, Bucket
from braid.parallel.gradients.grad_bucket import GradBucket, Hook, Steps, steps_of

__all__ = ["HookSchedule", "StateHook"]

StateHook = tuple[object, Hook]


class HookSchedule:
    """Runner that calls a communication hook for the buckets of a backward, in a fixed order.

    Args:
        group: Ranks that reduce together.
        hook: State and function passed to `register_comm_hook`.
        num_buckets: Largest number of buckets in a backward.
    """

    def __init__(self, group: Group, hook: StateHook, num_buckets: int) -> None:
        self._group = group
        self._state, self._hook = hook
        self._num_buckets = num_buckets
        self._waiting: dict[int, Bucket] = {}  # full, but an earlier bucket is not
        self._next = 0
        self._steps: dict[int, Steps] = {}
        self._works: dict[int, Awaited | None] | None = None  # None until the first wait

    def launch(self, bucket: Bucket) -> Awaited:
        """Call the hook for `bucket` as soon as its turn comes; return a work for the result."""
        self._waiting[bucket.index] = bucket
        while self._next in self._waiting:
            self._call(self._next)
        return _HookWork(self, bucket.index)

    def wait(self, index: int) -> None:
        """Take steps of all hooks in turns until the hook of bucket `index` has ended."""
        for number in sorted(self._waiting):  # after a bucket that is not launched
            self._call(number)
        if self._works is None:
            self._works = {n: next(steps, None) for n, steps in sorted(self._steps.items())}
        while index in self._works:
            for number, work in list(self._works.items()):
                if work is None:
                    del self._works[number]
                else:
                    work.wait()
                    self._works[number] = next(self._steps[number], None)

    def reset(self) -> None:
        """Reset the schedule for a new backward."""
        self._waiting.clear()
        self._steps.clear()
        self._works = None
        self._next = 0

    def _call(self, index: int) -> None:
        bucket = self._waiting.pop(index)
        self._next = index + 1
        shown = GradBucket(
            index,
            bucket.buffer.tensor,
            gradients=bucket.buffer.views,
            parameters=[record.param for record in bucket.records],
            names=[record.name for record in bucket.records],
            last=index == self._num_buckets - 1,
            group=self._group,
        )
        with self._aborting(shown):
            steps = steps_of(self._hook(self._state, shown), shown)
        self._steps[index] = self._guarded(steps, shown)

    def _guarded(self, steps: Steps, shown: GradBucket) -> Steps:
        with self._aborting(shown):
            yield from steps

    @contextlib.contextmanager
    def _aborting(self, shown: GradBucket) -> Iterator[None]:
        """Abort the group if the hook raises: other ranks wait in the middle of its messages."""
        try:
            yield
        except Exception as error:
            name = getattr(self._hook, "__qualname__", None) or repr(self._hook)
            number = self._group.context.health.number(self._group.ranks[self._group.rank])
            self._group.abort(
                f"rank {number}: the communication hook {name} for "
                f"{shown!r} raised {type(error).__name__}: {error}"
            )
            raise


class _HookWork(NamedTuple):
    schedule: HookSchedule
    bucket: int

    def wait(self) -> None:
        self.schedule.wait(self.bucket)
