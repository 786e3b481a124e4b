"""The server of tables: carries out what `TableState` decides, on tensors and a van."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim import Optimizer

from braid.errors import BraidError, CommError, ConfigError, PeerLostError
from braid.message import Delivery, Message, PeerLost, Van, split_node
from braid.message.tensors import as_buffers, from_buffers
from braid.ps.consistency import Consistency
from braid.ps.messages import Leave, Pull, Pulled, Push, Pushed, Refused
from braid.ps.table_state import Answer, Apply, Drop, Instruction, Keep, TableState

__all__ = ["MakeOptimizer", "Server"]

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


@dataclass
class _Table:
    """A table's part on this server."""

    values: nn.Parameter
    optimizer: Optimizer
    state: TableState
    kept: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    version: int = 0


class Server:
    """Serves parts of tables until all workers have left.

    Args:
        van: Van of this node, to which workers connect.
        workers: Numbers of the workers.
    """

    def __init__(self, van: Van, workers: range) -> None:
        self._van = van
        self._workers = workers
        self._tables: dict[str, _Table] = {}

    def add(
        self, name: str, values: torch.Tensor, make: MakeOptimizer, consistency: Consistency
    ) -> None:
        """Hold a part of a table.

        Raises:
            ConfigError: There is one of this name, or the quorum exceeds the workers.
        """
        if name in self._tables:
            msg = f"there is a table {name!r} already"
            raise ConfigError(msg)
        if consistency.quorum is not None and consistency.quorum > len(self._workers):
            msg = f"a quorum of {consistency.quorum} exceeds the {len(self._workers)} workers"
            raise ConfigError(msg)
        param = nn.Parameter(values.detach().clone())
        self._tables[name] = _Table(param, make([param]), TableState(self._workers, consistency))

    def serve(self) -> None:
        """Serve until all workers have left.

        Raises:
            PeerLostError: A worker was lost; it is named, with who waits for it.
        """
        left: set[int] = set()
        while len(left) < len(self._workers):
            delivery = self._van.recv(timeout_s=3e7)
            _, worker = split_node(delivery.sender)
            message = delivery.message
            if isinstance(message, Leave):
                left.add(worker)
                for table in self._tables.values():
                    self._carry_out(table, table.state.leave(worker), None)
            elif isinstance(message, PeerLost):
                if worker not in left:
                    raise self._lost(worker, message)
            else:
                self._answer(delivery, worker)

    def _answer(self, delivery: Delivery, worker: int) -> None:
        """Handle a request; what makes no sense is refused, and the server lives on."""
        try:
            self._handle(delivery, worker)
        except BraidError as exc:
            self._send(delivery.sender, Refused(str(exc)), (), delivery.id)

    def _handle(self, delivery: Delivery, worker: int) -> None:
        message = delivery.message
        if not isinstance(message, Push | Pull):
            msg = f"a server takes pushes and pulls, got {type(message).__name__}"
            raise CommError(msg)
        table = self._tables.get(message.table)
        if table is None:
            known = ", ".join(sorted(self._tables)) or "none"
            msg = f"there is no table {message.table!r}; the server has {known}"
            raise CommError(msg)
        if isinstance(message, Pull):
            self._carry_out(table, table.state.pull(worker, message.clock, delivery.id), None)
            return
        (value,) = from_buffers([message.spec], delivery.buffers)
        if value.shape != table.values.shape or value.dtype != table.values.dtype:
            msg = (
                f"table {message.table!r} has {table.values.dtype}{list(table.values.shape)} here, "
                f"and the push {value.dtype}{list(value.shape)}: do worker and server have the "
                "same model?"
            )
            raise CommError(msg)
        instructions = table.state.push(worker, message.clock)
        self._send(delivery.sender, Pushed(message.table, message.clock), (), delivery.id)
        self._carry_out(table, instructions, value)

    def _carry_out(
        self, table: _Table, instructions: list[Instruction], value: torch.Tensor | None
    ) -> None:
        for instruction in instructions:
            match instruction:
                case Keep(worker, clock):
                    assert value is not None, "a push has a value"
                    table.kept[worker, clock] = value
                case Apply(pushes, scale):
                    self._apply(table, pushes, scale)
                case Answer(worker, request):
                    self._send_values(table, worker, request)
                case Drop():
                    pass

    @torch.no_grad()
    def _apply(self, table: _Table, pushes: tuple[tuple[int, int], ...], scale: float) -> None:
        """Add values in the given order, scale the sum once, and step."""
        first, *rest = (table.kept.pop(push) for push in pushes)
        for value in rest:
            first.add_(value)
        table.values.grad = first if scale == 1.0 else first.mul_(scale)
        table.optimizer.step()
        table.values.grad = None
        table.version += 1

    def _send_values(self, table: _Table, worker: int, request: int) -> None:
        name = next(name for name, own in self._tables.items() if own is table)
        (spec,), buffers = as_buffers([table.values.detach().clone()])
        self._send(f"worker:{worker}", Pulled(name, spec, table.version), buffers, request)

    def _send(
        self, to: str, message: Message, buffers: list[memoryview] | tuple[()], request: int
    ) -> None:
        self._van.send(to, message, buffers=buffers, answers=request)

    def _lost(self, worker: int, notice: PeerLost) -> PeerLostError:
        waits = [line for table in self._tables.values() for line in table.state.waiting()]
        text = f"; {'; '.join(waits)}" if waits else ""
        msg = f"lost worker {worker}: {notice.reason}{text}"
        return PeerLostError(msg, rank=worker)
