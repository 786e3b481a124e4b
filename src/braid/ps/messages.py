"""The messages between workers, servers and scheduler; tensors travel as buffers beside them."""

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
    """Check a value of the program that travels: a receiver cannot answer what it cannot read.

    Raises:
        ConfigError: It is of another type than the rule says.
    """
    if not isinstance(value, kind):
        msg = f"{rule}, got {value!r}"
        raise ConfigError(msg)


class Push(msgspec.Struct, tag="push", frozen=True):
    """Gradients of a worker's clock, for shards of a table; of a task's push, if it has a key."""

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
        whole: Whether it asks for the whole state.
        number: Number that it asks for: the worker's next clock, or the oldest task.
    """

    epoch: int
    table: str
    clock: int
    shards: tuple[int, ...]
    specs: Specs
    whole: bool = False
    number: Literal["", "clock", "oldest task"] = ""


class TableChange(msgspec.Struct, tag="change", frozen=True):
    """Another consistency or learning rate from a clock on."""

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
    """An answer with values, which names the message that it answers."""

    request: int


class Pulled(ValuesAnswer, tag="pulled", frozen=True):
    """Values of these shards, each after as many records as `versions` says.

    Of a whole state, `names` has the names. If it was asked for numbers, `versions` has them, and
    there are no values.
    """

    specs: Specs
    versions: tuple[int, ...]
    names: list[list[str]] = []


class Elsewhere(Answer, tag="elsewhere", frozen=True):
    """The server is not the head of these shards in its epoch."""

    epoch: int


class Repeat(Answer, tag="repeat", frozen=True):
    """The request must be sent once more, as the sender then builds it."""


class Explain(msgspec.Struct, tag="explain", frozen=True):
    """A question to a node: who waits for whom there?"""


class Explained(Answer, tag="explained", frozen=True):
    """Each line says who waits for whom."""

    lines: list[str]


class RequestRefused(msgspec.Struct, tag="refused", frozen=True):
    """A request that makes no sense to the server, which lives on."""

    text: str


class Update(msgspec.Struct, tag="update", frozen=True):
    """A record for the successor, with the sum of its pushes."""

    epoch: int
    table: str
    shard: int
    record: ShardRecord
    specs: list[TensorSpec]


class RecordsConfirmed(msgspec.Struct, tag="confirmed", frozen=True):
    """All servers from this one on have the records up to `number`."""

    epoch: int
    table: str
    shard: int
    number: int


class ShardSnapshot(msgspec.Struct, tag="state", frozen=True):
    """The whole state of a shard for a successor that joins."""

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
    """A node is here; the address at which others can call it, and a worker's first clock.

    A worker that was a member already sends the epoch of its directory: it may have been removed
    since. Of each table `tables` has the form, and on servers a checksum of the first values.
    """

    address: str
    start: int = 0
    tables: dict[str, tuple[str, int]] = {}
    epoch: int = -1


class Here(msgspec.Struct, tag="here", frozen=True):
    """The directory of an epoch."""

    directory: Directory


class Called(msgspec.Struct, tag="called", frozen=True):
    """A spare takes the place of this worker, which was lost."""

    worker: int


class StopAt(msgspec.Struct, tag="stop-at", frozen=True):
    """Workers stop before this clock; one asks for it, the scheduler passes it on."""

    clock: int


class Leave(msgspec.Struct, tag="leave", frozen=True):
    """A worker is done; or this node ends because of an error, which is the reason."""

    reason: str = ""


class Drain(msgspec.Struct, tag="drain", frozen=True):
    """A server wants to leave: its shards must go to others."""


class Installed(msgspec.Struct, tag="installed", frozen=True):
    """A server that joins a chain has the state of a virtual shard."""

    shard: int
    server: int
    since: int


class Barrier(msgspec.Struct, tag="barrier", frozen=True):
    """A node waits until all of these have come.

    Attributes:
        name: Name of the barrier.
        members: Nodes to wait for.
        step: Step of the training at which each member comes once; -1 for a barrier of no step.
    """

    name: str
    members: tuple[str, ...]
    step: int = -1


class Loads(msgspec.Struct, tag="loads", frozen=True):
    """Requests that a server has had for each virtual shard, since it said so last."""

    counts: list[int]


class Released(Answer, tag="released", frozen=True):
    """All have come, or the node may go."""


class NextData(msgspec.Struct, tag="next-data", frozen=True):
    """A worker has finished some shards of samples, and asks for the next one."""

    name: str
    num_shards: int
    done: tuple[int, ...]


class Dealt(Answer, tag="dealt", frozen=True):
    """A shard of samples; -1 when all are finished."""

    shard: int


class Failure(msgspec.Struct, tag="failure", frozen=True):
    """The run cannot go on; or it goes on without the receiver, which was removed."""

    text: str
    is_removed: bool = False


class PackedTask(msgspec.Struct, frozen=True, array_like=True):
    """A task for a worker, as packed values, with the number of its buffers."""

    number: int
    packed: bytes
    num_buffers: int


class RunTasks(msgspec.Struct, tag="run-tasks", frozen=True):
    """Tasks for a worker, first things first; tasks before `oldest` are over."""

    tasks: tuple[PackedTask, ...]
    oldest: int


class TaskEnd(msgspec.Struct, frozen=True, array_like=True):
    """The end of a task.

    Attributes:
        number: Number of the task.
        packed: Its packed result, or its error.
        num_buffers: Number of buffers of the result.
        duration_s: Seconds that it took.
        num_pushes: Number of steps that it has pushed.
        failed: Whether it has raised.
    """

    number: int
    packed: bytes
    num_buffers: int
    duration_s: float
    num_pushes: int
    failed: bool = False


class TasksDone(msgspec.Struct, tag="tasks-done", frozen=True):
    """The ends of a worker's tasks, in order."""

    ends: tuple[TaskEnd, ...]


class TakesTasks(msgspec.Struct, tag="takes-tasks", frozen=True):
    """A worker is idle, and takes tasks."""


class NoMoreTasks(msgspec.Struct, tag="no-more-tasks", frozen=True):
    """The run is over: workers leave."""


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
