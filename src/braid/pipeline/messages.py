"""Messages between neighbouring stages on different ranks: values of any shape, and gradients.

Shapes may change from micro-batch to micro-batch, so a value is announced by a digest of its
structure: containers, shapes, dtypes, and which tensors need a gradient. The structure itself
follows only the first time. Gradients need no announcement, since their receiver has the outputs.

    first      digest, structure, tensors          afterwards      digest, tensors

Sends wait for nobody: a tensor belongs to its message until it has gone.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from braid.autograd.nested import flatten, unflatten
from braid.comm import Group, Work
from braid.types import text_digest

__all__ = ["Messages"]

DIGEST_MASK = (1 << 62) - 1


class _Spec(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class _Structure(NamedTuple):
    tree: Any
    specs: tuple[_Spec, ...]


class Messages:
    """Sends and receives values between members of a group, in the order of the program.

    Args:
        group: Ranks of the pipeline.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._sent: set[tuple[int, int]] = set()
        self._structures: dict[tuple[int, int], _Structure] = {}
        self._under_way: list[tuple[Work, torch.Tensor]] = []

    def send_value(self, value: Any, peer: int) -> None:
        """Send an output to the rank of the next stage."""
        tree, tensors = flatten(value)
        specs = tuple(_Spec(tuple(x.shape), x.dtype, x.requires_grad) for x in tensors)
        raw = pickle.dumps(_Structure(tree, specs))
        digest = text_digest(raw.hex()) & DIGEST_MASK
        is_new = (peer, digest) not in self._sent
        self._send(torch.tensor([digest, len(raw) if is_new else 0]), peer)
        if is_new:
            self._sent.add((peer, digest))
            self._send(torch.frombuffer(bytearray(raw), dtype=torch.uint8), peer)
        self.send_tensors(tensors, peer)

    def recv_value(self, peer: int) -> Any:
        """Receive the output of the previous stage."""
        announced = self._group.recv(torch.empty(2, dtype=torch.int64), peer)
        digest, nbytes = announced.tolist()
        if nbytes:
            raw = self._group.recv(torch.empty(nbytes, dtype=torch.uint8), peer)
            # from a rank of the same job, which runs the same program
            self._structures[peer, digest] = pickle.loads(raw.numpy().tobytes())  # noqa: S301
        structure = self._structures[peer, digest]
        tensors = [torch.empty(spec.shape, dtype=spec.dtype) for spec in structure.specs]
        self.recv_tensors(tensors, peer)
        for tensor, spec in zip(tensors, structure.specs, strict=True):
            tensor.requires_grad_(spec.requires_grad)
        return unflatten(structure.tree, tensors)

    def send_tensors(self, tensors: Sequence[torch.Tensor], peer: int) -> None:
        """Send tensors whose shapes the receiver knows."""
        for tensor in tensors:
            self._send(tensor.detach(), peer)

    def recv_tensors(self, tensors: Sequence[torch.Tensor], peer: int) -> None:
        """Receive into tensors."""
        for tensor in tensors:
            self._group.recv(tensor, peer)

    def finish(self) -> None:
        """Wait until all messages have gone."""
        while self._under_way:
            self._under_way.pop()[0].wait()

    def _send(self, tensor: torch.Tensor, peer: int) -> None:
        tensor = tensor.contiguous()
        self._under_way = [pair for pair in self._under_way if not pair[0].done()]
        self._under_way.append((self._group.send(tensor, peer, async_op=True), tensor))
