"""Closures at a worker: functions that the coordinator sends by name, with arguments.

    coordinator ── RunTask(number, packed function and arguments) ──> worker
                <── TaskDone(number, packed result or error) ───────

A worker runs one closure after the other, in its main thread. Before each one it pulls the
variables; pushes of the closure carry its number, so that servers add those of a closure that runs
again elsewhere once. The result is sent when all pushes have been accepted: a closure whose result
has arrived is in the variables.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from braid.errors import ConfigError
from braid.ps.messages import NoMoreTasks, RunTask, TakesTasks, TaskDone
from braid.ps.protocol.directory import SCHEDULER
from braid.ps.protocol.shard_state import TaskKey
from braid.rpc.codec import Codec, tensors_of
from braid.rpc.messages import Body
from braid.rpc.names import Names, register
from braid.rpc.outcomes import described, error_like
from braid.runtime.message import Delivery

if TYPE_CHECKING:
    from braid.strategies.parameter_server.strategy import ParameterServerStrategy

__all__ = [
    "VARIABLES",
    "ClosureCodec",
    "ClosureMode",
    "WorkerResource",
    "map_tree",
    "serve_closures",
]


ClosureMode = Literal["closure", "resource", "question"]
VARIABLES = 0  # number of the resource that each worker has from the beginning


@register
@dataclass(frozen=True)
class WorkerResource:
    """Stands for a worker's own object in the arguments of a closure.

    Attributes:
        number: Number of the closure that made it in that worker.
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
            advice="pass plain data, tensors or dataclasses, or let each worker make it with "
            "create_per_worker_resource",
        )

    def pack(self, value: Any, where: str) -> tuple[bytes, list[memoryview]]:
        """Return a value as bytes and buffers.

        Raises:
            ConfigError: A part of it cannot travel; `where` says what it is.
        """
        body, buffers = self._codec.pack(value, 0, where).as_body()
        return msgspec.msgpack.encode(body), buffers

    def unpack(self, packed: bytes, buffers: Sequence[memoryview], sender: str) -> Any:
        """Return the value that was packed."""
        body = msgspec.msgpack.decode(packed, type=Body)
        return self._codec.unpack(body.packed, tensors_of(body, buffers), sender)

    def pack_error(self, node: str, error: BaseException) -> bytes:
        """Return an error as bytes: the name of its type, and its text with the traceback."""
        _, text = described(node, error)
        return msgspec.msgpack.encode((self._names.exception_name(error), text))

    def unpack_error(self, packed: bytes) -> BaseException:
        """Return the error that was packed."""
        name, text = msgspec.msgpack.decode(packed, type=tuple[str, str])
        return error_like(self._names.exception_of(name) or RuntimeError, text)


def map_tree(value: Any, change: Any) -> Any:
    """Return tuples, lists and dicts with each other value in them changed by a function."""
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
        self._tasks: deque[Delivery] = deque()
        self._is_over = self._was_busy = False  # whether the next closure waited already
        node.postoffice.register(
            {RunTask: self._tasks.append, NoMoreTasks: self._end}, on_linked=self._linked
        )

    def serve(self) -> None:
        """Run closures until the coordinator ends the run."""
        office = self._node.postoffice
        office.ensure_joined()
        self._variables.resume()
        office.send(SCHEDULER, TakesTasks())
        while True:
            office.wait_until(
                lambda: self._tasks or self._is_over or bool(office.failure), math.inf
            )
            if self._is_over:
                self._node.abort()  # in order, as far as others know
                return
            office.raise_failure()
            self._run(self._tasks.popleft())

    def _run(self, delivery: Delivery) -> None:
        task = delivery.message
        assert isinstance(task, RunTask), "this queue is for closures"
        office, steps = self._node.postoffice, self._variables.num_steps
        try:
            function, args, kwargs, mode = self._codec.unpack(
                task.packed, delivery.buffers, SCHEDULER
            )
            args, kwargs = map_tree([args, kwargs], self._resource_of)
            if mode == "closure":
                with self._variables.task(TaskKey(task.number, 0, task.oldest)):
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
            answer = TaskDone(task.number, packed, self._variables.num_steps - steps)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as exc:  # noqa: BLE001 - whatever it is, the coordinator must learn it
            if self._is_over:
                return
            office.raise_failure()  # the run has failed: nobody waits for an answer
            error = self._codec.pack_error(self._node.name, exc)
            steps = self._variables.num_steps - steps
            answer, buffers = TaskDone(task.number, error, steps, failed=True), []
        with office.lock:
            office.send(SCHEDULER, answer, buffers)
            self._was_busy = bool(self._tasks)

    def _resource_of(self, value: Any) -> Any:
        if not isinstance(value, WorkerResource):
            return value
        if value.number not in self._resources:
            msg = (
                f"{self._node.name} lacks a data set or resource of this closure: the function "
                "that makes it has failed there"
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
            self._tasks.clear()
            self._node.postoffice.send(SCHEDULER, TakesTasks())


def serve_closures(strategy: ParameterServerStrategy) -> None:
    """Run closures in a worker until the run is over.

    Raises:
        PeerLostError: The run cannot go on.
    """
    _ClosureWorker(strategy).serve()
