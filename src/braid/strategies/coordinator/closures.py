"""Closures at a worker: functions that the coordinator sends by name, with arguments.

    coordinator ── RunTasks(number, packed function and arguments; ...) ──> worker
                <── TasksDone(number, packed result or error; ...) ───────

A worker runs its closures in sequence, in its main thread. It pulls the variables before each one.
Each push contains the number of its closure, so servers add the pushes of a closure only once, even
if another worker runs it again. The result is sent when the servers have accepted all pushes: once
a closure's result arrives, its updates are in the variables.

A message costs more than a short closure. So while further closures wait at a worker, it collects
results, and sends 8 in one message. A second thread sends a result that has waited for 5 ms, since
the closure that runs meanwhile may take long.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import msgspec

from braid.errors import ConfigError
from braid.ps.messages import NoMoreTasks, PackedTask, RunTasks, TakesTasks, TaskEnd, TasksDone
from braid.ps.protocol.directory import SCHEDULER
from braid.ps.protocol.shard_state import TaskKey
from braid.rpc.bodies import tensors_of
from braid.rpc.codec import Codec
from braid.rpc.messages import Body
from braid.rpc.names import Names, register
from braid.rpc.outcomes import described, error_like
from braid.runtime.message import Delivery

if TYPE_CHECKING:
    from braid.strategies.parameter_server.strategy import ParameterServerStrategy

__all__ = [
    "MAX_BATCH",
    "VARIABLES",
    "ClosureCodec",
    "ClosureMode",
    "TaskBatch",
    "WorkerResource",
    "buffers_of",
    "map_tree",
    "serve_closures",
]


ClosureMode = Literal["closure", "resource", "question"]
AnyTask = TypeVar("AnyTask", PackedTask, TaskEnd)
VARIABLES = 0  # number of the resource that each worker has from the beginning
MAX_BATCH = 8  # tasks in one message: 16 are hardly quicker, and delay the results
MAX_BATCH_BYTES = 64 << 10  # more bytes cost more than their message
LATE_S = 0.005  # longest wait of a result for others


@register
@dataclass(frozen=True)
class WorkerResource:
    """Placeholder in a closure's arguments; the worker replaces it by an object that it keeps.

    Attributes:
        number: Number of the closure that made the object in each worker.
    """

    number: int


class ClosureCodec:
    """Packs functions, arguments and results as remote calls do, without remote references."""

    def __init__(self) -> None:
        self._names = Names()
        self._codec = Codec(
            self._names,
            share=lambda value, receiver: None,  # noqa: ARG005 - nothing is a reference
            unshare=lambda shared: None,  # noqa: ARG005
            receive=lambda shared, sender, will_answer: None,  # noqa: ARG005
            device_for=lambda device, receiver: "",  # noqa: ARG005 - tensors arrive on the CPU
            advice="pass plain data, tensors, numpy arrays, layers of torch.nn or dataclasses, or "
            "let each worker make the value with create_per_worker_resource",
        )

    def pack(self, value: Any, where: str) -> tuple[bytes, list[memoryview]]:
        """Return a value as bytes and buffers.

        Raises:
            ConfigError: A part of the value cannot be sent; the message begins with `where`.
        """
        body, buffers = self._codec.pack(value, 0, where).as_body()
        return msgspec.msgpack.encode(body), buffers

    def unpack(self, packed: bytes, buffers: Sequence[memoryview], sender: str) -> Any:
        """Return the value that `pack` converted to bytes and buffers."""
        body = msgspec.msgpack.decode(packed, type=Body)
        return self._codec.unpack(body.packed, tensors_of(body, buffers), sender)

    def pack_error(self, node: str, error: BaseException) -> bytes:
        """Return an error as bytes: the name of its type, and its text with the traceback."""
        _, text = described(node, error)
        return msgspec.msgpack.encode((self._names.exception_name(error), text))

    def unpack_error(self, packed: bytes) -> BaseException:
        """Return the error that `pack_error` converted to bytes."""
        name, text = msgspec.msgpack.decode(packed, type=tuple[str, str])
        return error_like(self._names.exception_of(name) or RuntimeError, text)


class TaskBatch(Generic[AnyTask]):
    """Tasks, or results of tasks, that are collected for one message.

    Attributes:
        tasks: The tasks, in the order in which they were added.
        buffers: Buffers of all tasks.
    """

    def __init__(self) -> None:
        self.tasks: list[AnyTask] = []
        self.buffers: list[bytes | memoryview] = []
        self._nbytes = 0

    def add(self, task: AnyTask, buffers: Sequence[bytes | memoryview]) -> None:
        """Add a task and its buffers."""
        self.tasks.append(task)
        self.buffers += buffers
        self._nbytes += len(task.packed) + sum(map(len, buffers))

    def copy_buffers(self) -> None:
        """Copy buffers that are views of memory, since it may change before the message is sent."""
        self.buffers = [bytes(buffer) for buffer in self.buffers]

    @property
    def is_full(self) -> bool:
        """Whether the message is large enough to be sent."""
        return len(self.tasks) >= MAX_BATCH or self._nbytes >= MAX_BATCH_BYTES


def buffers_of(
    tasks: Sequence[AnyTask], buffers: Sequence[memoryview]
) -> Iterator[tuple[AnyTask, list[memoryview]]]:
    """Yield each task of a message with its buffers."""
    rest = iter(buffers)
    for task in tasks:
        yield task, list(islice(rest, task.num_buffers))


def map_tree(value: Any, change: Any) -> Any:
    """Return a copy of nested tuples, lists and dicts with `change` applied to every leaf."""
    if type(value) in (tuple, list):
        return type(value)(map_tree(part, change) for part in value)
    if type(value) is dict:
        return {key: map_tree(part, change) for key, part in value.items()}
    return change(value)


class _ClosureWorker:
    """Runs the closures that the coordinator sends to this worker."""

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        node, variables = strategy.node, strategy.variables
        self._strategy, self._node, self._variables = strategy, node, variables
        self._codec = ClosureCodec()
        self._resources: dict[int, Any] = {VARIABLES: variables}
        self._tasks: deque[tuple[PackedTask, int, list[memoryview]]] = deque()
        self._ends: TaskBatch[TaskEnd] = TaskBatch()
        self._has_ends = threading.Event()
        self._is_over = self._was_busy = False  # whether the next closure waited already
        node.postoffice.register(
            {RunTasks: self._take, NoMoreTasks: self._end}, on_linked=self._linked
        )

    def serve(self) -> None:
        """Run closures until the coordinator ends the run."""
        office = self._node.postoffice
        office.ensure_joined()
        self._variables.resume()
        office.send(SCHEDULER, TakesTasks())
        with self._late_ends_sent():
            while True:
                office.wait_until(
                    lambda: self._tasks or self._is_over or bool(office.failure), math.inf
                )
                if self._is_over:
                    break
                office.raise_failure()
                self._run(*self._tasks.popleft())
        self._node.abort()  # in order, as far as others know

    def _take(self, delivery: Delivery) -> None:
        message = delivery.message
        assert isinstance(message, RunTasks), "this handler is for closures"
        for task, buffers in buffers_of(message.tasks, delivery.buffers):
            self._tasks.append((task, message.oldest, buffers))

    def _run(self, task: PackedTask, oldest: int, received: Sequence[memoryview]) -> None:
        office, steps = self._node.postoffice, self._variables.num_steps
        begin_s, buffers, failed = time.perf_counter(), list[memoryview](), False
        try:
            function, args, kwargs, mode = self._codec.unpack(task.packed, received, SCHEDULER)
            args, kwargs = map_tree([args, kwargs], self._resource_of)
            if mode == "closure":
                with self._variables.task(TaskKey(task.number, 0, oldest)):
                    if not (self._variables.is_fresh and self._was_busy):
                        self._variables.pull()
                    result = self._strategy.run(function, tuple(args), kwargs)
            else:
                result = function(*args, **kwargs)
            if mode == "resource":
                self._resources[task.number], result = result, None
            packed, buffers = self._codec.pack(
                result, f"the result of {getattr(function, '__qualname__', function)}"
            )
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as exc:  # noqa: BLE001 - whatever it is, the coordinator must learn it
            if self._is_over:
                return
            office.raise_failure()  # the run has failed: the coordinator does not wait for a result
            packed, failed = self._codec.pack_error(self._node.name, exc), True
        steps, duration_s = self._variables.num_steps - steps, time.perf_counter() - begin_s
        end = TaskEnd(task.number, packed, len(buffers), duration_s, steps, failed)
        with office.lock:
            self._ends.add(end, buffers)
            self._was_busy = bool(self._tasks)
            if failed or not self._tasks or self._ends.is_full:
                self._send_ends()
            else:
                self._ends.copy_buffers()
                self._has_ends.set()

    def _send_ends(self) -> None:
        """Send the results that are here; with the office's lock."""
        if self._ends.tasks:
            message, buffers = TasksDone(tuple(self._ends.tasks)), self._ends.buffers
            self._ends = TaskBatch()
            self._node.postoffice.send(SCHEDULER, message, buffers)

    @contextmanager
    def _late_ends_sent(self) -> Iterator[None]:
        """Send results that wait for long, in a thread while the block runs."""
        ended = threading.Event()

        def send() -> None:
            while self._has_ends.wait() and not ended.is_set():
                self._has_ends.clear()
                ended.wait(LATE_S)
                with self._node.postoffice.lock:
                    self._send_ends()

        thread = threading.Thread(target=send, name=f"braid-closures-{self._node.number}")
        thread.start()
        try:
            yield
        finally:
            ended.set()
            self._has_ends.set()
            thread.join()

    def _resource_of(self, value: Any) -> Any:
        if not isinstance(value, WorkerResource):
            return value
        if value.number not in self._resources:
            msg = (
                f"{self._node.name} lacks a data set or resource of this closure, because the "
                "function that makes it failed there: see the log of that worker"
            )
            raise ConfigError(msg)
        return self._resources[value.number]

    def _end(self, delivery: Delivery) -> None:
        """Leave; a closure that still waits for others' updates ends."""
        del delivery
        self._is_over, office = True, self._node.postoffice
        office.failure = office.failure or "the coordinator has ended the run"

    def _linked(self, node: str) -> None:
        """Offer itself again to a coordinator that believed this worker lost, or was restarted."""
        if node == SCHEDULER:
            self._send_ends()
            self._tasks.clear()
            self._node.postoffice.send(SCHEDULER, TakesTasks())


def serve_closures(strategy: ParameterServerStrategy) -> None:
    """Run closures in a worker until the run is over.

    Raises:
        PeerLostError: The run cannot go on.
    """
    _ClosureWorker(strategy).serve()
