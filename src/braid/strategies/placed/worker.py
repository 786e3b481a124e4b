"""The worker of a task: keeps the parts that masters register, and runs their steps by number.

    host(graph)      make the model, keep the modules of this task's nodes
    register(plan)   a part for each device of this task, once
    run(step)        one part forward and backward; the reply has fetched values
    finish(step)     take the optimizer's step; drop the state of the step

All calls carry the incarnation of the worker that the master knows. Another one refuses them: a
restarted task has neither the parts nor the parameters.

Source: TensorFlow's worker service (RegisterGraph, RunGraph, RecvTensor, CleanupGraph).
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from braid import rpc
from braid.errors import ConfigError, MismatchError, StaleError
from braid.parallel.graph import CapturedGraph, GraphNodes, capture, last_uses
from braid.rpc.current import current_agent
from braid.rpc.functions import async_execution
from braid.rpc.outcomes import AnswerFuture, outcome
from braid.runtime.clock import MonotonicClock
from braid.strategies.placed.loss_node import LossSpec, with_loss
from braid.strategies.placed.part_step import (
    PartProgram,
    PartSpan,
    PartStep,
    Received,
    StepRequest,
)
from braid.strategies.placed.partition import GradientLink, PlacedPart, PlacedSegment
from braid.strategies.placed.rendezvous import Rendezvous
from braid.strategies.placed.rendezvous_state import RendezvousKey
from braid.strategies.placed.sent_tensor import SentTensor, arrived, sent
from braid.strategies.placed.spec import DeviceSpec
from braid.types import text_digest

__all__ = [
    "RESTORE",
    "PlacedWorker",
    "TaskAddress",
    "TaskReport",
    "captured",
    "graph_digest",
    "serve_placed",
]

RESTORE = "call placed.restore(state)"

for kind in (PlacedPart, PlacedSegment, GradientLink, RendezvousKey):
    rpc.register(kind)


@rpc.register
@dataclass(frozen=True, slots=True)
class TaskReport:
    """A task's answer to a master that asks for its properties.

    Attributes:
        incarnation: Identifier of the task's process, different after a restart.
        num_gpus: Number of GPUs of the task.
        now_ns: Time of the task's clock.
    """

    incarnation: str
    num_gpus: int
    now_ns: int


@rpc.register
@dataclass(frozen=True, slots=True)
class TaskAddress:
    """Address of the task that has a device.

    Attributes:
        node: Name of the task's node of remote calls.
        incarnation: Identifier of the task's process.
    """

    node: str
    incarnation: str


@rpc.register
@dataclass(frozen=True, slots=True)
class PartResult:
    """Result of one step of the nodes on one device.

    Attributes:
        fetched: Values that the master fetches.
    """

    fetched: dict[int, torch.Tensor]


@dataclass(slots=True)
class HostedGraph:
    """A graph with nodes in this task.

    Attributes:
        graph: The graph, with modules and tensors of this task.
        devices: Device of each node.
        tasks: Address of the task that has each device.
        programs: Parts that are ready to run, by number of the plan, and device.
        optimizer: Optimizer of this task's parameters.
        spans: Time spans of the last step.
        spans_of: Number of the last step.
        nodes: All nodes of this task.
    """

    graph: CapturedGraph
    devices: list[str]
    tasks: dict[str, TaskAddress]
    programs: dict[tuple[int, str], PartProgram] = field(default_factory=dict)
    optimizer: torch.optim.Optimizer | None = None
    spans: list[PartSpan] = field(default_factory=list)
    spans_of: int = -1
    nodes: GraphNodes | None = None


def captured(model: nn.Module, example: Any) -> CapturedGraph:
    """Return the graph of a model, captured with an example.

    The example is one argument, a tuple of arguments, or a dict of keyword arguments.
    """
    if isinstance(example, dict):
        return capture(model, **example)
    return capture(model, *(example if isinstance(example, tuple) else (example,)))


def graph_digest(graph: CapturedGraph) -> str:
    """Return a text that is equal for graphs with equal nodes and tensors."""
    lines = [f"{node} {node.where} {node.devices}" for node in graph.nodes]
    for name, module in sorted(graph.modules.items()):
        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        lines += [f"{name}.{key} {tuple(x.shape)} {x.dtype}" for key, x in state.items()]
    return f"{text_digest(chr(10).join(lines)):x}"


class PlacedWorker:
    """Worker of this task: hosts nodes of graphs, and runs their steps for masters."""

    def __init__(self) -> None:
        self.incarnation = os.urandom(8).hex()
        self.rendezvous = Rendezvous(self.incarnation)
        self.node = ""
        self._clock = MonotonicClock()
        self._lock = threading.Lock()
        self._graphs: dict[str, HostedGraph] = {}

    # -- set-up

    def describe(self) -> TaskReport:
        """Return the properties of this task that a master needs."""
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return TaskReport(self.incarnation, num_gpus, self._clock.now_ns())

    def host_local(
        self, name: str, graph: CapturedGraph, devices: list[str], tasks: dict[str, TaskAddress]
    ) -> None:
        """Keep this task's nodes of `graph`, which a master in this process has named `name`."""
        self._host(name, graph, devices, tasks)

    def host(
        self,
        name: str,
        make: Callable[..., Any],
        args: Sequence[Any],
        digest: str,
        devices: list[str],
        tasks: dict[str, TaskAddress],
    ) -> None:
        """Make the model `make(*args)`, capture it as graph `name`, and keep this task's nodes.

        Raises:
            MismatchError: The graph differs from the master's graph, which has this `digest`.
        """
        if name in self._graphs:
            self._host(name, self._graphs[name].graph, devices, tasks)
            return
        model, example = make(*args)
        graph = captured(model, example)
        here = graph_digest(graph)
        if here != digest:
            msg = (
                f"{make.__qualname__} made a different model than on the master: "
                f"{len(graph.nodes)} nodes with digest {here}, expected {digest}. Make it return "
                "the same model in all tasks"
            )
            raise MismatchError(msg)
        self._host(name, graph, devices, tasks)

    def _host(
        self, name: str, graph: CapturedGraph, devices: list[str], tasks: dict[str, TaskAddress]
    ) -> None:
        if name in self._graphs:  # after a restart of another task
            self._graphs[name].tasks = tasks
            self._graphs[name].programs.clear()
            return
        here = {device for device, task in tasks.items() if task.incarnation == self.incarnation}
        positions = [i for i, device in enumerate(devices) if device in here]
        called = {graph.nodes[i].target for i in positions}
        used = {value for i in positions for value in graph.nodes[i].inputs} | set(graph.results)
        modules = {key: value for key, value in graph.modules.items() if key in called}
        tensors = {key: value for key, value in graph.tensors.items() if key in used}
        graph = dataclasses.replace(graph, modules=modules, tensors=tensors)
        for i in positions:
            target, place = graph.nodes[i].target, torch_device(devices[i])
            if isinstance(target, str) and place.type != "cpu":
                modules[target].to(place)
        hosted = HostedGraph(graph, devices, tasks)
        hosted.nodes = GraphNodes(graph, positions)
        self._graphs[name] = hosted

    def register(
        self, name: str, plan: int, part: PlacedPart, loss: LossSpec | None, forgotten: int
    ) -> None:
        """Prepare `part` of plan `plan` of graph `name` to run; drop the plan `forgotten`."""
        hosted = self._hosted(name)
        hosted.programs.pop((forgotten, part.device), None)
        graph, _, _ = with_loss(hosted.graph, loss)
        positions = part.nodes
        results = {value for segment in part.segments for value in segment.fetches}
        nodes = GraphNodes(graph, positions, results)
        nodes.training = hosted.nodes.training if hosted.nodes is not None else True
        place = torch_device(part.device)
        labels = graph.labels()
        dead, names, users = [], [], []
        for segment in part.segments:
            kept = {*segment.outputs, *segment.fetches}
            dead.append(last_uses([graph.nodes[i] for i in segment.nodes], kept))
            first, last = labels[segment.nodes[0]], labels[segment.nodes[-1]]
            names.append(first if first == last else f"{first} to {last}")
            users.append(set(GraphNodes(graph, segment.nodes).parameters()))
        shared = [[p for p in params if sum(p in other for other in users) > 1] for params in users]
        lines = {labels[i]: graph.nodes[i].where for i in positions}
        hosted.programs[plan, part.device] = PartProgram(
            part, nodes, dead, names, lines, shared, place, len(set(hosted.devices)) == 1
        )

    # -- steps

    def run(self, name: str, plan: int, device: str, request: StepRequest) -> PartResult:
        """Run one step of graph `name`: the part of a plan on `device`, forward and backward."""
        hosted = self._hosted(name)
        exchange = StepEdges(self, hosted.tasks, device, name, request)
        step = PartStep(hosted.programs[plan, device], request, exchange, self._clock)
        try:
            step.run()
        finally:
            with self._lock:
                if hosted.spans_of != request.step:
                    hosted.spans, hosted.spans_of = [], request.step
                hosted.spans += step.spans
        return PartResult({value: x.cpu() for value, x in step.fetched.items()})

    def finish(self, name: str, step: int, applies: bool) -> None:
        """Drop the state of a finished step of graph `name`; step the optimizer if `applies`."""
        hosted = self._hosted(name)
        self.rendezvous.end(name, step, "all parts have run")
        if applies and hosted.optimizer is not None:
            begin_ns = self._clock.now_ns()
            hosted.optimizer.step()
            hosted.optimizer.zero_grad()
            device = next(d for d, t in hosted.tasks.items() if t.incarnation == self.incarnation)
            span = PartSpan(device, "optimizer", "step", begin_ns, self._clock.now_ns())
            hosted.spans.append(span)

    def abort(self, name: str, step: int, reason: str) -> None:
        """Drop a failed step of graph `name`; parts that still run it fail with `reason`."""
        self.rendezvous.end(name, step, reason)

    # -- state

    def make_optimizer(
        self, name: str, make: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Make the optimizer of this task's parameters in the graph `name`."""
        hosted = self._hosted(name)
        assert hosted.nodes is not None
        params = list(hosted.nodes.parameters())
        hosted.optimizer = make(params, *args, **kwargs) if params else None

    def num_pending(self, name: str) -> int:
        """Return one total: the number of values plus the number of receivers that wait here.

        Raises:
            StaleError: This task does not have a graph `name`.
        """
        self._hosted(name)
        return self.rendezvous.num_pending

    def names(self, name: str) -> list[str]:
        """Return the names of this task's parameters and buffers in the graph `name`."""
        nodes = self._hosted(name).nodes
        assert nodes is not None
        return list(tensors_of(nodes))

    def collect(self, name: str, what: str) -> Any:
        """Return values of the graph `name` in this task.

        `what` is `spans`, `optimizer` (for its state), `gradients`, or another text: all tensors.
        """
        hosted = self._hosted(name)
        assert hosted.nodes is not None
        if what == "spans":
            return list(hosted.spans)
        if what == "optimizer":
            return None if hosted.optimizer is None else deepcopy(hosted.optimizer.state_dict())
        if what == "gradients":
            named = hosted.nodes.named_parameters(remove_duplicate=False)
            return {key: None if p.grad is None else p.grad.cpu().clone() for key, p in named}
        # copies, so that the parts of this process are of the same step as those that travel
        return {key: x.detach().cpu().clone() for key, x in tensors_of(hosted.nodes).items()}

    def load(self, name: str, state: dict[str, torch.Tensor], frozen: list[str]) -> None:
        """Copy values into the tensors of graph `name`; those in `frozen` get no gradients."""
        hosted = self._hosted(name)
        assert hosted.nodes is not None
        tensors = tensors_of(hosted.nodes)
        with torch.no_grad():
            for key, x in tensors.items():
                if key in state and state[key] is not x:
                    x.copy_(state[key])
                if isinstance(x, nn.Parameter):
                    x.requires_grad_(key not in frozen)

    def load_optimizer(self, name: str, state: Any) -> None:
        """Load the state of this task's optimizer for the graph `name`."""
        optimizer = self._hosted(name).optimizer
        if optimizer is not None and state is not None:
            optimizer.load_state_dict(state)

    def zero_grad(self, name: str) -> None:
        """Set to None the gradients of this task's parameters in the graph `name`."""
        nodes = self._hosted(name).nodes
        assert nodes is not None
        nodes.zero_grad()

    def set_mode(self, name: str, training: bool) -> None:
        """Set training or evaluation in all of this task's modules in the graph `name`."""
        hosted = self._hosted(name)
        for nodes in (hosted.nodes, *(program.nodes for program in hosted.programs.values())):
            assert nodes is not None
            nodes.train(training)

    def drop(self, name: str) -> None:
        """Delete the graph `name` with its parameters and optimizer."""
        self._graphs.pop(name, None)
        self.rendezvous.forget(name)

    def _hosted(self, name: str) -> HostedGraph:
        if name not in self._graphs:
            task = self.node or "this task"
            msg = f"{task} has no graph {name}: the process that made the graph has closed it"
            raise StaleError(msg)
        return self._graphs[name]


class StepEdges:
    """Edges (sent tensors) of a part in one step; see `PartEdges`.

    Args:
        worker: Worker of this task.
        tasks: Tasks of all devices.
        device: Device of the part.
        graph: Name of the graph to which the part belongs.
        request: Inputs and settings of the step.
    """

    def __init__(
        self,
        worker: PlacedWorker,
        tasks: Mapping[str, TaskAddress],
        device: str,
        graph: str,
        request: StepRequest,
    ) -> None:
        self._worker, self._tasks, self._device = worker, tasks, device
        self._name, self._timeout_s = (graph, request.step), request.timeout_s

    def put(self, target: str, edge: str, x: torch.Tensor | None, requires_grad: bool) -> None:
        """Send a tensor to the part on another device; see `PartEdges.put`."""
        incarnation = self._worker.incarnation
        key = RendezvousKey(self._device, incarnation, target, edge, *self._name)
        self._worker.rendezvous.put(key, x, requires_grad)

    def ask(self, source: str, edge: str) -> Callable[[], Received]:
        """Ask a part for a tensor; return a function that waits for it; see `PartEdges.ask`."""
        task = self._tasks[source]
        key = RendezvousKey(source, task.incarnation, self._device, edge, *self._name)
        if task.incarnation == self._worker.incarnation:
            return self._worker.rendezvous.ask(key).wait
        agent = current_agent()
        future = rpc.rpc_async(task.node, receive_placed, (key,), timeout=self._timeout_s)
        place = torch_device(self._device)

        def wait() -> Received:
            value: SentTensor = agent.wait_for(future, 0)
            return arrived(value, place), value.requires_grad

        return wait


def torch_device(device: str) -> torch.device:
    """Return the torch device for a device name of the cluster."""
    spec = DeviceSpec.parse(device)
    if spec.device_type == "cuda":
        return torch.device("cuda", spec.device_index or 0)
    return torch.device("cpu")


def tensors_of(nodes: GraphNodes) -> dict[str, torch.Tensor]:
    """Return parameters, buffers and other tensors of nodes, under each of their names."""
    named = dict(nodes.named_parameters(remove_duplicate=False))
    buffers = dict(nodes.named_buffers(remove_duplicate=False))
    unnamed = {f"value {value}": x for value, x in nodes.unnamed.items()}
    return {**named, **buffers, **unnamed}


_SERVED = frozenset(
    {
        *("describe", "host", "register", "run", "finish", "abort", "drop"),
        *(
            "make_optimizer",
            "collect",
            "load",
            "load_optimizer",
            "zero_grad",
            "set_mode",
            "names",
            "num_pending",
        ),
    }
)


@rpc.register
def serve_placed(incarnation: str, method: str, args: Sequence[Any]) -> Any:
    """Call a method of this task's worker for a master.

    Raises:
        StaleError: The identifier of this process is not `incarnation`: the task has restarted.
        ConfigError: The worker has no such method for masters.
    """
    agent = current_agent()
    worker = agent.part(PlacedWorker)
    worker.node = agent.info.name
    if method not in _SERVED:
        msg = f"a worker has no method {method!r} for masters"
        raise ConfigError(msg)
    if incarnation and incarnation != worker.incarnation:
        msg = (
            f"{worker.node} has restarted (start {worker.incarnation}, but the master knows "
            f"start {incarnation}). Its parts and parameters are gone: {RESTORE}"
        )
        raise StaleError(msg)
    return getattr(worker, method)(*args)


@rpc.register
@async_execution
def receive_placed(key: RendezvousKey) -> torch.futures.Future[SentTensor]:
    """Return a future of this task's value with a key; a part on another task calls this."""
    answer = AnswerFuture()

    def complete(future: torch.futures.Future[Received]) -> None:
        value, error = outcome(future)
        answer.finish(sent(value[0], requires_grad=value[1]) if error is None else None, error)

    current_agent().part(PlacedWorker).rendezvous.ask(key).add_done_callback(complete)
    return answer
