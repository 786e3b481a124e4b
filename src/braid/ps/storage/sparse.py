"""Storage of sparse shards: rows by id, created by their first push.

Problem: embedding tables have more possible ids than memory, and a batch uses only few of them.
Python objects for ids or rows would cost 10 to 50 times as much as the arithmetic on them.

Idea: rows are stored in growing tensors, with a hash index that looks up whole batches. An update
gathers its rows, steps them with the table's rule, and scatters them, a chunk at a time. A missing
row has its initial values, which are computed from its id; reading never creates a row.

    push (ids, grads) ─┐ merge: ids distinct and ascending, gradients added in the order of pushes
    push (ids, grads) ─┴──> (ids, grads) ── find, create ── gather ── step ── scatter

Rare or stale rows can be excluded: see `braid.ps.storage.admission` and `eviction`.

Sources: M. Li et al., OSDI 2014; B. Jiang et al., XDL, DLP-KDD 2019 (admission and eviction).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from braid.errors import ConfigError
from braid.ps.storage.admission import Admission, Candidates
from braid.ps.storage.checks import (
    Expected,
    check_floating,
    check_names,
    check_tensors,
    described,
)
from braid.ps.storage.eviction import Eviction, oldest_slots, stale_slots
from braid.ps.storage.initial_rows import Init, initial_rows
from braid.ps.storage.row_table import RowTable, Width
from braid.ps.storage.rules import Rule
from braid.ps.storage.storage import State, Storage, Tensors

__all__ = ["SparseStorage"]

CHUNK_BYTES = 1 << 18  # gradients per chunk: its rows and state stay in a core's cache
COUNTS = ("num_admitted", "num_dropped", "num_evicted")
ADVICE = "Declare the same table on workers and servers"


class SparseStorage(Storage):
    """A shard of a sparse table.

    A push is `(ids, grads)`, a query is `(ids,)`, and a read returns `(rows,)`.

    Args:
        dim: Number of elements of a row.
        init: Distribution of initial rows.
        rule: Optimizer of the rows.
        seed: Seed of initial rows.
        table: Name of the table; initial rows depend on it.
        admit: Condition on which an id gets a row; its first update creates the row when None.
        evict: Condition on which rows are removed; never when None.
        dtype: Dtype of rows and gradients; half precision is stepped in float32.

    Shape:
        ids: [n], int64, any values, may repeat; grads and rows: [n, dim].

    Raises:
        ConfigError: `dim` is not positive, or the dtype is not a floating one.
    """

    def __init__(
        self,
        dim: int,
        init: Init,
        rule: Rule,
        *,
        seed: int,
        table: str,
        admit: Admission | None = None,
        evict: Eviction | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        check_floating(table, dtype)
        if dim < 1:
            msg = f"table {table!r}: dim, the length of a row, must be at least 1, got {dim}"
            raise ConfigError(msg)
        self.table = table
        self._dim, self._dtype, self._seed = dim, dtype, seed
        self._init, self._rule = init, rule
        self._compute = torch.promote_types(dtype, torch.float32)
        state = {
            f"state.{name}": Width(
                dim if column.per_element else 1,
                torch.int64 if column.counts else self._compute,
                column.fill,
            )
            for name, column in rule.columns.items()
        }
        values, last_update = Width(dim, dtype), Width(1, torch.int64)
        self._rows = RowTable({"values": values, **state, "last_update": last_update})
        self._candidates = Candidates(admit)
        self._evict = evict
        self._updates = 0
        self._counts = dict.fromkeys(COUNTS, 0)
        self._empty = self.export()  # names, dtypes and widths of a state

    def check(self, push: Tensors) -> None:
        """Check the tensors of a push; see `Storage.check`."""
        expected = [
            Expected("ids", torch.int64, (None,)),
            Expected("grads", self._dtype, (None, self._dim)),
        ]
        check_tensors(self.table, "a push", push, expected, ADVICE)
        ids, grads = push
        if len(ids) != len(grads):
            msg = (
                f"table {self.table!r}: a push needs one gradient for each id, got {len(ids)} "
                f"ids and {len(grads)} gradients: pass as many gradients as ids"
            )
            raise ConfigError(msg)

    def check_query(self, query: Tensors) -> None:
        """Check the tensors of a query; see `Storage.check_query`."""
        expected = [Expected("ids", torch.int64, (None,))]
        check_tensors(self.table, "a query", query, expected, ADVICE)

    @torch.no_grad()
    def merge(self, pushes: Sequence[Tensors], scale: float) -> Tensors:
        """Add gradients of the same id in the order of pushes, and scale the sums once.

        A single push with distinct, ascending ids is scaled in place. Tables in half precision are
        summed and scaled in float32, and rounded once.

        Returns:
            Distinct ids, ascending, and their gradients.

        Cost: one sort of the ids and one pass over the gradients; neither for a single push with
        distinct, ascending ids.
        """
        ids, grads = pushes[0]
        if len(pushes) > 1:
            ids, grads = (torch.cat([push[part] for push in pushes]) for part in (0, 1))
        ids, grads = ids.contiguous(), grads.detach().contiguous()
        if not bool((ids[1:] > ids[:-1]).all()):
            ids, places = torch.unique(ids, return_inverse=True)
            # index_add_ adds row by row, in the order of the source, with any number of threads
            sums = grads.new_zeros((len(ids), self._dim), dtype=self._compute)
            grads = sums.index_add_(0, places, grads.to(self._compute))
        return ids, (grads if scale == 1.0 else grads.mul_(scale)).to(self._dtype)

    @torch.no_grad()
    def apply(self, update: Tensors) -> None:
        """Take one step; create rows for admitted ids that have none.

        Cost: about 300 ns per row at dim 32 with Adagrad, on one core.
        """
        ids, grads = update
        self._updates += 1
        slots = self._rows.find(ids)
        new = (slots < 0).nonzero().flatten()
        if len(new):
            slots.index_copy_(0, new, self._admit(ids.index_select(0, new)))
            kept = (slots >= 0).nonzero().flatten()
            if len(kept) < len(slots):
                slots, grads = slots.index_select(0, kept), grads.index_select(0, kept)
        self._step(slots, grads)
        self._remove_unused()

    def _admit(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the slots of new rows, and -1 for ids that are not admitted yet."""
        admitted = self._candidates.admit(ids, self._updates).nonzero().flatten()
        self._counts["num_admitted"] += len(admitted)
        self._counts["num_dropped"] += len(ids) - len(admitted)
        slots = torch.full_like(ids, -1)
        created = self._create(ids.index_select(0, admitted))
        return slots.index_copy_(0, admitted, created)

    def _create(self, ids: torch.Tensor) -> torch.Tensor:
        slots = self._rows.insert(ids)
        self._rows.columns["values"].index_copy_(0, slots, self._initial(ids))
        return slots

    def _initial(self, ids: torch.Tensor) -> torch.Tensor:
        return initial_rows(self._init, self._seed, self.table, ids, self._dim, self._dtype)

    def _step(self, slots: torch.Tensor, grads: torch.Tensor) -> None:
        columns = self._rows.columns
        columns["last_update"].index_fill_(0, slots, self._updates)
        states = {
            name.removeprefix("state."): column
            for name, column in columns.items()
            if name.startswith("state.")
        }
        values = columns["values"]
        size = max(1, CHUNK_BYTES // (self._dim * self._compute.itemsize))
        for begin in range(0, len(slots), size):
            some, part = slots[begin : begin + size], grads[begin : begin + size]
            rows = values.index_select(0, some).to(self._compute)
            state = {name: column.index_select(0, some) for name, column in states.items()}
            self._rule.step(rows, part.to(self._compute), state)
            values.index_copy_(0, some, rows.to(self._dtype))
            for name, column in states.items():
                column.index_copy_(0, some, state[name])

    def _remove_unused(self) -> None:
        if self._evict is None:
            return
        before = self._evict.unused_since(self._updates)
        if before is not None:
            self._remove(stale_slots(self._rows, before))
            self._candidates.forget(before)
        self._remove(oldest_slots(self._rows, self._evict.max_rows))

    def _remove(self, slots: torch.Tensor) -> None:
        if len(slots):
            self._rows.remove(slots)
            self._counts["num_evicted"] += len(slots)

    @torch.no_grad()
    def read(self, query: Tensors) -> Tensors:
        """Return a copy of rows; an id without a row has its initial values.

        Cost: about 70 ns per row at dim 32, on one core; 1 us per missing row.
        """
        (ids,) = query
        ids = ids.contiguous()
        slots = self._rows.find(ids)
        missing = (slots < 0).nonzero().flatten()
        rows = self._rows.columns["values"].index_select(0, slots.clamp_(min=0))
        if len(missing):
            rows.index_copy_(0, missing, self._initial(ids.index_select(0, missing)))
        return (rows,)

    @torch.no_grad()
    def export(self) -> State:
        """Return rows and candidates by ascending ids, and the counts of the shard.

        Returns:
            `ids` [rows]; `values`, `state.*`, `last_update` [rows, width]; `candidate.ids` [m],
            `candidate.count`, `candidate.last_update` [m, 1]; `updates`, `lr` and counts [].
        """
        ids, columns = self._rows.export()
        others, counts = self._candidates.export()
        return {
            "ids": ids,
            **columns,
            "candidate.ids": others,
            **{f"candidate.{name}": column for name, column in counts.items()},
            "updates": torch.tensor(self._updates),
            "lr": torch.tensor(self.lr, dtype=torch.float64),
            **{name: torch.tensor(count) for name, count in self._counts.items()},
        }

    @torch.no_grad()
    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace the whole state by a copy of `state`; see `Storage.load`."""
        self._check_state(state)
        rule = self._rule.with_learning_rate(float(state["lr"]))
        counts = {
            name.removeprefix("candidate."): column
            for name, column in state.items()
            if name.startswith("candidate.")
        }
        self._rows.load(state["ids"], state)
        self._candidates.load(counts.pop("ids"), counts)
        self._updates = int(state["updates"])
        self._counts = {name: int(state[name]) for name in COUNTS}
        self._rule = rule

    def _check_state(self, state: Mapping[str, torch.Tensor]) -> None:
        check_names(self.table, state, list(self._empty))
        rows, others = len(state["ids"]), len(state["candidate.ids"])
        problems = []
        for name, empty in self._empty.items():
            length = others if name.startswith("candidate.") else rows
            shape = (length, *empty.shape[1:]) if empty.dim() else ()
            expected = Expected(name, empty.dtype, shape)
            if expected.differs(state[name]):
                problems.append(f"expected {name} {expected}, got {described(state[name])}")
        if problems:
            msg = (
                f"table {self.table!r}: the state does not match the table: "
                f"{'; '.join(problems)}. {ADVICE}"
            )
            raise ConfigError(msg)

    @property
    def lr(self) -> float:
        """Learning rate; see `Storage.lr`."""
        return self._rule.learning_rate

    def set_lr(self, lr: float) -> None:
        """Change the learning rate; see `Storage.set_lr`."""
        self._rule = self._rule.with_learning_rate(lr)

    def check_lr(self, lr: float) -> None:
        """Check a learning rate; see `Storage.check_lr`."""
        self._rule.with_learning_rate(lr)

    def statistics(self) -> dict[str, int]:
        """Return counts of rows, candidates, bytes and events by name.

        Returns:
            `num_admitted` counts created rows, `num_dropped` counts dropped gradients of ids that
            were not admitted yet, and `num_evicted` counts removed rows.
        """
        return {
            "num_updates": self._updates,
            "num_rows": len(self._rows),
            "num_candidates": len(self._candidates),
            "num_bytes": self._rows.num_bytes + self._candidates.num_bytes,
            **self._counts,
        }
