"""The tasks of a cluster as a master sees them: their devices, and calls to their workers.

    node of remote calls     task                     devices
    worker:1                 /job:worker/task:1       /job:worker/task:1/device:cpu:0, ...
    second                   /job:second/task:0       /job:second/task:0/device:cpu:0, ...

A call to the task of the master itself runs in a thread of this process, without remote calls, so
a program without remote calls is a cluster of one task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any

from braid.errors import ConfigError
from braid.rpc.agent import ACTING, Agent
from braid.rpc.caller import OutgoingCall
from braid.rpc.current import current_agent, has_default
from braid.rpc.outcomes import outcome
from braid.strategies.placed.spec import DeviceSpec
from braid.strategies.placed.worker import PlacedWorker, TaskAddress, TaskReport, serve_placed

__all__ = ["TaskCall", "Tasks"]

ALONE = "worker:0"  # name of the only task without remote calls
MEET_S = 60.0  # for a task to describe itself
NUM_THREADS = 64  # parts of this task that run at the same time


@dataclass(slots=True)
class TaskCall:
    """Call of a method of a task's worker, the object that runs the task's part of a model.

    Attributes:
        node: Name of the task's node of remote calls.
        future: Future of the result.
        agent: Agent of this node, which waits for the result; None for a call in this process.
        function: Function that `wait` runs in the waiting thread; None if the call runs elsewhere.
    """

    node: str
    future: Any
    agent: Agent | None
    function: Callable[[], Any] | None = None

    def wait(self, timeout_s: float | None = None) -> Any:
        """Return the result, or raise the error of the call.

        `timeout_s` applies to a call in this process; a remote call already has a deadline.
        """
        if self.function is not None:
            function, self.function = self.function, None
            return function()
        if self.agent is None:
            return self.future.result(timeout_s)
        return self.agent.wait_for(self.future, 0)

    def when_failed(self, act: Callable[[BaseException], None]) -> None:
        """Call a function with the error of the call, when it has failed."""

        def look(future: Any) -> None:
            error = future.exception() if self.agent is None else outcome(future)[1]
            if error is not None:
                act(error)

        self.future.add_done_callback(look)


class Tasks:
    """Tasks of a cluster.

    Args:
        nodes: Names of the tasks' nodes of remote calls; all nodes when None.
        num_cpus: Number of CPU devices that each task has.

    Attributes:
        devices: Devices of all tasks, in the order of the nodes.
        addresses: Address of the task that has each device.
        here: Name of this process's node.

    Raises:
        ConfigError: Several nodes are named, but this process is not a node of remote calls.
    """

    def __init__(self, nodes: Sequence[str] | None, num_cpus: int) -> None:
        has_agent = ACTING.get() is not None or has_default()
        self._agent = current_agent() if has_agent else None
        if self._agent is None and nodes and list(nodes) != [ALONE]:
            msg = f"the tasks {list(nodes)} need remote calls: call rpc.init_rpc() in each of them"
            raise ConfigError(msg)
        if self._agent is None:
            self.here, self.worker = ALONE, PlacedWorker()
            self.nodes: list[str] = [ALONE]
        else:
            self.here, self.worker = self._agent.info.name, self._agent.part(PlacedWorker)
            known = sorted(self._agent.directory.known, key=lambda record: record.id)
            self.nodes = [record.name for record in known] if nodes is None else list(nodes)
        self.worker.node = self.here
        self._num_cpus = num_cpus
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="braid-placed")
        self.devices: list[DeviceSpec] = []
        self.addresses: dict[str, TaskAddress] = {}
        self.offsets_ns: dict[str, int] = {}
        self.meet()

    def meet(self) -> None:
        """Ask all tasks for their devices, and for the identifiers of their processes."""
        self.devices, self.addresses, self._incarnations = [], {}, {}
        for node in self.nodes:
            if self._agent is not None and node != self.here:  # it may have another address now
                self._agent.directory.forget(self._agent.directory.find(node).id)
            begin_ns = self.worker.describe().now_ns
            report: TaskReport = self._call(node, "", "describe", (), MEET_S).wait()
            end_ns = self.worker.describe().now_ns
            self.offsets_ns[node] = (begin_ns + end_ns) // 2 - report.now_ns
            self._incarnations[node] = report.incarnation
            for device in _devices_of(node, self._num_cpus, report.num_gpus):
                self.devices.append(device)
                self.addresses[str(device)] = TaskAddress(node, report.incarnation)

    def call(self, node: str, method: str, *args: Any, timeout_s: float = 0.0) -> TaskCall:
        """Call a method of the worker on task `node`; a `timeout_s` of 0 means no deadline."""
        return self._call(node, self._incarnations[node], method, args, timeout_s)

    def call_here(self, method: str, *args: Any) -> TaskCall:
        """Return a call of this task's worker, which runs in the thread that calls `wait`.

        This avoids waking another thread, which takes longer than a short step.
        """
        function = partial(getattr(self.worker, method), *args)
        return TaskCall(self.here, None, None, function)

    def _call(
        self, node: str, incarnation: str, method: str, args: Sequence[Any], timeout_s: float
    ) -> TaskCall:
        if node == self.here:
            function = getattr(self.worker, method)
            return TaskCall(node, self._pool.submit(copy_context().run, function, *args), None)
        assert self._agent is not None
        asked = (incarnation, method, tuple(args))
        # not `rpc_async`: this may be a thread that belongs to no node
        call = OutgoingCall(node, serve_placed, asked, timeout=timeout_s)
        return TaskCall(node, self._agent.caller.call_async(call), self._agent)

    def close(self) -> None:
        """End the threads that call the tasks."""
        self._pool.shutdown()


def _devices_of(node: str, num_cpus: int, num_gpus: int) -> list[DeviceSpec]:
    job, _, number = node.rpartition(":")
    job, task = (job, int(number)) if job and number.isdigit() else (node, 0)
    counts = (("cuda", num_gpus), ("cpu", num_cpus))
    return [
        DeviceSpec(job, None, task, kind, index) for kind, count in counts for index in range(count)
    ]
