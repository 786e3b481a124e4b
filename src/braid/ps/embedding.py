"""`ps.Embedding`: an embedding with its rows on servers.

    table = node.sparse("words", 64, ps.Adagrad(lr=0.1))
    words = ps.Embedding(table)
    loss = criterion(head(words(ids)), labels)       # pulls the rows of ids
    loss.backward()
    words.step()                                     # pushes their gradients: one clock
    words.prefetch(next_ids)                         # pulls while the program does something else

Rows and gradients are sent once per distinct id, so the cost of a step depends on the ids of a
batch, not on the size of the table.

Source: M. Li et al., Parameter Server, OSDI 2014; Y. Jiang et al., XDL, 2019.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from braid.ps.sparse import Rows, SparseTable

__all__ = ["Embedding"]


class Embedding(nn.Module):
    """Rows of a sparse table, as a replacement for `torch.nn.Embedding`.

    Args:
        table: The table; several modules may share it if only one of them calls `step`.

    Shape:
        ids: [...], int64. Result: [..., dim].
    """

    def __init__(self, table: SparseTable) -> None:
        super().__init__()
        self.table = table
        self._used: list[tuple[torch.Tensor, torch.Tensor]] = []  # distinct ids, leaf of rows
        self._ahead: tuple[torch.Tensor, Rows] | None = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of `ids`; `step` later pushes their gradients."""
        pulled = self._take(ids)
        self.table.wait(pulled.timestamp)
        rows = pulled.rows.to(ids.device)
        if torch.is_grad_enabled():
            rows.requires_grad_()
            self._used.append((pulled.ids, rows))
        return functional.embedding(pulled.inverse.view(ids.shape).to(ids.device), rows)

    def prefetch(self, ids: torch.Tensor) -> None:
        """Begin to pull the rows of the next `forward`.

        If `step` has not followed the last `forward` yet, the pull is for the next clock: it
        completes only after `step`.
        """
        ahead = int(bool(self._used))
        self._ahead = ids.detach().clone(), self.table.pull_async(ids.cpu(), ahead=ahead)

    def step(self) -> int:
        """Push the gradients of all rows since the last step, and begin the next clock.

        All workers call it the same number of times, even a worker that has not used any row.

        Returns:
            The timestamp of the push; `table.wait(timestamp)` waits until it is accepted.
        """
        ids = [distinct for distinct, rows in self._used if rows.grad is not None]
        grads = [rows.grad.cpu() for _, rows in self._used if rows.grad is not None]
        self._used.clear()
        table = self.table
        none = torch.empty(0, table.dim, dtype=table.dtype)
        return table.push(torch.cat([*ids, none[:, 0].long()]), torch.cat([*grads, none]))

    def extra_repr(self) -> str:
        """Return the representation of the table, which `repr` of the module includes."""
        return f"{self.table.name!r}, dim={self.table.dim}"

    def _take(self, ids: torch.Tensor) -> Rows:
        """Return the rows that were prefetched for these ids, or begin to pull them."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and torch.equal(ahead[0], ids):
            return ahead[1]
        return self.table.pull_async(ids.cpu())
