"""A server answers a push first, and then sums the pushes of the clock and steps."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from braid.ps.consistency import BSP
from braid.ps.dense import dense_spec
from braid.ps.messages import Pull, Push
from braid.ps.postoffice import Postoffice
from braid.ps.protocol.directory import Directory
from braid.ps.server import Server
from braid.runtime.clock import VirtualClock
from braid.runtime.message import Delivery
from braid.runtime.tensor_buffers import as_buffers, from_buffers


class Recorded:
    """Van of a server that records its answers, and the values of an answer to a pull."""

    def __init__(self) -> None:
        self.node, self.incarnation, self.clock = "server:0", 1, VirtualClock()
        self.events: list[str] = []
        self.values: list[torch.Tensor] = []

    def send(self, _to: str, message: Any, *, buffers: Any, **_: Any) -> None:
        self.events.append(type(message).__name__)
        if buffers:
            self.values = from_buffers(message.specs[0], buffers)


def test_a_push_is_answered_before_the_step_and_a_pull_after_it():
    van = Recorded()

    def optimizer(params: Any) -> torch.optim.Optimizer:
        sgd = torch.optim.SGD(params, lr=1.0)
        sgd.register_step_pre_hook(lambda *_: van.events.append("step"))
        return sgd

    office = Postoffice(van)
    server = Server(office, 0)
    server.add(dense_spec("w", torch.zeros(2), optimizer, BSP, (), has_first=False))
    directory = Directory.begin({0: "here"}, (0,), 0)
    office.set_directory(msgspec.structs.replace(directory, lives={0: 7}))
    specs, buffers = as_buffers([torch.ones(2)])
    push, pull = (
        Push(office.epoch, "w", 0, (0,), [specs]),
        Pull(office.epoch, "w", 1, (0,), [[]]),
    )
    server.handle(Delivery("worker:0", pull, id=1, incarnation=7))  # waits for the push
    server.handle(Delivery("worker:0", push, [memoryview(bytearray(buffers[0]))], 2, 7))
    server.handle(Delivery("worker:0", msgspec.structs.replace(push, clock=1), buffers, 3, 7))
    assert van.events == ["step", "Pulled", "Accepted", "Accepted", "step"]
    assert [value.tolist() for value in van.values] == [[-1.0, -1.0]]
