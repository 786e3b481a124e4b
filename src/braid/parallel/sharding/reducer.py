"""Reduce-scatter of the gradients of all units during backward.

A hook on each whole parameter reports its gradient. When all gradients of a flat vector are ready,
its sum is started. Since sums alternate between two slots, all ranks start them in the same order,
the order of units in backward; a vector that is complete too early waits. When backward ends, the
remaining sums are started, with zeros for missing gradients, and all sums are waited for. Then
ranks exchange which gradients they had: parameters that no rank has used keep the gradient None.

    backward   unit 3    | unit 2    | unit 1    | root
    sums        .         3 a         2 b         1 a (after 3)   root, wait, exchange
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch

from braid.comm import Group
from braid.errors import CommError, ConfigError
from braid.parallel.gradients import GradientHooks, ParamRecord
from braid.parallel.gradients.autograd_grad import is_returned
from braid.parallel.gradients.first_batch import FirstBatch
from braid.parallel.gradients.gradient_hooks import GradientListener
from braid.parallel.gradients.step_settings import StepSettings
from braid.parallel.sharding.flat_gradients import STAGE_OF_PARAMETERS, FlatGradients
from braid.parallel.sharding.flat_shard import FlatShard
from braid.runtime.torch_internals import queue_callback

__all__ = ["ShardReducer"]

REMAINING = (
    "gradients of the last step were not dropped, and the next ones were added to them: call "
    "zero_grad() of the optimizer, the model, or the result of shard_optimizer, since at stages 1 "
    "and 2 gradients belong to this rank's pieces, and not to the model's parameters"
)


class ShardReducer(GradientListener):
    """Reducer that sums gradients of flat vectors during backward.

    Args:
        gradients: Gradients of all flat vectors that require them.
        groups: Groups that together contain all ranks that average. Ranks exchange over them which
            gradients each rank has.
        before_end: Called when autograd has computed all gradients of a backward.
        on_end: Called when a backward and its sums have ended.

    Attributes:
        synchronizes: False while gradients stay local and accumulate; read when backward begins.
        is_in_backward: Whether a backward has begun and not ended; True in a forward if the last
            backward raised.
        order: Vectors in the order in which their sums are started.
        first_batch: Checks of the first batch; None without checks, and afterwards.
    """

    def __init__(
        self,
        gradients: Sequence[FlatGradients],
        groups: Sequence[Group],
        before_end: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        self.synchronizes = True
        self.first_batch: FirstBatch | None = None
        self.order = list(gradients)
        self._gradients = list(gradients)
        self._before_end = before_end
        self._on_end = on_end
        leaves = [(g, i) for g in gradients for i in range(len(g.flat.leaves))]
        self._owner = [g for g, _ in leaves]
        self._records = records = [
            ParamRecord(g.flat.records[i].names, g.flat.records[i].spec, g.flat.leaves[i])
            for g, i in leaves
        ]
        self._missing: dict[int, int] = {}
        self._seen: set[int] = set()
        self._groups = list(groups)
        self._settings = StepSettings(p for g in gradients for p in g.flat.owned)
        self._firsts: dict[int, int] = {}
        for number, (leaf_gradients, _) in enumerate(leaves):
            self._firsts.setdefault(id(leaf_gradients), number)
        self._arrivals: list[int] | None = []  # order of complete vectors in the first backward
        context = gradients[0].flat.places.group.context
        self._num_leaves = len(leaves)
        self._own_flag = len(leaves) + context.rank
        # flags: gradients that exist on any rank, and ranks that have abandoned the backward
        length = len(leaves) + context.world_size
        self._has = gradients[0].flat.places.group.empty((length,), torch.uint8).zero_()
        self._requests = [g.persistent("all_reduce", self._has, op="max") for g in groups]
        self.is_in_backward = self._are_shown = False
        self._sums = True
        self._next = 0
        moves = any(g.flat.stage != STAGE_OF_PARAMETERS for g in gradients)
        self._hooks = GradientHooks(records, self, partial_grads=moves)
        self._hooks.attach(range(len(records)))

    def backward_begins(self) -> None:
        """Prepare for the gradients of a backward; no-op during a backward."""
        if self.is_in_backward:
            return
        self.is_in_backward = True
        self._sums = self.synchronizes
        self._next = 0
        self._seen.clear()
        for gradients in self._gradients:
            gradients.is_launched = False
            needed = [leaf for leaf in gradients.flat.leaves if leaf.requires_grad]
            self._missing[id(gradients)] = len(needed)
        queue_callback(self._backward_ended)

    def note_step(self) -> None:
        """Warn if the optimizer has stepped with gradients that it has already used once."""
        remain = [gradients.note_step() for gradients in self._gradients]
        if any(remain):
            warnings.warn(REMAINING, UserWarning, stacklevel=4)

    def later_hooks(self) -> list[str]:
        """Return the parameters with hooks that would run when their gradient has moved."""
        every = enumerate(self._records)
        return [record.name for position, record in every if not self._hooks.are_last(position)]

    def hide_moved(self) -> None:
        """Remove the stand-ins for gradients that belong to pieces."""
        self._are_shown = False
        for gradients in self._gradients:
            gradients.moved.hide()

    def check_step(self) -> None:
        """Raise if the program has set gradients that a step would not use."""
        for gradients in self._gradients:
            if gradients.flat.stage != STAGE_OF_PARAMETERS:
                gradients.moved.check_step()

    def on_partial_grad(self, position: int, _grad: torch.Tensor, /) -> None:
        """Remove stand-ins before the first gradient of a backward accumulates."""
        if self._are_shown and not is_returned(self._records[position].param):
            self.hide_moved()

    def on_gradient(self, position: int, /) -> None:
        """Record that gradient number `position` is ready; start the sums of complete vectors.

        Raises:
            ConfigError: The parameter got a second gradient after its sum was started.
        """
        self.backward_begins()
        gradients = self._owner[position]
        if not self._sums:
            gradients.accumulate(position - self._firsts[id(gradients)])
        if position in self._seen:
            if gradients.is_launched:
                raise ConfigError(_late_text(self._records[position].name))
            return
        self._seen.add(position)
        remaining = self._missing[id(gradients)] = self._missing[id(gradients)] - 1
        if remaining:
            return
        if self._sums:
            if self._arrivals is not None:
                self._arrivals.append(self._gradients.index(gradients))
            self._launch_in_order()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which gradients stay local, and accumulate unsharded."""
        before, self.synchronizes = self.synchronizes, False
        try:
            yield
        finally:
            self.synchronizes = before

    def average(self) -> None:
        """Average the local gradients from backwards inside of `no_sync`; a collective."""
        self.is_in_backward, self._sums, self._next = True, True, 0
        for gradients in self._gradients:
            gradients.is_launched = False
            self._missing[id(gradients)] = 0
        self._end()

    def complete(self, flats: Sequence[FlatShard]) -> None:
        """Expect no further gradients of these vectors in this backward, and start their sums."""
        for gradients in self._gradients:
            if gradients.flat in flats:
                self._missing[id(gradients)] = 0
        if self._sums:
            self._launch_in_order()

    def abandon(self) -> None:
        """End a backward that raised on this rank, and make other ranks raise as well."""
        self.is_in_backward = False
        if self._sums:
            self._has[self._own_flag] = 1
            self._finish_sums()
        self.drop()

    def drop(self) -> None:
        """Drop the local gradients that `no_sync` has accumulated."""
        for gradients in self._gradients:
            gradients.drop()

    def close(self) -> None:
        """Remove the hooks from parameters."""
        self._hooks.close()

    def _launch_in_order(self) -> None:
        while self._next < len(self.order) and not self._missing[id(self.order[self._next])]:
            self._launch(self.order[self._next])
            self._next += 1

    def _launch(self, gradients: FlatGradients) -> None:
        if not gradients.flat.requires_grad:
            return
        for busy in gradients.busy():
            busy.finish()
        first = self._firsts[id(gradients)]
        if self.first_batch is not None:
            self.first_batch.note_gradients(first, gradients.local_gradients())
        has = gradients.has_gradients()  # on this rank
        self._has[first : first + len(has)] = torch.tensor(has, dtype=torch.uint8)
        gradients.launch()

    def _backward_ended(self) -> None:
        self._before_end()
        self._end()

    def _end(self) -> None:
        self.is_in_backward = False
        lost = self._finish_sums() if self._sums else []
        self._on_end()
        if lost:
            msg = (
                f"an exception ended this backward on ranks {lost}, so its gradients are dropped "
                "on all ranks: continue with the next step, or end the rank"
            )
            raise CommError(msg)
        if self._sums:
            self._settings.averaged(self._groups)
            if self.first_batch is not None:
                self.first_batch.report(is_weighted=False)
                self.first_batch = None

    def _finish_sums(self) -> list[int]:
        """Wait for all sums and deliver them; return the ranks that have abandoned the backward."""
        for gradients in self.order[self._next :]:
            self._launch(gradients)
        for gradients in self.order:
            gradients.finish()
        for request in self._requests:
            request.start().wait()
        has = self._has.tolist()
        self._has.zero_()
        lost = [rank for rank, flag in enumerate(has[self._num_leaves :]) if flag]
        self._are_shown = True
        for gradients in self._gradients:
            first = self._firsts[id(gradients)]
            present = has[first : first + len(gradients.flat.leaves)]
            gradients.deliver([False] * len(present) if lost else present)
        if self._arrivals is not None:
            if lost:
                self._arrivals.clear()
            else:
                self._learn_order(self._arrivals)
        return lost

    def _learn_order(self, arrivals: list[int]) -> None:
        """Start later sums in the order of the first backward, if it was the same on all ranks."""
        self._arrivals = None
        numbers = list(range(len(self._gradients)))
        order = arrivals + [n for n in numbers if n not in arrivals]
        same = True
        for group in self._groups:
            mine = torch.tensor([[int(same), *order]], device=self._has.device)
            orders = group.all_gather(mine)
            same = bool((orders == orders[0]).all()) and same
        if same:
            self.order = [self._gradients[n] for n in order]


def _late_text(name: str) -> str:
    return (
        f"{name!r} got another gradient after its sum over ranks was started, as by re-entrant "
        "checkpointing: call checkpoint with use_reentrant=False"
    )
