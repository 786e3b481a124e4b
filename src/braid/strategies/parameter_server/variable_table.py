"""The table of some variables: their pieces in the order of servers, and copies of them here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from braid.ps import Consistency, Node
from braid.ps.snapshots import read_table
from braid.ps.storage import State, join_shards, split_state

__all__ = ["VariablePiece", "VariableTable"]


class VariablePiece(NamedTuple):
    """Rows of a parameter that one server stores.

    Attributes:
        name: Name of the parameter.
        param: The parameter.
        begin: Index of the first element in the flat parameter.
        end: Index of the last element + 1.
    """

    name: str
    param: torch.Tensor
    begin: int
    end: int

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Return the elements of this piece from a tensor of the parameter's shape."""
        return values.detach().reshape(-1)[self.begin : self.end]


class VariableTable:
    """Parameter-server table for the parameters of one optimizer group, or of no optimizer.

    Attributes:
        table: Dense table with all pieces in one flat vector.
        pieces: Pieces of parameters, in the order of the table.
        params: Parameters by name.
        group: Parameter group of the optimizer, with the current learning rate; None if servers do
            not step.
    """

    def __init__(
        self,
        node: Node,
        name: str,
        pieces: Sequence[list[VariablePiece]],
        make: Callable[..., torch.optim.Optimizer] | None,
        group: Mapping[str, Any] | None,
        *,
        consistency: Consistency,
        restore: Path | None,
    ) -> None:
        self.pieces = [piece for on_server in pieces for piece in on_server]
        self.params = {piece.name: piece.param for piece in self.pieces}
        self.group = group
        self._sizes = sizes = [piece.end - piece.begin for piece in self.pieces]
        self._flat = torch.cat([piece.of(piece.param).cpu() for piece in self.pieces])
        self._parts = list(torch.split(self._flat, sizes))
        lengths = [sum(piece.end - piece.begin for piece in on_server) for on_server in pieces]
        self.table = node.dense(
            name,
            self._flat,
            make,
            consistency,
            sizes=sizes if make is not None else (),
            lengths=lengths,
            place=0,
            state=self._restored(restore) if restore is not None and node.is_server else None,
        )

    def export(self) -> dict[str, State]:
        """Return values and optimizer state of each parameter, joined from all of its shards."""
        parts = split_state(self.table.export(), len(self.pieces), self._sizes)
        by_name: dict[str, list[tuple[int, State]]] = {}
        for piece, part in zip(self.pieces, parts, strict=True):
            by_name.setdefault(piece.name, []).append((piece.begin, part))
        states = {
            name: join_shards([part for _, part in sorted(numbered, key=itemgetter(0))])
            for name, numbered in by_name.items()
        }
        if self.group is None:  # buffers are never pushed: the worker's values are newer
            for name, param in self.params.items():
                states[name]["values"] = param.detach().cpu().reshape(-1).clone()
        return states

    def _restored(self, directory: Path) -> State:
        """Return the state of the table from a snapshot of parameters."""
        parts: dict[tuple[str, int], State] = {}
        for name in dict.fromkeys(piece.name for piece in self.pieces):
            pieces = [piece for piece in self.pieces if piece.name == name]
            pieces.sort(key=lambda piece: piece.begin)
            sizes = [piece.end - piece.begin for piece in pieces]
            states = read_table(directory, name, len(pieces), sizes)
            parts |= {(name, p.begin): state for p, state in zip(pieces, states, strict=True)}
        return join_shards([parts[piece.name, piece.begin] for piece in self.pieces])

    def pull(self) -> int:
        """Begin to receive the values; return the timestamp."""
        return self.table.pull_async(self._flat)

    @torch.no_grad()
    def arrive(self, timestamp: int) -> None:
        """Wait for the values, and copy them into the parameters."""
        self.table.wait(timestamp)
        for piece, part in zip(self.pieces, self._parts, strict=True):
            flat = piece.param.detach()
            if flat.is_contiguous():
                flat.view(-1)[piece.begin : piece.end].copy_(part)
            else:  # `piece.of` would be a copy
                whole = flat.contiguous().view(-1)
                whole[piece.begin : piece.end].copy_(part)
                flat.copy_(whole.view(flat.shape))

    @torch.no_grad()
    def push(self) -> int:
        """Push the gradients; return the timestamp."""
        assert self.group is not None, "only parameters with an optimizer have gradients"
        grads, has = [], []
        for piece, part in zip(self.pieces, self._parts, strict=True):
            grad = piece.param.grad
            if grad is not None and grad.layout is not torch.strided:
                grad = grad.to_dense()
            has.append(grad is not None)
            grads.append(torch.zeros_like(part) if grad is None else piece.of(grad).cpu())
        pushed = torch.cat(grads).to(self._flat.dtype)
        return self.table.push_async(pushed, has=has, lr=float(self.group["lr"]))
