"""Embeddings with rows that stay on servers: `nn.Embedding(..., sparse=True)` made in a scope.

    forward(ids)      pulls the rows of the distinct ids
    optimizer.step    pushes the gradients of the rows that were used

So a look-up never joins the shards, and costs by the ids of the batch, not by the size of the
embedding. Servers have rows by the hash of their number.

Source: TensorFlow 2.21, `ShardedVariable` and its `embedding_lookup`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from braid.errors import ConfigError
from braid.ps import SGD, Adagrad, Consistency, Node
from braid.ps.storage import Rule, State

__all__ = ["EmbeddingRows"]

CHUNK = 1 << 16  # rows that are pulled at a time where all are wanted


class EmbeddingRows:
    """The rows of an embedding, on servers.

    Args:
        node: Node of this process.
        name: Name of the weight.
        modules: The embeddings that use the weight.
        optimizer: Optimizer of the weight.
        group: Parameter group of the optimizer, with the current learning rate.
        consistency: When pushes are applied, and pulls answered.
        restore: Snapshot to begin with.

    Raises:
        ConfigError: The optimizer changes rows without a gradient, or counts steps of the whole
            table.
    """

    def __init__(
        self,
        node: Node,
        name: str,
        modules: Sequence[nn.Embedding],
        optimizer: torch.optim.Optimizer,
        group: Mapping[str, Any],
        *,
        consistency: Consistency,
        restore: Path | None,
    ) -> None:
        module = modules[0]
        self.name, self.param, self.group = name, module.weight, group
        rule = _rule(name, optimizer, group)
        self.table = node.sparse(
            name,
            module.embedding_dim,
            rule,
            consistency,
            init=module.weight,
            dtype=module.weight.dtype,
            restore=restore,
        )
        for module in modules if node.is_worker else ():
            module.register_forward_pre_hook(_FetchRows(self), with_kwargs=True)

    @torch.no_grad()
    def pull_all(self) -> None:
        """Copy all rows into the weight."""
        for begin in range(0, len(self.param), CHUNK):
            ids = torch.arange(begin, min(begin + CHUNK, len(self.param)))
            self.param[ids] = self.table.pull(ids).to(self.param.device)

    def push(self) -> int:
        """Push the gradients of the rows that were used; return the timestamp."""
        grad = self.param.grad
        if grad is None:
            none = torch.empty(0, self.table.dim, dtype=self.table.dtype)
            return self.table.push(none[:, 0].long(), none)
        if grad.layout is not torch.sparse_coo:
            msg = (
                f"the gradient of {self.name} is dense, but should be sparse: use the weight in "
                "its nn.Embedding only, or pass sparse=False to it"
            )
            raise ConfigError(msg)
        grad = grad.coalesce()
        ids, rows = grad.indices()[0].cpu(), grad.values().cpu()
        return self.table.push(ids, rows, lr=float(self.group["lr"]))

    def whole(self, state: State) -> torch.Tensor:
        """Return the whole weight, with its rows taken from an exported state."""
        weight = self.param.detach().cpu().clone()
        weight[state["ids"]] = state["values"]
        return weight

    @torch.no_grad()
    def fetch(self, ids: torch.Tensor) -> None:
        """Pull the rows of a batch into the weight."""
        ids = torch.unique(ids.detach()).cpu()
        self.param[ids.to(self.param.device)] = self.table.pull(ids).to(self.param.device)


class _FetchRows:
    """Pulls the rows of a batch before a forward; copies and pickles of a module do nothing."""

    def __init__(self, rows: EmbeddingRows | None = None) -> None:
        self._rows = rows

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        del module
        if self._rows is not None:
            self._rows.fetch(args[0] if args else kwargs["input"])

    def __reduce__(self) -> tuple[Any, ...]:
        return _FetchRows, ()


def _rule(name: str, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Rule:
    """Return the server-side update rule for rows that matches the optimizer."""
    lr = float(group["lr"])
    is_plain = not any(group.get(key) for key in ("momentum", "weight_decay", "maximize"))
    if type(optimizer) is torch.optim.SGD and is_plain:
        return SGD(lr=lr)
    if type(optimizer) is torch.optim.Adagrad and is_plain and not group["lr_decay"]:
        return Adagrad(
            lr=lr,
            eps=group["eps"],
            initial_accumulator_value=group["initial_accumulator_value"],
        )
    msg = (
        f"{name} is a sparse embedding, which needs SGD without momentum or Adagrad without "
        f"weight decay: use one of them, or pass sparse=False; got {type(optimizer).__name__} "
        f"with {dict(group) | {'params': '...'}}"
    )
    raise ConfigError(msg)
