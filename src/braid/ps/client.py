"""A worker's requests to tables: which server has a shard, and where its values go."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from braid.ps.customer import Build, Customer, Memory, OnAnswer
from braid.ps.messages import Pulled
from braid.ps.postoffice import Postoffice
from braid.ps.roles import server_node
from braid.ps.tables import TableSpec
from braid.runtime.message import Message

__all__ = ["Client"]


class Client:
    """Requests of a worker to tables.

    Args:
        postoffice: Post office of the node.
    """

    def __init__(self, postoffice: Postoffice) -> None:
        self._postoffice = postoffice
        self._customer = Customer(postoffice)
        postoffice.van.receive_into(Pulled, self._allocate)
        postoffice.register({}, on_tick=self._tick)

    @property
    def epoch(self) -> int:
        """Epoch of the directory."""
        return self._postoffice.epoch

    @property
    def customer(self) -> Customer:
        """Requests under way."""
        return self._customer

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until all servers and workers have joined; at once if they have.

        Raises:
            CommTimeout: Some have not; names them.
        """
        if self._postoffice.directory is None:
            self._postoffice.join(timeout_s)
            self._postoffice.raise_failure()

    def request(
        self,
        table: TableSpec,
        shards: Iterable[int],
        build: Build,
        *,
        on_answer: OnAnswer | None = None,
        on_done: Callable[[], None] | None = None,
        memory: Memory | None = None,
        priority: int = 0,
        is_write: bool = False,
    ) -> int:
        """Send a request to the heads of some shards of a table; see `Customer.request`.

        The first one waits until all servers and workers have joined.
        """
        self.join()

        def route(shard: int) -> str | None:
            directory = self._postoffice.directory
            assert directory is not None, "a node has a directory once it has joined"
            head = directory.head(table.virtual(shard))
            return None if head is None else server_node(head)

        return self._customer.request(
            shards,
            route,
            build,
            on_answer=on_answer,
            on_done=on_done,
            memory=memory,
            priority=priority,
            is_write=is_write,
        )

    def wait(self, timestamp: int, timeout_s: float | None = None) -> None:
        """Wait for a request; see `Customer.wait`."""
        self._customer.wait(timestamp, timeout_s)

    def wait_all(self, timeout_s: float | None = None) -> None:
        """Wait for all requests under way; see `Customer.wait`."""
        self._customer.wait_all(timeout_s)

    def is_done(self, timestamp: int) -> bool:
        """Whether a request is over; never waits. See `Postoffice.poll`."""
        return self._customer.is_done(timestamp)

    def _tick(self) -> None:
        """Wait no longer when the others have ended, as for a worker that was stopped."""
        office = self._postoffice
        if office.is_left_behind and not office.failure:
            office.remove(
                f"{office.node} is left behind: it was stopped or cut off, and the scheduler and "
                "the servers have ended meanwhile"
            )

    def _allocate(
        self, sender: str, message: Message, sizes: tuple[int, ...]
    ) -> list[memoryview] | None:
        del sender
        assert isinstance(message, Pulled), "only values have memory that waits for them"
        return self._customer.memory_for(message.request, message.parts, sizes)
