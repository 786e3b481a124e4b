"""Sparse tables: rows by id, as a worker uses them. Each batch uses only a few rows."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from braid.errors import ConfigError
from braid.ps.consistency import Consistency
from braid.ps.messages import Pull, Pulled, Specs
from braid.ps.storage import (
    Admission,
    Eviction,
    GivenRows,
    Init,
    Normal,
    Rule,
    SparseStorage,
    Storage,
    shard_of,
)
from braid.ps.table import Table, TableSpec
from braid.runtime.message import Delivery
from braid.runtime.tensor_buffers import as_buffers, bytes_of, from_buffers

if TYPE_CHECKING:
    from braid.ps.customer import Customer

__all__ = ["Rows", "SparseTable", "sparse_spec"]

MAX_SPARSE_SHARDS = 64  # so that all their states fit into the buffers of one message


class Rows(NamedTuple):
    """Rows of a sparse table that a worker is pulling.

    Attributes:
        timestamp: Timestamp of the request.
        ids: Distinct ids, ascending.
        rows: Rows of the distinct ids, valid once the request is answered.
        inverse: Index of each requested id in `ids`.
        shape: Shape of the requested ids.
    """

    timestamp: int
    ids: torch.Tensor
    rows: torch.Tensor
    inverse: torch.Tensor
    shape: torch.Size


class SparseTable(Table):
    """A sparse table, as a worker uses it; see `Table` for clocks and consistency.

    An id is any int64. A row that was never pushed has initial values that depend only on the
    seed, the table's name and the id.

    Args:
        customer: Customer of this worker; None on servers and the scheduler.
        spec: Spec of the table.
        dim: Number of elements of a row.
        dtype: Dtype of rows and gradients.
    """

    def __init__(
        self, customer: Customer | None, spec: TableSpec, dim: int, dtype: torch.dtype
    ) -> None:
        super().__init__(customer, spec)
        self.dim = dim
        self.dtype = dtype

    def pull(self, ids: torch.Tensor, *, timeout_s: float | None = None) -> torch.Tensor:
        """Return the rows of `ids`; wait until they are as new as the consistency requires.

        Shape:
            ids: [...], int64, any values, may repeat. Result: [..., dim].

        Cost: each distinct id and its row are sent once.

        Raises:
            ConfigError: Ids are not int64.
            CommError: A server refuses.
            PeerLostError: A server was lost with all copies of a shard.
            CommTimeout: No answer came.
        """
        self._customer.postoffice.ensure_joined(timeout_s)
        pulled = self.pull_async(ids)
        self.wait(pulled.timestamp, timeout_s)
        return pulled.rows[pulled.inverse].view(*pulled.shape, self.dim)

    def pull_async(self, ids: torch.Tensor, *, ahead: int = 0, priority: int = 0) -> Rows:
        """Begin to pull the rows of `ids`.

        Args:
            ids: Ids of the rows.
            ahead: Number of clocks after the current one for which the rows are pulled.
            priority: Urgency of the request.

        Raises:
            ConfigError: Ids are not int64.
        """
        self._check_ids(ids)
        distinct, inverse = torch.unique(ids.detach().reshape(-1), return_inverse=True)
        order, ends = self._by_shard(distinct)
        rows = torch.empty(len(distinct), self.dim, dtype=self.dtype)
        clock = self.clock + ahead

        def build(parts: tuple[int, ...]) -> tuple[Pull, Sequence[memoryview]]:
            shard_ids = [distinct[order[_part(ends, part)]] for part in parts]
            specs, buffers = as_buffers(shard_ids)
            return Pull(self.epoch, self.name, clock, parts, [[s] for s in specs]), buffers

        def on_answer(delivery: Delivery, parts: tuple[int, ...]) -> None:
            message = delivery.message
            assert isinstance(message, Pulled), "a pull is answered with values"
            flat = [spec for specs in message.specs for spec in specs]
            for part, values in zip(
                message.parts, from_buffers(flat, delivery.buffers), strict=True
            ):
                if part in parts:
                    rows[order[_part(ends, part)]] = values

        asked = [part for part in range(self.num_shards) if ends[part] < ends[part + 1]]
        timestamp = self._request(build, on_answer, parts=asked, priority=priority)
        return Rows(timestamp, distinct, rows, inverse, ids.shape)

    def push(
        self,
        ids: torch.Tensor,
        grads: torch.Tensor,
        *,
        priority: int = 0,
        lr: float | None = None,
    ) -> int:
        """Push gradients of rows for this worker's clock, and begin the next clock.

        Gradients of the same id are summed first. Both tensors may be changed afterwards.

        Shape:
            ids: [...], int64. grads: [..., dim].

        Returns:
            The timestamp of the request.

        Raises:
            ConfigError: Shapes or dtypes do not fit.
            CommError: A server refuses an earlier push.
        """
        self._check_ids(ids)
        if grads.shape != (*ids.shape, self.dim) or grads.dtype != self.dtype:
            msg = (
                f"table {self.name!r} needs {self.dtype} gradients of shape "
                f"{[*ids.shape, self.dim]} for these ids, got {grads.dtype} of shape "
                f"{list(grads.shape)}"
            )
            raise ConfigError(msg)
        distinct, inverse = torch.unique(ids.detach().reshape(-1), return_inverse=True)
        sums = torch.zeros(len(distinct), self.dim, dtype=self.dtype)
        sums.index_add_(0, inverse, grads.detach().reshape(-1, self.dim))
        order, ends = self._by_shard(distinct)
        distinct, sums = distinct[order], sums[order]

        def build(parts: tuple[int, ...]) -> tuple[Specs, Sequence[memoryview]]:
            rows = [x[_part(ends, part)] for part in parts for x in (distinct, sums)]
            specs, buffers = as_buffers(rows)
            return [specs[k : k + 2] for k in range(0, len(specs), 2)], buffers

        return self._push(build, priority, lr)

    def _by_shard(self, ids: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """Return a permutation that sorts ids by shard, and the index where each shard begins."""
        shards = shard_of(ids, self.num_shards)
        order = torch.argsort(shards, stable=True)
        counts = torch.bincount(shards, minlength=self.num_shards)
        return order, [0, *counts.cumsum(0).tolist()]

    def _check_ids(self, ids: torch.Tensor) -> None:
        if ids.dtype != torch.int64:
            msg = f"table {self.name!r} needs int64 ids, got {ids.dtype}: use ids.long()"
            raise ConfigError(msg)


def _part(ends: list[int], part: int) -> slice:
    return slice(ends[part], ends[part + 1])


def sparse_spec(
    name: str,
    dim: int,
    rule: Rule,
    consistency: Consistency,
    *,
    init: Init | torch.Tensor | None,
    seed: int,
    num_shards: int,
    admit: Admission | None,
    evict: Eviction | None,
    dtype: torch.dtype,
    has_first: bool,
) -> TableSpec:
    """Return the spec of a sparse table; its arguments are explained at `Node.sparse`.

    `has_first` adds a checksum of the rows in `init`, which nodes compare.

    Raises:
        ConfigError: See `Node.sparse`.
    """
    if not 1 <= num_shards <= MAX_SPARSE_SHARDS:
        msg = (
            f"table {name!r} needs at least one shard, and at most {MAX_SPARSE_SHARDS}, got "
            f"num_shards {num_shards}"
        )
        raise ConfigError(msg)
    first = 0
    if isinstance(init, torch.Tensor):
        init = GivenRows(init.detach().cpu().contiguous())
        first = zlib.crc32(bytes_of(init.rows.view(-1))) if has_first else 0
    begin = Normal(std=0.01) if init is None else init

    def make(shard: int) -> Storage:
        del shard
        return SparseStorage(
            dim, begin, rule, seed=seed, table=name, admit=admit, evict=evict, dtype=dtype
        )

    make(0)  # checks the arguments on all nodes
    return TableSpec(
        name=name,
        num_shards=num_shards,
        consistency=consistency,
        make_storage=make,
        form=f"rows of {dim} {dtype}, {consistency}, seed {seed}, {num_shards} shards",
        first=first,
    )
