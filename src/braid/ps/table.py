"""Tables: their division into shards, and the methods that workers call.

    dense      shards are contiguous ranges of elements, of nearly equal length
    sparse     row `id` is on shard hash(id) mod num_shards

    timestamp = table.push(...)      begins the next clock
    table.wait(timestamp)            the push is accepted: all servers of the chains have it
    table.pull(...)                  waits until the values are as new as the consistency requires

All nodes declare the same tables, so the division is never sent. Requests overlap. A shard receives
the requests of one worker in the order of the worker's calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from braid.errors import ConfigError
from braid.ps.consistency import BSP, Consistency
from braid.ps.messages import Pull, Pulled, Push, Specs, TableChange, check_type
from braid.ps.protocol.directory import NUM_VIRTUAL, virtual_shard
from braid.ps.protocol.requests_state import Build, OnAnswer, PendingRequest
from braid.ps.protocol.shard_state import TaskKey
from braid.ps.storage import State, Storage, join_shards
from braid.runtime.message import Delivery
from braid.runtime.tensor_buffers import from_buffers

if TYPE_CHECKING:
    from braid.ps.customer import Customer

__all__ = ["Table", "TableSpec"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSpec:
    """Specification of a table (parameters on servers), the same on all nodes.

    Attributes:
        name: Name of the table.
        num_shards: Number of shards.
        consistency: Initial consistency: when pushes are applied, and pulls answered.
        make_storage: Function of a shard's number that returns its storage.
        form: Shape, dtype and all other properties on which nodes must agree, as text.
        first: Checksum of the first values, on which servers must agree.
        sizes: Lengths of the parameters that a dense table consists of, if it has several.
        lengths: Number of elements of each shard of a dense table; equal lengths when empty.
        place: Virtual shard of shard 0, which determines its server; depends on the table's name
            when None.
    """

    name: str
    num_shards: int
    consistency: Consistency
    make_storage: Callable[[int], Storage]
    form: str = ""
    first: int = 0
    sizes: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    place: int | None = None

    def virtual(self, shard: int) -> int:
        """Return the virtual shard that a shard belongs to, which determines its server."""
        if self.place is None:
            return virtual_shard(self.name, shard)
        return (self.place + shard) % NUM_VIRTUAL


class Table:
    """A table of parameters on servers, as a worker uses it.

    Args:
        customer: Customer of this worker; None on servers and the scheduler.
        spec: Spec of the table.

    Attributes:
        name: Name of the table.
        num_shards: Number of shards, which are distributed over all servers.
        clock: Number of pushes of this worker so far.
        task: Key of the next push while this worker runs a task that another worker may repeat:
            servers apply each key once. None for ordinary pushes.
    """

    def __init__(self, customer: Customer | None, spec: TableSpec) -> None:
        self._own_customer = customer
        self._spec = spec
        self.name = spec.name
        self.num_shards = spec.num_shards
        self._virtual = [spec.virtual(shard) for shard in range(spec.num_shards)]
        self.clock = 0
        self.task: TaskKey | None = None

    @property
    def epoch(self) -> int:
        """Number of the directory of shards and their servers; it changes when shards move."""
        return self._customer.postoffice.epoch

    def set_consistency(self, consistency: Consistency, at_clock: int | None = None) -> int:
        """Change the consistency from a clock on; one worker or all workers call it.

        Args:
            consistency: New consistency.
            at_clock: First clock of the new consistency; this worker's clock when None.

        Returns:
            The timestamp of the request; `wait` raises CommError if that clock is over.

        Raises:
            ConfigError: An argument has a wrong type.
        """
        return self._change(at_clock, consistency=consistency)

    def set_lr(self, lr: float, at_clock: int | None = None) -> int:
        """Change the servers' learning rate from a clock on; see `set_consistency`."""
        return self._change(at_clock, lr=lr)

    def fetch_clock(self) -> int:
        """Return the clock of this worker's next push, the least one over all shards.

        Raises:
            CommError: This worker has been removed from the run.
            PeerLostError: A server was lost with all copies of a shard.
        """
        return min(self._fetch("clock"))

    def fetch_oldest_task(self) -> int:
        """Return the number of the oldest task that servers do not know to be finished."""
        return max(self._fetch("oldest task"))

    def _fetch(self, number: Literal["clock", "oldest task"]) -> list[int]:
        """Return the requested number of each shard."""
        numbers: list[int] = []

        def build(parts: tuple[int, ...]) -> tuple[Pull, Sequence[memoryview]]:
            return Pull(self.epoch, self.name, 0, parts, [[] for _ in parts], number=number), ()

        def on_answer(delivery: Delivery, parts: tuple[int, ...]) -> None:
            del parts
            message = delivery.message
            assert isinstance(message, Pulled), "a request for numbers is answered with numbers"
            numbers.extend(message.versions)

        self.wait(self._request(build, on_answer))
        return numbers

    def export(self) -> State:
        """Return the whole state of the table at this worker's clock, for snapshots.

        Cost: the whole state is sent to this worker, and needs its size in memory twice.

        Raises:
            CommError: A server refuses.
            CommTimeout: No answer came.
        """
        states: dict[int, State] = {}

        def build(parts: tuple[int, ...]) -> tuple[Pull, Sequence[memoryview]]:
            specs: Specs = [[] for _ in parts]
            return Pull(self.epoch, self.name, self.clock, parts, specs, whole=True), ()

        def on_answer(delivery: Delivery, parts: tuple[int, ...]) -> None:
            message = delivery.message
            assert isinstance(message, Pulled), "a pull is answered with values"
            flat = [one for specs in message.specs for one in specs]
            tensors = iter(from_buffers(flat, delivery.buffers))
            for part, names in zip(message.parts, message.names, strict=True):
                state = {name: next(tensors) for name in names}
                if part in parts:
                    states[part] = state

        self.wait(self._request(build, on_answer))
        return join_shards([states[part] for part in range(self.num_shards)])

    def wait(self, timestamp: int, timeout_s: float | None = None) -> None:
        """Wait until a request is answered in full, at most `timeout_s` seconds.

        Raises:
            CommError: A server refuses.
            PeerLostError: A server was lost with all copies of a shard.
            CommTimeout: No answer came.
        """
        self._customer.wait(timestamp, timeout_s)

    def is_done(self, timestamp: int) -> bool:
        """Return whether a request is answered in full, or has failed; does not block."""
        return self._customer.is_done(timestamp)

    @property
    def _customer(self) -> Customer:
        if self._own_customer is None:
            msg = f"only workers can pull and push table {self.name!r}: call serve() on servers"
            raise ConfigError(msg)
        return self._own_customer

    def _request(
        self,
        build: Build,
        on_answer: OnAnswer | None = None,
        *,
        parts: Iterable[int] | None = None,
        memory: Callable[[int], list[memoryview]] | None = None,
        priority: int = 0,
        is_write: bool = False,
    ) -> int:
        """Send a request to shards, all when None; the first waits for all nodes to join."""
        customer = self._customer
        postoffice = customer.postoffice
        postoffice.ensure_joined()

        def route(shard: int) -> str | None:
            assert postoffice.directory is not None, "a node has a directory once it has joined"
            return postoffice.directory.head_node(self._virtual[shard])

        request = PendingRequest(
            range(self.num_shards) if parts is None else parts,
            route,
            build,
            on_answer,
            memory=memory,
            priority=priority,
            is_write=is_write,
        )
        return customer.request(request)

    def _push(
        self,
        build: Callable[[tuple[int, ...]], tuple[Specs, Sequence[memoryview]]],
        priority: int,
        lr: float | None = None,
    ) -> int:
        """Push to all shards; begin the next clock once the request is made, unless that raises."""
        clock, key = self.clock, self.task

        def message(parts: tuple[int, ...]) -> tuple[Push, Sequence[memoryview]]:
            specs, buffers = build(parts)
            return Push(self.epoch, self.name, clock, parts, specs, key, lr), buffers

        timestamp = self._request(message, priority=priority, is_write=True)
        self.clock += 1
        if key is not None:
            self.task = key._replace(number=key.number + 1)
        return timestamp

    def _change(
        self,
        at_clock: int | None,
        *,
        consistency: Consistency | None = None,
        lr: float | None = None,
    ) -> int:
        clock = self.clock if at_clock is None else at_clock
        check_type("a clock must be a whole number", clock, int)
        check_type("a learning rate must be a number", 0.0 if lr is None else lr, (int, float))
        check_type("a consistency must be a ps.Consistency", consistency or BSP, Consistency)

        def build(parts: tuple[int, ...]) -> tuple[TableChange, Sequence[memoryview]]:
            return TableChange(self.epoch, self.name, parts, clock, consistency, lr), ()

        return self._request(build)
