"""The messages between workers, servers and scheduler; tensors are sent as separate buffers."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from braid.errors import ConfigError
from braid.ps.consistency import Consistency
from braid.ps.protocol.directory import Directory
from braid.ps.protocol.progress import ShardRecord
from braid.ps.protocol.shard_state import TaskKey
from braid.runtime.message import Schema
from braid.types import TensorSpec

__all__ = [
    "SCHEMA",
    "Accepted",
    "Answer",
    "Barrier",
    "Called",
    "Dealt",
    "Drain",
    "Elsewhere",
    "Explain",
    "Explained",
    "Failure",
    "Here",
    "Installed",
    "Leave",
    "Loads",
    "NextData",
    "NoMoreTasks",
    "NodeJoin",
    "PackedTask",
    "Pull",
    "Pulled",
    "Push",
    "RecordsConfirmed",
    "Released",
    "Repeat",
    "RequestRefused",
    "RunTasks",
    "ShardSnapshot",
    "StopAt",
    "TableChange",
    "TakesTasks",
    "TaskEnd",
    "TasksDone",
    "Update",
    "ValuesAnswer",
    "check_type",
]

Specs: TypeAlias = list[list[TensorSpec]]


def check_type(rule: str, value: object, kind: type | tuple[type, ...]) -> None:
    """Check the type of a program's value before it is sent, since a receiver could not decode it.

    Args:
        rule: Expected type in words, for the error.
        value: The value.
        kind: Expected type or types.

    Raises:
        ConfigError: The value has another type.
    """
    if not isinstance(value, kind):
        msg = f"{rule}, got {value!r}"
        raise ConfigError(msg)


class Push(msgspec.Struct, tag="push", frozen=True):
    """Gradients of a worker's clock for shards of a table; `key` identifies a task's push."""

    epoch: int
    table: str
    clock: int
    shards: tuple[int, ...]
    specs: Specs
    key: TaskKey | None = None
    lr: float | None = None


class Pull(msgspec.Struct, tag="pull", frozen=True):
    """A request for the values of shards before a clock, their whole state, or a number of each.

    Attributes:
        whole: Whether the whole state is requested.
        number: Number that is requested: the worker's next clock, or the oldest task.
    """

    epoch: int
    table: str
    clock: int
    shards: tuple[int, ...]
    specs: Specs
    whole: bool = False
    number: Literal["", "clock", "oldest task"] = ""


class TableChange(msgspec.Struct, tag="change", frozen=True):
    """A new consistency or learning rate of a table, from a clock on."""

    epoch: int
    table: str
    shards: tuple[int, ...]
    clock: int
    consistency: Consistency | None
    lr: float | None


class Answer(msgspec.Struct, frozen=True):
    """An answer to some parts of a request, such as shards."""

    parts: tuple[int, ...]


class Accepted(Answer, tag="accepted", frozen=True):
    """Pushes or changes of these shards will not be lost."""


class ValuesAnswer(Answer, frozen=True):
    """An answer with values, and the number of the message that it answers."""

    request: int


class Pulled(ValuesAnswer, tag="pulled", frozen=True):
    """Answer to a pull: the values of a server's shards.

    Attributes:
        specs: Specs of each shard's tensors; empty if numbers were requested.
        versions: Number of records applied to each shard, or the requested number.
        names: Names of each shard's tensors, if the whole state was requested.
    """

    specs: Specs
    versions: tuple[int, ...]
    names: list[list[str]] = []


class Elsewhere(Answer, tag="elsewhere", frozen=True):
    """The server is not the head of these shards in its current epoch."""

    epoch: int


class Repeat(Answer, tag="repeat", frozen=True):
    """The sender must build the request again and send it."""


class Explain(msgspec.Struct, tag="explain", frozen=True):
    """A request for the pending waits of a node."""


class Explained(Answer, tag="explained", frozen=True):
    """The pending waits of a node, one per line."""

    lines: list[str]


class RequestRefused(msgspec.Struct, tag="refused", frozen=True):
    """The receiver refuses an invalid request, and continues."""

    text: str


class Update(msgspec.Struct, tag="update", frozen=True):
    """A record for the next server of the chain, with the sum of its pushes."""

    epoch: int
    table: str
    shard: int
    record: ShardRecord
    specs: list[TensorSpec]


class RecordsConfirmed(msgspec.Struct, tag="confirmed", frozen=True):
    """The sender and all servers after it in the chain have the records up to `number`."""

    epoch: int
    table: str
    shard: int
    number: int


class ShardSnapshot(msgspec.Struct, tag="state", frozen=True):
    """The whole state of a shard, for a server that joins its chain."""

    since: int
    table: str
    shard: int
    number: int
    clocks: dict[int, int]
    completed: int
    num_dropped: int
    begins: list[int]
    values: list[Consistency]
    rates: dict[int, float]
    names: list[str]
    specs: list[TensorSpec]
    tasks: dict[int, int] = {}
    oldest_task: int = 0


class NodeJoin(msgspec.Struct, tag="join", frozen=True):
    """A node announces itself to the scheduler.

    Attributes:
        address: Address at which other nodes can reach it; empty for workers.
        start: First clock of a worker.
        tables: Form of each table; on servers also a checksum of its first values.
        epoch: Epoch of the node's directory; -1 if it has none. A worker that was a member may
            have been removed since.
    """

    address: str
    start: int = 0
    tables: dict[str, tuple[str, int]] = {}
    epoch: int = -1


class Here(msgspec.Struct, tag="here", frozen=True):
    """The scheduler's directory."""

    directory: Directory


class Called(msgspec.Struct, tag="called", frozen=True):
    """The receiver, a spare, must replace this lost worker."""

    worker: int


class StopAt(msgspec.Struct, tag="stop-at", frozen=True):
    """Workers stop before this clock: sent by a worker, and forwarded by the scheduler."""

    clock: int


class Leave(msgspec.Struct, tag="leave", frozen=True):
    """The sender leaves the run; `reason` is the error that ends it, empty for none."""

    reason: str = ""


class Drain(msgspec.Struct, tag="drain", frozen=True):
    """A server wants to leave: its shards must move to other servers."""


class Installed(msgspec.Struct, tag="installed", frozen=True):
    """A server that joins a chain has received the whole state of a virtual shard."""

    shard: int
    server: int
    since: int


class Barrier(msgspec.Struct, tag="barrier", frozen=True):
    """A node waits at a barrier.

    Attributes:
        name: Name of the barrier.
        members: Nodes to wait for.
        step: Training step of the barrier, which each member enters once; -1 without a step.
    """

    name: str
    members: tuple[str, ...]
    step: int = -1


class Loads(msgspec.Struct, tag="loads", frozen=True):
    """Number of requests for each virtual shard of a server since its last report."""

    counts: list[int]


class Released(Answer, tag="released", frozen=True):
    """All members have entered the barrier, or a draining server may leave."""


class NextData(msgspec.Struct, tag="next-data", frozen=True):
    """A worker reports finished shards of samples, and requests the next one."""

    name: str
    num_shards: int
    finished: tuple[int, ...]


class Dealt(Answer, tag="dealt", frozen=True):
    """A shard of samples; -1 when all are finished."""

    shard: int


class Failure(msgspec.Struct, tag="failure", frozen=True):
    """The run has failed; with `is_removed`, it continues without the receiver."""

    text: str
    is_removed: bool = False


class PackedTask(msgspec.Struct, frozen=True, array_like=True):
    """A task for a worker, as packed values, with the number of its buffers."""

    number: int
    packed: bytes
    num_buffers: int


class RunTasks(msgspec.Struct, tag="run-tasks", frozen=True):
    """Tasks for a worker, in the order to run them; tasks before `oldest` are finished."""

    tasks: tuple[PackedTask, ...]
    oldest: int


class TaskEnd(msgspec.Struct, frozen=True, array_like=True):
    """The end of a task that a worker has run, with its result or error.

    Attributes:
        number: Number of the task.
        packed: Its packed result, or its error.
        num_buffers: Number of buffers of the result.
        duration_s: Seconds that it took.
        num_pushes: Number of steps that it has pushed.
        failed: Whether it raised an error.
    """

    number: int
    packed: bytes
    num_buffers: int
    duration_s: float
    num_pushes: int
    failed: bool = False


class TasksDone(msgspec.Struct, tag="tasks-done", frozen=True):
    """The results of a worker's finished tasks, in order."""

    ends: tuple[TaskEnd, ...]


class TakesTasks(msgspec.Struct, tag="takes-tasks", frozen=True):
    """A worker is idle and ready for tasks."""


class NoMoreTasks(msgspec.Struct, tag="no-more-tasks", frozen=True):
    """There are no more tasks: workers leave."""


SCHEMA = Schema(
    *(Push, Pull, TableChange, Accepted, Pulled, Elsewhere, RequestRefused, Explain, Explained),
    *(Update, RecordsConfirmed, ShardSnapshot),
    *(RunTasks, TasksDone, TakesTasks, NoMoreTasks),
    *(
        NodeJoin,
        Called,
        Here,
        Leave,
        Drain,
        Installed,
        Barrier,
        Loads,
        Released,
        StopAt,
        NextData,
        Dealt,
        Failure,
    ),
)
