"""One step of one part: its segments forward, then backward in the opposite order.

Each segment has a separate graph of autograd. Values of earlier segments enter through
`_Entrance`, which keeps the gradient that leaves the segment there. The sum of the gradients of
later segments is a root at the entrance, so that autograd adds to it in the order of one process:

    segment 1   x ──┬── ... ── y        backward of roots (y: gradient of y) and (x at the entrance:
                    └─▶ segment 3       sum of segment 3) leaves the sum of 1 and 3 in the entrance

A parameter that several segments use has the sum of later segments as a root in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from braid import rpc
from braid.errors import ConfigError, message_of
from braid.parallel.graph import GraphNodes, Situation
from braid.rpc.outcomes import error_like
from braid.runtime.clock import Clock
from braid.runtime.seeding import Draws
from braid.strategies.placed.partition import PlacedPart, PlacedSegment

__all__ = ["PartEdges", "PartProgram", "PartSpan", "PartStep", "StepRequest"]

Received = tuple[torch.Tensor | None, bool]


@rpc.register
@dataclass(frozen=True, slots=True)
class StepRequest:
    """Inputs and settings of one step, which the master sends to each part.

    Attributes:
        step: Number of the step.
        feeds: Tensors that the master feeds, by the number of the value.
        rows: Rows of the batch.
        trains: Whether to compute gradients of the loss.
        loss: Number of the loss among the values; -1 without a loss.
        seed: Seed of random numbers.
        draw: Number of the step, counting only steps that draw random numbers.
        autocast: Device types with autocast around the master's call, and its dtypes.
        timeout_s: Seconds that the part may wait for a value; 0 for no limit.
    """

    step: int
    feeds: dict[int, torch.Tensor]
    rows: int
    trains: bool = False
    loss: int = -1
    seed: int = 0
    draw: int = 0
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    timeout_s: float = 0.0


@rpc.register
class PartSpan(NamedTuple):
    """Time span of one activity of a device in a step.

    Attributes:
        device: Device of the part.
        kind: `forward`, `backward`, `wait` or `optimizer`.
        name: Names of the nodes that run, or of the edge (the value that is awaited).
        begin_ns: Time of the begin, by the clock of the task.
        end_ns: Time of the end.
    """

    device: str
    kind: str
    name: str
    begin_ns: int
    end_ns: int


class PartEdges(Protocol):
    """Interface of the edges (sent tensors) between parts on different devices, in one step."""

    def put(self, target: str, edge: str, x: torch.Tensor | None, requires_grad: bool) -> None:
        """Send the tensor `x` of an edge to the part on the device `target`."""

    def ask(self, source: str, edge: str) -> Callable[[], Received]:
        """Request an edge's tensor from device `source`; return a function that waits for it."""


class PartProgram(NamedTuple):
    """Part of a graph that a worker has made ready to run.

    Attributes:
        part: The part, with its segments.
        nodes: Nodes of the part, ready to run.
        dead: For each node of each segment, the values that no later node uses.
        names: Text about each segment, for errors and spans.
        lines: Lines of the model, by label of the node.
        shared: Parameters that several segments use, by segment.
        device: Device of torch.
        is_alone: Whether the whole graph is on this device.
    """

    part: PlacedPart
    nodes: GraphNodes
    dead: list[list[list[int]]]
    names: list[str]
    lines: Mapping[str, str]
    shared: list[list[nn.Parameter]]
    device: torch.device
    is_alone: bool = False


class _Entrance(torch.autograd.Function):
    """A value of an earlier segment; its gradient goes to a list."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
        ctx.gradients = gradients
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.gradients.append(grads[0])
        return None, None


@dataclass(slots=True)
class _SegmentPass:
    """A segment between forward and backward."""

    entrances: dict[int, torch.Tensor] = field(default_factory=dict)
    gradients: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    asked: dict[int, Callable[[], Received]] = field(default_factory=dict)


class PartStep:
    """One step of the nodes on one device: runs them forward and backward.

    Args:
        program: The part.
        request: Inputs and settings of the step.
        exchange: Edges (sent tensors) to and from the parts on other devices.
        clock: Clock of the spans.

    Attributes:
        fetched: Values that the master fetches.
        spans: Time spans of all activities of the part.
    """

    def __init__(
        self, program: PartProgram, request: StepRequest, exchange: PartEdges, clock: Clock
    ) -> None:
        self._program, self._request, self._exchange = program, request, exchange
        self._clock = clock
        self._values: dict[int, tuple[torch.Tensor, bool]] = {}
        self._passes: list[_SegmentPass] = []
        self._sums: dict[tuple[int, int], torch.Tensor | None] = {}
        self.fetched: dict[int, torch.Tensor] = {}
        self.spans: list[PartSpan] = []

    def run(self) -> None:
        """Run all segments; gradients are added to `.grad` of the parameters."""
        request = self._request
        torch.get_num_threads()  # a new thread takes over `set_num_threads` no earlier than here
        asked = {
            value: self._exchange.ask(source, f"value {value}")
            for segment in self._program.part.segments
            for value, source in segment.receives
        }
        generator = None if self._program.is_alone else torch.get_rng_state()
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(mode=False))
            stack.enter_context(torch.set_grad_enabled(request.trains))
            for kind, dtype in request.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            for index in range(len(self._program.part.segments)):
                self._forward(index, asked)
        if generator is not None and not torch.equal(generator, torch.get_rng_state()):
            msg = (
                f"a node on {self._program.part.device} draws random numbers that would depend "
                "on the placement of nodes: use torch's dropout or functions that take a "
                "generator, or place the whole model on one device"
            )
            raise ConfigError(msg)
        if request.trains:
            with ExitStack() as stack:
                for kind, _ in request.autocast:  # this may be the thread of the master's call
                    stack.enter_context(torch.autocast(kind, enabled=False))
                stack.enter_context(self._earlier_gradients_kept())
                for index in reversed(range(len(self._program.part.segments))):
                    self._backward(index)

    # -- forward

    def _forward(self, index: int, asked: Mapping[int, Callable[[], Received]]) -> None:
        program, request = self._program, self._request
        segment = program.part.segments[index]
        for value, _ in segment.receives:
            tensor, requires_grad = self._waited(f"value {value}", asked[value])
            assert tensor is not None
            self._values[value] = tensor, requires_grad
        state = _SegmentPass()
        known = {value: request.feeds[value].to(program.device) for value in segment.feeds}
        for value in segment.inputs:
            tensor, requires_grad = self._values[value]
            if requires_grad and request.trains:
                state.gradients[value] = []
                tensor = self._entrance(tensor, state.gradients[value])
                state.entrances[value] = tensor
            known[value] = tensor
        is_training = program.nodes.training
        now = Situation(request.rows, is_training, program.device)
        draws = Draws(request.seed, request.draw, range(request.rows)) if is_training else None
        begin_ns = self._clock.now_ns()
        first = sum(len(segment.nodes) for segment in program.part.segments[:index])
        program.nodes.run(known, now, program.dead[index], first=first, around=self._around(draws))
        self._span("forward", program.names[index], begin_ns)
        for value in segment.outputs:
            tensor = known[value]
            if tensor.requires_grad:
                state.outputs[value] = tensor
            self._values[value] = tensor.detach(), tensor.requires_grad
        for value, target in segment.sends:
            self._exchange.put(target, f"value {value}", *self._values[value])
        for value in segment.fetches:
            tensor = known[value] if value in known else program.nodes.tensor(value)
            if value == request.loss:
                self._check_loss(tensor)
                if request.trains:
                    state.outputs[value] = tensor
            self.fetched[value] = tensor.detach()
        for value in segment.last_uses:
            self._values.pop(value, None)
        if request.trains:
            self._ask_for_sums(segment, state)
            self._passes.append(state)

    @staticmethod
    def _entrance(x: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
        with torch.enable_grad():
            made: torch.Tensor = _Entrance.apply(x.detach().requires_grad_(), gradients)  # type: ignore[no-untyped-call]
        return made

    def _check_loss(self, loss: torch.Tensor) -> None:
        if loss.numel() != 1 or not loss.is_floating_point():
            msg = (
                f"the loss must return one floating point number, got shape {tuple(loss.shape)} "
                f"and {loss.dtype}: average it over the batch"
            )
            raise ConfigError(msg)
        if self._request.trains and not loss.requires_grad:
            msg = "the loss depends on no parameter that requires a gradient: use predict instead"
            raise ConfigError(msg)

    def _around(self, draws: Draws | None) -> Callable[[str], Any]:
        @contextmanager
        def around(label: str) -> Iterator[None]:
            try:
                if draws is None:
                    yield
                else:
                    with draws.layer(label):
                        yield
            except Exception as exc:
                raise self._located(exc, f"{label} at {self._program.lines[label]}") from exc

        return around

    def _located(self, error: Exception, place: str) -> BaseException:
        """Return an error of the same type that names the node, its line and its device."""
        where = f"in step {self._request.step}: {place}, on {self._program.part.device}"
        return error_like(type(error), f"{message_of(error)} ({where})")

    # -- backward

    def _ask_for_sums(self, segment: PlacedSegment, state: _SegmentPass) -> None:
        """Ask for gradients that come from other devices, before this part waits for any."""
        for value, later, device in segment.sums_from:
            needed = value in state.outputs or value in state.entrances
            if needed and device != self._program.part.device:
                edge = f"gradient of {value} from {later}"
                state.asked[value] = self._exchange.ask(device, edge)

    def _sum_from(
        self, value: int, segment: PlacedSegment, state: _SegmentPass
    ) -> torch.Tensor | None:
        """Return the sum of gradients of later segments; None without one."""
        if value == self._request.loss and value in state.outputs:
            return torch.ones_like(state.outputs[value])
        if value in state.asked:
            return self._waited(f"gradient of {value}", state.asked[value])[0]
        return self._sums.pop((segment.number, value), None)

    def _backward(self, index: int) -> None:
        program, state = self._program, self._passes.pop()
        segment = program.part.segments[index]
        sums = {v: self._sum_from(v, segment, state) for v in (*state.outputs, *state.entrances)}
        roots = [(x, total) for v, x in state.outputs.items() if (total := sums[v]) is not None]
        is_reached = bool(roots)
        roots += [(x, total) for v, x in state.entrances.items() if (total := sums[v]) is not None]
        begin_ns = self._clock.now_ns()
        if is_reached:
            for param in program.shared[index]:
                if param.grad is not None:
                    roots.append((param, param.grad))
                    param.grad = None
            try:
                torch.autograd.backward(
                    [tensor for tensor, _ in roots], [total for _, total in roots]
                )
            except Exception as exc:
                raise self._located(exc, f"backward of {program.names[index]}") from exc
            sums = {value: grads[0] if grads else None for value, grads in state.gradients.items()}
        self._span("backward", program.names[index], begin_ns)
        for value, earlier, device in segment.sums_to:
            if value not in state.entrances:
                continue
            if device == program.part.device:
                self._sums[earlier, value] = sums[value]
            else:
                edge = f"gradient of {value} from {segment.number}"
                self._exchange.put(device, edge, sums[value], False)

    @contextmanager
    def _earlier_gradients_kept(self) -> Iterator[None]:
        """Add gradients of earlier steps at the end, as one backward of one process does."""
        params = list(self._program.nodes.parameters())
        earlier = [(param, param.grad) for param in params if param.grad is not None]
        for param, _ in earlier:
            param.grad = None
        try:
            yield
        except BaseException:
            for param in params:
                param.grad = None
            for param, grad in earlier:
                param.grad = grad
            raise
        for param, grad in earlier:
            if param.grad is not None:
                grad.add_(param.grad)
            param.grad = grad

    # -- waits and spans

    def _waited(self, edge: str, wait: Callable[[], Received]) -> Received:
        begin_ns = self._clock.now_ns()
        tensor, requires_grad = wait()
        self._span("wait", edge, begin_ns)
        if tensor is not None:
            tensor = tensor.to(self._program.device)
        return tensor, requires_grad

    def _span(self, kind: str, name: str, begin_ns: int) -> None:
        device = self._program.part.device
        self.spans.append(PartSpan(device, kind, name, begin_ns, self._clock.now_ns()))
