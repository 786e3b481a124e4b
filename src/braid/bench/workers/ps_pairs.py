"""Pairs of keys and values, pushed to and pulled from a handler that does nothing.

Messages of a van with two buffers, keys and values: the bytes of PS-Lite's `KVPairs`.
"""

from __future__ import annotations

import os

import msgspec
import torch

from braid.errors import StaleError
from braid.message import Delivery, Message, Schema, SocketVan, VanConfig
from braid.message.tensors import memory_of
from braid.wire import Secret

__all__ = ["PairClient", "pair_van", "serve_pairs"]

SERVER = "server:0"


class PushPairs(msgspec.Struct, tag="push", frozen=True):
    """Keys and values."""


class PullPairs(msgspec.Struct, tag="pull", frozen=True):
    """Keys whose values are asked for."""


class Done(msgspec.Struct, tag="done", frozen=True):
    """The answer to a push."""


class PulledPairs(msgspec.Struct, tag="pulled", frozen=True):
    """The answer to a pull, with values."""


SCHEMA = Schema(PushPairs, PullPairs, Done, PulledPairs)


def pair_van(node: str, secret: bytes, *, shared_memory: bool, listens: bool) -> SocketVan:
    """Return the van of an end."""
    return SocketVan(
        node,
        SCHEMA,
        secret=Secret(secret),
        run_id="pairs",
        listen=f"unix:@braid-bench-{os.urandom(8).hex()}" if listens else "",
        config=VanConfig(shared_memory=shared_memory),
    )


def serve_pairs(van: SocketVan, num_pairs: int) -> None:
    """Answer pushes and pulls until the client is gone."""
    values = memory_of(torch.zeros(num_pairs))
    while True:
        delivery = van.recv()
        if isinstance(delivery.message, PushPairs):
            van.send(delivery.sender, Done(), answers=delivery.id)
        elif isinstance(delivery.message, PullPairs):
            van.send(delivery.sender, PulledPairs(), buffers=[values], answers=delivery.id)
        else:
            return


class PairClient:
    """The end that pushes and pulls.

    Args:
        van: Van of the client.
        address: Address of the server.
        num_pairs: Number of pairs.
    """

    def __init__(self, van: SocketVan, address: str, num_pairs: int) -> None:
        self._van = van
        self._keys = memory_of(torch.arange(num_pairs))
        self._values = memory_of(torch.ones(num_pairs))
        pulled = memory_of(torch.empty(num_pairs))
        van.connect(SERVER, address)
        van.receive_into(PulledPairs, lambda *_: [pulled])

    def push(self) -> None:
        """Push all pairs, and wait for the answer."""
        self._ask(PushPairs(), [self._keys, self._values])

    def pull(self) -> None:
        """Send all keys, and receive their values into memory that exists."""
        self._ask(PullPairs(), [self._keys])

    def close(self) -> None:
        """Let the server end."""
        self._van.close()

    def _ask(self, message: Message, buffers: list[memoryview]) -> Delivery:
        self._van.send(SERVER, message, buffers=buffers)
        delivery = self._van.recv()
        if not isinstance(delivery.message, Done | PulledPairs):
            msg = f"the server of pairs is gone: {delivery.message}"
            raise StaleError(msg)
        return delivery
