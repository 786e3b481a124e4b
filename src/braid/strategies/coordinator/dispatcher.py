"""Dispatcher: sends closures to workers as the queue decides, and receives their ends.

The queue decides with numbers and names of workers. The dispatcher has the packed closure for each
number, and collects short closures for one worker in one message. The office's lock is held in all
methods.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from braid.ps.messages import PackedTask, RunTasks, TaskEnd, TasksDone
from braid.ps.postoffice import Postoffice
from braid.runtime.message import Delivery
from braid.strategies.coordinator.closures import MAX_BATCH, ClosureCodec, TaskBatch, buffers_of
from braid.strategies.coordinator.queue_state import (
    Assign,
    ClosureQueue,
    EndClosure,
    QueueInstruction,
)
from braid.strategies.coordinator.remote_value import (
    ClosureCancelledError,
    PackedResult,
    RemoteValue,
)

__all__ = ["Closure", "Dispatcher"]

MAX_WAITING = 256
AHEAD_S = 0.032  # closures of this time in total are sent ahead, behind the one that runs
MAX_AHEAD = 4 * MAX_BATCH


class Closure(NamedTuple):
    """A closure that is not over, packed.

    Attributes:
        packed: Function, arguments, and whether the worker keeps the result.
        buffers: Memory of its tensors.
        value: Place of its result.
    """

    packed: bytes
    buffers: list[bytes]
    value: RemoteValue


class Dispatcher:
    """Sends closures to workers and ends their `RemoteValue`s.

    Args:
        office: Post office of this process.
        codec: Codec that unpacks the errors of closures.
        in_turns: Workers that must run the same number of closures; see `ClosureQueue`.

    Attributes:
        queue: State of the closures.
        next_number: Number of the next closure of the program.
    """

    def __init__(self, office: Postoffice, codec: ClosureCodec, in_turns: Sequence[str]) -> None:
        self._office = office
        self._codec = codec
        self._is_synchronous = bool(in_turns)
        self.queue = ClosureQueue(MAX_WAITING, in_turns)
        self.next_number = 0
        self._next_negative = -time.time_ns()  # no earlier coordinator has used these numbers
        self._closures: dict[int, Closure] = {}
        self._errors: dict[int, BaseException] = {}
        self._mean_s = AHEAD_S  # of a closure in its worker
        self._batches: dict[str, TaskBatch[PackedTask]] = {}  # by worker

    def schedule(self, closure: Closure) -> None:
        """Add a closure of the program, for any worker."""
        number, self.next_number = self.next_number, self.next_number + 1
        self._closures[number] = closure
        self._act(self.queue.schedule(number))

    def ask(self, closure: Closure) -> None:
        """Add a closure of the coordinator itself, which runs first."""
        self._act(self.queue.ask(self._add(closure)))

    def add_resource(self, closure: Closure) -> int:
        """Add a closure that every worker process runs once; return its number."""
        number = self._add(closure)
        self._act(self.queue.add_resource(number))
        return number

    def _add(self, closure: Closure) -> int:
        number, self._next_negative = self._next_negative, self._next_negative - 1
        self._closures[number] = closure
        return number

    def ready(self, delivery: Delivery) -> None:
        """Handle `TakesTasks`: a worker's new process takes closures."""
        self._batches.pop(delivery.sender, None)
        self._act(self.queue.ready(delivery.sender))

    def lost(self, worker: str) -> None:
        """Send the closures of a lost worker to other workers."""
        self._batches.pop(worker, None)
        self._act(self.queue.lost(worker))

    def finished(self, delivery: Delivery) -> None:
        """Handle `TasksDone`: closures have ended."""
        message, worker = delivery.message, delivery.sender
        assert isinstance(message, TasksDone), "this handler is for ends of closures"
        for end, buffers in buffers_of(message.ends, delivery.buffers):
            if end.number in self._closures:  # else it has come before, or is another coordinator's
                self._end(end, PackedResult(end.packed, buffers, worker))
        self._send_batches()

    def take_failure(self) -> BaseException | None:
        """Return the first closure's error once, when all closures that ran with it are over."""
        number = self.queue.take_failure()
        return None if number is None else self._errors.pop(number)

    def running(self) -> list[str]:
        """Return a text for each busy worker, with the names of its closures."""
        return [
            f"{worker} runs {', '.join(self._closures[n].value.name for n in numbers)}"
            for worker, numbers in self.queue.running.items()
        ]

    def _end(self, end: TaskEnd, result: PackedResult) -> None:
        if end.number >= 0:
            self._mean_s += 0.1 * (end.duration_s - self._mean_s)
        if not self._is_synchronous:
            self.queue.window = min(MAX_AHEAD, 1 + int(AHEAD_S / self._mean_s))
        if end.failed:
            self._errors[end.number] = self._codec.unpack_error(end.packed)
        instructions = self.queue.finished(
            end.number, result.worker, failed=end.failed, num_pushes=end.num_pushes
        )
        self._decide(instructions, result)

    def _act(self, instructions: Sequence[QueueInstruction]) -> None:
        self._decide(instructions)
        self._send_batches()

    def _decide(
        self, instructions: Sequence[QueueInstruction], result: PackedResult | None = None
    ) -> None:
        """Carry out instructions; tasks leave with `_send_batches`."""
        for instruction in instructions:
            number = instruction.number
            closure = self._closures[number]
            if isinstance(instruction, Assign):
                batch = self._batches.setdefault(instruction.worker, TaskBatch())
                task = PackedTask(number, closure.packed, len(closure.buffers))
                batch.add(task, closure.buffers)
                if batch.is_full:
                    self._send_batches()
                continue
            if number >= 0:  # later workers may need the closure of a resource
                del self._closures[number]
            if isinstance(instruction, EndClosure):
                closure.value.end(result, self._errors.get(number))
            else:
                text = "the closure was cancelled, because another closure failed"
                closure.value.end(None, ClosureCancelledError(text))

    def _send_batches(self) -> None:
        """Send assigned tasks, in one message to each worker.

        Short tasks wait for a full message while their worker has others (J. Nagle, RFC 896, 1984).
        Else messages of one task stay single: the end of one task makes room for one.
        """
        are_long = self.queue.window < 2 * MAX_BATCH
        for worker, batch in list(self._batches.items()):
            is_idle = self.queue.num_running(worker) <= len(batch.tasks)
            if batch.is_full or is_idle or are_long:
                del self._batches[worker]
                oldest = max(0, self.queue.oldest or 0)
                self._office.send(worker, RunTasks(tuple(batch.tasks), oldest), batch.buffers)
