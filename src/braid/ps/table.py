"""A worker's face of any table: clocks, requests to its shards, and settings by clock.

    timestamp = table.push(...)      begins the next clock
    table.wait(timestamp)            accepted: on all servers of the chains
    table.pull(...)                  waits until the values are as new as the consistency says

Requests overlap. Those of one worker reach a shard in the order of its calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from braid.errors import ConfigError
from braid.ps.consistency import BSP, Consistency
from braid.ps.messages import Pull, Pulled, TableChange, check_type
from braid.ps.tables import TableSpec
from braid.runtime.message import Delivery

if TYPE_CHECKING:
    from braid.ps.client import Client
    from braid.ps.customer import Build, Memory, OnAnswer

__all__ = ["Table"]


class Table:
    """A table, as a worker sees it.

    Args:
        client: Requests of this worker; None on servers and the scheduler.
        spec: The table.

    Attributes:
        name: Name of the table.
        clock: Number of pushes so far.
    """

    def __init__(self, client: Client | None, spec: TableSpec) -> None:
        self._own_client = client
        self._spec = spec
        self.name = spec.name
        self.clock = 0

    @property
    def num_shards(self) -> int:
        """Number of shards, which lie on all servers."""
        return self._spec.num_shards

    @property
    def epoch(self) -> int:
        """Epoch of the directory."""
        return self._client.epoch

    def set_consistency(self, consistency: Consistency, at_clock: int | None = None) -> int:
        """Let another consistency hold from a clock on; all workers say so, or one of them.

        Args:
            consistency: The other one.
            at_clock: The clock; this worker's when None.

        Returns:
            The timestamp of the request, for which `wait` raises CommError if the clock is over.

        Raises:
            ConfigError: An argument has another type.
        """
        return self._change(at_clock, consistency=consistency)

    def set_lr(self, lr: float, at_clock: int | None = None) -> int:
        """Let servers step with another learning rate from a clock on; see `set_consistency`."""
        return self._change(at_clock, lr=lr)

    def fetch_clock(self) -> int:
        """Return the least clock that servers expect of this worker, over all shards.

        Raises:
            CommError: This worker has been removed from the run.
            PeerLostError: A server was lost with all copies of a shard.
        """
        clocks: list[int] = []

        def build(parts: tuple[int, ...]) -> tuple[Pull, Sequence[memoryview]]:
            return Pull(self.epoch, self.name, 0, parts, [[] for _ in parts], clocks=True), ()

        def on_answer(delivery: Delivery, parts: tuple[int, ...]) -> None:
            del parts
            message = delivery.message
            assert isinstance(message, Pulled), "a question for clocks is answered with clocks"
            clocks.extend(message.versions)

        self.wait(self._request(range(self.num_shards), build, on_answer=on_answer))
        return min(clocks)

    def wait(self, timestamp: int, timeout_s: float | None = None) -> None:
        """Wait until a request is answered in full.

        Raises:
            CommError: A server refuses.
            PeerLostError: A server was lost with all copies of a shard.
            CommTimeout: No answer came.
        """
        self._client.wait(timestamp, timeout_s)

    def is_done(self, timestamp: int) -> bool:
        """Whether a request is answered in full; never waits."""
        return self._client.is_done(timestamp)

    @property
    def _client(self) -> Client:
        if self._own_client is None:
            msg = f"only workers pull and push table {self.name!r}: servers serve()"
            raise ConfigError(msg)
        return self._own_client

    def _request(
        self,
        shards: Iterable[int],
        build: Build,
        *,
        on_answer: OnAnswer | None = None,
        memory: Memory | None = None,
        priority: int = 0,
    ) -> int:
        return self._client.request(
            self._spec, shards, build, on_answer=on_answer, memory=memory, priority=priority
        )

    def _push(self, build: Build, priority: int) -> int:
        """Push to all shards; the clock is over once the request is made, not when it fails."""
        timestamp = self._client.request(
            self._spec, range(self.num_shards), build, priority=priority, is_write=True
        )
        self.clock += 1
        return timestamp

    def _change(
        self,
        at_clock: int | None,
        *,
        consistency: Consistency | None = None,
        lr: float | None = None,
    ) -> int:
        clock = self.clock if at_clock is None else at_clock
        check_type("a clock is a whole number", clock, int)
        check_type("a learning rate is a number", 0.0 if lr is None else lr, (int, float))
        check_type("a consistency is a ps.Consistency", consistency or BSP, Consistency)

        def build(parts: tuple[int, ...]) -> tuple[TableChange, Sequence[memoryview]]:
            return TableChange(self.epoch, self.name, parts, clock, consistency, lr), ()

        return self._request(range(self.num_shards), build)
