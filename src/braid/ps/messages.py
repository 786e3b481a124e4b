"""The messages between workers, servers and scheduler; tensors are sent as separate buffers."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from braid.errors import ConfigError
from braid.ps.consistency import Consistency
from braid.ps.protocol.directory import Directory
from braid.ps.protocol.progress import ShardProgress, ShardRecord
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
    """A worker sends a server gradients for shards of a table at the worker's clock (its step).

    Attributes:
        epoch: Number of the worker's directory, a table of the servers of each shard.
        table: Name of the table.
        clock: Clock of the worker to which the gradients belong.
        shards: Numbers of the shards.
        specs: Shapes and dtypes of each shard's tensors, which are sent as buffers.
        key: Identity of the push if it belongs to a task that another worker may repeat.
        lr: Learning rate of the step; the table's rate when None.
    """

    epoch: int
    table: str
    clock: int
    shards: tuple[int, ...]
    specs: Specs
    key: TaskKey | None = None
    lr: float | None = None


class Pull(msgspec.Struct, tag="pull", frozen=True):
    """A worker asks a server for the values of shards of a table, or their states or numbers.

    Attributes:
        epoch: Number of the worker's directory, a table of the servers of each shard.
        table: Name of the table.
        clock: Clock of the worker; the values include the pushes that its consistency requires.
        shards: Numbers of the shards.
        specs: Shapes and dtypes of each shard's query, such as ids of rows, sent as buffers.
        whole: Whether the whole state is requested, with the state of the optimizer.
        number: Number that is requested instead of values: the worker's next clock, or the oldest
            task that may be unfinished.
    """

    epoch: int
    table: str
    clock: int
    shards: tuple[int, ...]
    specs: Specs
    whole: bool = False
    number: Literal["", "clock", "oldest task"] = ""


class TableChange(msgspec.Struct, tag="change", frozen=True):
    """A worker asks a server for a new consistency or learning rate of a table.

    Attributes:
        epoch: Number of the worker's directory, a table of the servers of each shard.
        table: Name of the table.
        shards: Shards on that server.
        clock: First clock of the new setting.
        consistency: New consistency; unchanged when None.
        lr: New learning rate; unchanged when None.
    """

    epoch: int
    table: str
    shards: tuple[int, ...]
    clock: int
    consistency: Consistency | None
    lr: float | None


class Answer(msgspec.Struct, frozen=True):
    """Base class of answers to some parts of a request, such as the shards of one server."""

    parts: tuple[int, ...]


class Accepted(Answer, tag="accepted", frozen=True):
    """Answer of a server: the pushes to these shards, or changes of them, will not be lost."""


class ValuesAnswer(Answer, frozen=True):
    """Base class of answers with values; `request` is the number of the answered message."""

    request: int


class Pulled(ValuesAnswer, tag="pulled", frozen=True):
    """A server's answer to a `Pull`: the values of its shards.

    Attributes:
        specs: Specs of each shard's tensors; empty if numbers were requested.
        versions: Number of changes applied to each shard, or the requested number.
        names: Names of each shard's tensors, if the whole state was requested.
    """

    specs: Specs
    versions: tuple[int, ...]
    names: list[list[str]] = []


class Elsewhere(Answer, tag="elsewhere", frozen=True):
    """A server answers that it is not the head (the deciding server) of these shards in `epoch`."""

    epoch: int


class Repeat(Answer, tag="repeat", frozen=True):
    """Answer to a request: its sender must build the message for these parts again and send it."""


class Explain(msgspec.Struct, tag="explain", frozen=True):
    """A node that has timed out asks another node for that node's pending waits."""


class Explained(Answer, tag="explained", frozen=True):
    """Answer to `Explain`: the pending waits of the answering node, one per line."""

    lines: list[str]


class RequestRefused(msgspec.Struct, tag="refused", frozen=True):
    """Answer to an invalid request: the error for its sender; the answering node continues."""

    text: str


class Update(msgspec.Struct, tag="update", frozen=True):
    """A server sends a change of a shard, with the sum of its pushes, to the next copy's server."""

    epoch: int
    table: str
    shard: int
    record: ShardRecord
    specs: list[TensorSpec]


class RecordsConfirmed(msgspec.Struct, tag="confirmed", frozen=True):
    """A server reports to the server with the previous copy of a shard that changes are stored.

    The sender and all servers with later copies have the changes up to `number`.
    """

    epoch: int
    table: str
    shard: int
    number: int


class ShardSnapshot(msgspec.Struct, tag="state", frozen=True):
    """A server sends the whole state of a shard to a server that will have the next copy."""

    since: int
    table: str
    shard: int
    progress: ShardProgress
    names: list[str]
    specs: list[TensorSpec]


class NodeJoin(msgspec.Struct, tag="join", frozen=True):
    """A node announces itself to the scheduler, which answers with `Here`.

    Attributes:
        address: Address at which other nodes can reach it; empty for workers.
        start: First clock (number of a step) of a worker.
        tables: Form of each table; on servers also a checksum of its first values.
        epoch: Epoch of the node's list of members; -1 if it has none. A worker with a list may
            have been removed from the members since.
    """

    address: str
    start: int = 0
    tables: dict[str, tuple[str, int]] = {}
    epoch: int = -1


class Here(msgspec.Struct, tag="here", frozen=True):
    """The scheduler sends a node its directory: all nodes, and the servers of each shard."""

    directory: Directory


class Called(msgspec.Struct, tag="called", frozen=True):
    """The scheduler orders a spare process to replace a lost worker."""

    worker: int


class StopAt(msgspec.Struct, tag="stop-at", frozen=True):
    """A worker asks the scheduler to stop all workers before `clock`; the scheduler forwards it."""

    clock: int


class Leave(msgspec.Struct, tag="leave", frozen=True):
    """A node leaves the run, and reports this to the scheduler; `reason` is its error, or empty."""

    reason: str = ""


class Drain(msgspec.Struct, tag="drain", frozen=True):
    """A server asks the scheduler to move its shards to other servers, so that it can leave."""


class Installed(msgspec.Struct, tag="installed", frozen=True):
    """A server reports to the scheduler that it has a shard's state, and so a valid copy.

    Attributes:
        shard: Number of the virtual shard, which stands for shards with the same servers.
        server: Number of the server that joins.
        since: Number of the directory in which the server was added.
    """

    shard: int
    server: int
    since: int


class Barrier(msgspec.Struct, tag="barrier", frozen=True):
    """A node reports to the scheduler that it waits at a barrier.

    Attributes:
        name: Name of the barrier.
        members: Nodes to wait for.
        step: Training step of the barrier, which each member enters once; -1 without a step.
    """

    name: str
    members: tuple[str, ...]
    step: int = -1


class Loads(msgspec.Struct, tag="loads", frozen=True):
    """A server reports to the scheduler how many requests each of its shards had recently."""

    counts: list[int]


class Released(Answer, tag="released", frozen=True):
    """The scheduler answers that all members entered a barrier, or that a server may leave."""


class NextData(msgspec.Struct, tag="next-data", frozen=True):
    """A worker reports finished shards of samples to the scheduler, and requests the next one."""

    name: str
    num_shards: int
    finished: tuple[int, ...]


class Dealt(Answer, tag="dealt", frozen=True):
    """The scheduler's answer to `NextData`: a shard of samples; -1 when all are finished."""

    shard: int


class Failure(msgspec.Struct, tag="failure", frozen=True):
    """The scheduler reports that the run failed, or (`is_removed`) that it removed a process.

    `life` is the incarnation of that process: a later process of its node ignores the message.
    """

    text: str
    is_removed: bool = False
    life: int = 0


class PackedTask(msgspec.Struct, frozen=True, array_like=True):
    """A task for a worker, as packed values.

    Attributes:
        number: Number of the task.
        packed: Function and arguments of the task, as bytes.
        num_buffers: Number of buffers of the message that belong to the task.
    """

    number: int
    packed: bytes
    num_buffers: int


class RunTasks(msgspec.Struct, tag="run-tasks", frozen=True):
    """The coordinator sends a worker tasks, in the order to run them.

    Tasks with numbers before `oldest` are finished.
    """

    tasks: tuple[PackedTask, ...]
    oldest: int


class TaskEnd(msgspec.Struct, frozen=True, array_like=True):
    """The end of a task that a worker has run, with its result or error.

    Attributes:
        number: Number of the task.
        packed: Packed result of the task, or its error.
        num_buffers: Number of buffers of the result.
        duration_s: Seconds that the task took.
        num_pushes: Number of steps that the task has pushed.
        failed: Whether the task raised an error.
    """

    number: int
    packed: bytes
    num_buffers: int
    duration_s: float
    num_pushes: int
    failed: bool = False


class TasksDone(msgspec.Struct, tag="tasks-done", frozen=True):
    """A worker sends the coordinator the results of finished tasks, in the order of the tasks."""

    ends: tuple[TaskEnd, ...]


class TakesTasks(msgspec.Struct, tag="takes-tasks", frozen=True):
    """A worker reports to the coordinator that it is idle and ready for tasks."""


class NoMoreTasks(msgspec.Struct, tag="no-more-tasks", frozen=True):
    """The coordinator has no more tasks, so the worker that receives this leaves the run."""


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
