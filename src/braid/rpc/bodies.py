"""Packed values as the body of a message: plain bytes, and tensors as buffers beside them.

A sparse tensor is two dense ones, its indices and values. A tensor on a GPU is copied to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from braid.errors import CommError
from braid.rpc.messages import Body
from braid.rpc.protocol.autograd_state import SparseSpec
from braid.runtime.tensor_buffers import as_buffers, from_buffers
from braid.runtime.torch_internals import sparse_indices, sparse_values

__all__ = ["Packed", "tensors_of"]


class Packed(msgspec.Struct, frozen=True, eq=False):
    """Values as bytes and tensors that can be sent to another node.

    Attributes:
        data: Plain bytes.
        tensors: Tensors, sent as separate buffers.
        shared: Remote references in the values, as plain data.
    """

    data: bytes
    tensors: list[torch.Tensor]
    shared: Sequence[Any] = ()

    def as_body(self) -> tuple[Body, list[memoryview]]:
        """Return the message and its buffers; tensors on GPUs are copied to the host once."""
        dense: list[torch.Tensor] = []
        sparse: list[SparseSpec] = []
        for tensor in self.tensors:
            if tensor.layout is torch.sparse_coo:
                shape = tuple(tensor.shape)
                spec = SparseSpec(len(dense), shape, tensor.is_coalesced(), tensor.requires_grad)
                sparse.append(spec)
                dense.extend((sparse_indices(tensor), sparse_values(tensor).detach()))
            else:
                dense.append(tensor)
        specs, buffers = as_buffers(dense)
        return Body(self.data, specs, sparse), buffers


def tensors_of(body: Body, buffers: Sequence[memoryview]) -> list[torch.Tensor]:
    """Return the tensors of a message, with `requires_grad` as at the sender.

    Raises:
        CommError: The buffers do not match the tensors' specs.
    """
    tensors = from_buffers(body.specs, buffers)
    for spec, tensor in zip(body.specs, tensors, strict=True):
        if spec.requires_grad:
            tensor.requires_grad_()
    for place, shape, is_coalesced, requires_grad in reversed(body.sparse):
        try:
            sparse = torch.sparse_coo_tensor(
                tensors[place],
                tensors[place + 1],
                shape,
                is_coalesced=is_coalesced,
                check_invariants=True,  # a peer may send any indices
            )
        except (IndexError, RuntimeError, TypeError, ValueError) as exc:
            msg = f"another node sent an invalid sparse tensor of shape {shape}: {exc}"
            raise CommError(msg) from exc
        tensors[place : place + 2] = [sparse.requires_grad_(requires_grad)]
    return tensors
