"""A dense table: a tensor whose elements lie on all servers, in equal ranges."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from braid.errors import ConfigError
from braid.message.tensors import as_buffers, from_buffers
from braid.ps.messages import Pull, Pulled, Push

if TYPE_CHECKING:
    from braid.ps.node import Node

__all__ = ["DenseTable", "part_of"]


def part_of(numel: int, server: int, num_servers: int) -> slice:
    """Return the elements that a server has; ranges differ by one element at most."""
    begin, end = (k * numel // num_servers for k in (server, server + 1))
    return slice(begin, end)


class DenseTable:
    """A worker's face of a dense table.

    Args:
        node: Node of this rank.
        name: Name of the table.
        like: Tensor with its shape and dtype.

    Attributes:
        clock: Number of pushes so far.
    """

    def __init__(self, node: Node, name: str, like: torch.Tensor) -> None:
        self._node = node
        self.name = name
        self.clock = 0
        self._shape, self._dtype = like.shape, like.dtype
        self._whole = torch.empty(like.numel(), dtype=like.dtype)

    def pull(self, *, timeout_s: float | None = None) -> torch.Tensor:
        """Return the values; wait until they are as new as the consistency says.

        Returns:
            A tensor of the table's shape, whose memory the next pull uses again.

        Raises:
            CommError: A server refuses.
            PeerLostError: A server was lost.
            CommTimeout: No answer came.
        """
        answers = self._node.ask_all(
            lambda _: (Pull(self.name, self.clock), ()), timeout_s=timeout_s
        )
        for server, answer in enumerate(answers):
            assert isinstance(answer.message, Pulled), "a pull is answered with values"
            (part,) = from_buffers([answer.message.spec], answer.buffers)
            self._whole[part_of(len(self._whole), server, len(answers))] = part
        return self._whole.view(self._shape)

    def push(self, grad: torch.Tensor, *, timeout_s: float | None = None) -> None:
        """Push a gradient for this worker's clock, and begin the next clock.

        Raises:
            ConfigError: It has another shape or dtype than the table.
            CommError: A server refuses.
            PeerLostError: A server was lost.
        """
        if grad.shape != self._shape or grad.dtype != self._dtype:
            msg = (
                f"table {self.name!r} has {self._dtype}{list(self._shape)}, got a gradient of "
                f"{grad.dtype}{list(grad.shape)}"
            )
            raise ConfigError(msg)
        flat = grad.detach().contiguous().view(-1)

        def part(server: int) -> tuple[Push, list[memoryview]]:
            own = flat[part_of(len(flat), server, self._node.num_servers)]
            (spec,), buffers = as_buffers([own])
            return Push(self.name, self.clock, spec), buffers

        self._node.ask_all(part, timeout_s=timeout_s)
        self.clock += 1
