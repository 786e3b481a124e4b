"""A matrix as the product of two thin ones: (rows + columns) * rank numbers.

Problem: formats that encode each number need at least one bit per number, and must be decoded and
encoded again to be summed at every hop. The gradient of a weight matrix is often close to a matrix
of low rank, and this approximation is linear: the sum of products with the same factor is the
product with the sum.

Idea (PowerSGD): one step of power iteration instead of a singular value decomposition. It starts
from the `q` of the last call (warm start), so that over the steps of training it approaches the
full iteration. M is this rank's matrix:

    stage 1   P = M Q                   rows x rank      <- all-reduce (average) over the ranks
    stage 2   P = orthogonal(P)
              Q = M^T P                 columns x rank   <- all-reduce (average) over the ranks
    finish    M' = P Q^T                the average of all M, projected onto P; Q is the next start

It takes *two* all-reduces with computation between them, and is therefore not a `WireFormat`. It
has two stages and an end:

    p = low_rank.compress(matrix)
    group.all_reduce(p, op="avg")
    q = low_rank.project(matrix, p)
    group.all_reduce(q, op="avg")
    low_rank.finish(p, q, out=matrix)

The residual is M - M' on each rank. Keep it with `ErrorFeedback` (`correct` before, `mark_sent`
after); otherwise the part of M orthogonal to P is lost.

Source: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
Distributed Optimization" (2019), algorithm 1; we orthogonalise with Householder reflections (QR)
instead of Gram-Schmidt, which leaves a column of zeros if a matrix has a lower rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from braid.errors import ConfigError

__all__ = ["LowRank"]


class LowRank:
    """Low-rank compressor of one matrix of fixed shape, used at every step of training.

    All ranks must begin with equal generators and make the same calls. Then the factor `q`, which
    is kept between calls, is equal on all of them. A sequence of calls without `finish` changes
    nothing. NaN or infinity in any rank's matrix results in NaN on all ranks.

    Args:
        rows: Number of rows of the matrix.
        columns: Number of columns of the matrix.
        rank: Rank of the approximation, 1 to min(rows, columns).
        generator: Source of the first `q`, on its device; equal on all ranks.

    Cost:
        Two all-reduces of `4 * rank * rows` and `4 * rank * columns` bytes; `6 * rank * rows *
        columns` operations.

    Raises:
        ConfigError: `rank` is out of range.
    """

    def __init__(self, rows: int, columns: int, rank: int, *, generator: torch.Generator) -> None:
        if not 1 <= rank <= min(rows, columns):
            msg = (
                f"a matrix of {rows} x {columns} can have a rank from 1 to {min(rows, columns)}, "
                f"not {rank}: send small matrices and vectors as they are"
            )
            raise ConfigError(msg)
        self.rows, self.columns, self.rank = rows, columns, rank
        self._q = torch.randn(columns, rank, generator=generator, device=generator.device)

    def __repr__(self) -> str:
        return f"LowRank({self.rows}, {self.columns}, {self.rank})"

    def nbytes(self) -> int:
        """Return the bytes of both factors together."""
        return 4 * self.rank * (self.rows + self.columns)

    def compress(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the factor to average over the ranks in stage 1.

        Args:
            matrix: This rank's matrix; float32.

        Shape:
            matrix: [rows, columns]. Result: [rows, rank].

        Raises:
            ConfigError: The matrix has another shape, dtype or device.
        """
        self._check("matrix", matrix, self.rows, self.columns)
        return matrix.detach() @ self._q

    def project(self, matrix: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        """Return the factor to average in stage 2; orthonormalise the columns of `p` in place.

        Args:
            matrix: Matrix that was passed to `compress`.
            p: Result of `compress`, averaged.

        Shape:
            matrix: [rows, columns]; p: [rows, rank]. Result: [columns, rank].

        Raises:
            ConfigError: A matrix has another shape, dtype or device.
        """
        self._check("matrix", matrix, self.rows, self.columns)
        self._check("p", p, self.rows, self.rank)
        p.copy_(torch.linalg.qr(p).Q)
        return (p.T @ matrix.detach()).T.contiguous()  # M^T P takes 20 times as long on a CPU

    def finish(self, p: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> None:
        """Write the approximation of the average into `out`, and keep `q` for the next call.

        Args:
            p: Orthonormal factor from `project`.
            q: Result of `project`, averaged.
            out: float32; may be the matrix itself.

        Shape:
            p: [rows, rank]; q: [columns, rank]; out: [rows, columns].

        Raises:
            ConfigError: A matrix has another shape, dtype or device.
        """
        self._check("p", p, self.rows, self.rank)
        self._check("q", q, self.columns, self.rank)
        self._check("out", out, self.rows, self.columns)
        torch.mm(p, q.T, out=out.detach())
        if bool(q.isfinite().all()):  # else every later call would be NaN as well
            self._q.copy_(q)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return a copy of the warm start (the `q` of the last call), for checkpoints."""
        return {"q": self._q.clone()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore a warm start (the `q` of the last call) from `state_dict`.

        Raises:
            ConfigError: The warm start is missing, or has another shape or dtype.
        """
        q = state.get("q")
        if q is None:
            msg = f"the state of {self} must contain 'q', but this one holds {sorted(state)}"
            raise ConfigError(msg)
        self._check("q", q.to(self._q.device), self.columns, self.rank)
        self._q.copy_(q)

    def _check(self, name: str, x: torch.Tensor, rows: int, columns: int) -> None:
        if x.shape != (rows, columns) or x.dtype != torch.float32 or x.device != self._q.device:
            msg = (
                f"{self} needs {name} of torch.float32 and shape {(rows, columns)} on "
                f"{self._q.device}, got {x.dtype} of shape {tuple(x.shape)} on {x.device}"
            )
            raise ConfigError(msg)
