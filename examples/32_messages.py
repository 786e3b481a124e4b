"""Messages over a van: priorities, chunks, reused receive buffers, shared memory.

braid run -n 2 examples/32_messages.py
"""

from __future__ import annotations

import os

import msgspec
import torch

import braid
from braid.runtime.message import Schema, SocketVan, VanConfig
from braid.runtime.tensor_buffers import as_buffers, from_buffers
from braid.runtime.wire import Secret
from braid.types import TensorSpec

NUMEL, TIMES = 8 << 20, 5  # 32 MiB


class Values(msgspec.Struct, tag="values", frozen=True):
    """Describes tensors that are sent along with the message."""

    specs: list[TensorSpec]
    number: int


class Note(msgspec.Struct, tag="note", frozen=True):
    """A short text."""

    text: str


SCHEMA = Schema(Values, Note)


def values(seed: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def send(van: SocketVan) -> None:
    for number in range(TIMES):
        specs, buffers = as_buffers([values(number)])
        sending = van.send("server:0", Values(specs, number), buffers=buffers)
        if number < TIMES - 1:
            sending.wait()
    van.send("server:0", Note("patient"))
    van.send("server:0", Note("urgent"), priority=15)
    sending.wait()


def receive(van: SocketVan) -> tuple[list[str], set[int]]:
    """Return the messages in the order of arrival, and the addresses of the received tensors."""
    names: list[str] = []
    places: set[int] = set()
    while len(names) < TIMES + 2:
        delivery = van.recv()
        message = delivery.message
        if isinstance(message, Note):
            names.append(message.text)
            continue
        (tensor,) = from_buffers(message.specs, delivery.buffers)
        assert torch.equal(tensor, values(message.number))
        names.append(f"values {message.number}")
        places.add(tensor.data_ptr())
        del tensor, delivery  # frees this memory for the next message
    return names, places


def main() -> None:
    group = braid.init()
    secret = Secret(group.objects.broadcast(os.urandom(32)))
    node, listen = ("server:0", "tcp://127.0.0.1:0") if group.rank == 0 else ("worker:0", "")
    for shared in (True, False):
        config = VanConfig(shared_memory=shared)
        with SocketVan(
            node, SCHEMA, secret=secret, run_id="page", listen=listen, config=config
        ) as van:
            address = group.objects.broadcast(van.address)
            if group.rank:
                van.connect("server:0", address)
                send(van)
            else:
                names, places = receive(van)
                print(f"shared memory {shared}, {len(places)} blocks: {', '.join(names)}")
            group.barrier()
    if group.rank == 0:
        print("all received values equal the sent ones bit by bit")


if __name__ == "__main__":
    main()
