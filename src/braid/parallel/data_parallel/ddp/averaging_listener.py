"""Actions of DistributedDataParallel around each averaging of gradients.

averaging begins          notify joined ranks that this rank still works
with the status message   send the module's buffers, if they changed in the last step
a bucket is averaged      take the optimizer's step of its parameters (`step_in_backward`)
all buckets are averaged  make buffers equal, compare parameters, report NaN and unusual steps

torch's `_apply_optimizer_in_backward` registers an optimizer and a hook on each parameter. The hook
steps as soon as the parameter has the gradient of this rank alone, and drops the gradient. Like
torch's DistributedDataParallel, this class removes the hooks when training begins, and takes the
steps when the averages of a bucket are complete.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from braid.comm import Group, Work
from braid.errors import ConfigError
from braid.parallel.data_parallel.ddp.join import Join, Joinable
from braid.parallel.data_parallel.ddp.module_buffers import ModuleBuffers
from braid.parallel.data_parallel.ddp.once_warnings import OnceWarnings
from braid.parallel.data_parallel.finite import NonfiniteHandler, handle_nonfinite
from braid.parallel.gradients import (
    AveragingOutcome,
    Bucket,
    ParamRecord,
    ParamTable,
    RankState,
    ReducerListener,
)
from braid.parallel.gradients.first_batch import FirstBatch
from braid.parallel.gradients.hashing import EARLY, compare_values, warn_of_different
from braid.parallel.gradients.step_settings import StepSettings

__all__ = ["AveragingListener", "MakeOptimizer"]

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
MODULE = "torch.distributed.optim.apply_optimizer_in_backward"


def optimizers_of(param: torch.Tensor) -> Iterable[torch.optim.Optimizer]:
    """Return the optimizers that torch's `_apply_optimizer_in_backward` has set on a parameter."""
    optimizers: Iterable[torch.optim.Optimizer] = getattr(param, "_in_backward_optimizers", ())
    return optimizers


def adopt_optimizers(records: Iterable[ParamRecord]) -> bool:
    """Remove the hooks by which torch steps optimizers in backward; return whether there were any.

    Raises:
        ConfigError: A parameter with such a hook has sparse gradients.
    """
    stepped_records = [record for record in records if optimizers_of(record.param)]
    for record in stepped_records:
        if record.sparse:
            msg = (
                f"{record.name!r} has an optimizer in backward, but sparse gradients are "
                "averaged only at the end of backward: give it a separate optimizer, and call "
                "its step() after backward"
            )
            raise ConfigError(msg)
        # the function of this module registered the optimizer
        for handle in sys.modules[MODULE].param_to_optim_hook_handle_map.pop(record.param, ()):
            handle.remove()
    return bool(stepped_records)


@dataclass(eq=False, kw_only=True)
class AveragingListener(ReducerListener):
    """Listener for one wrapper: steps, buffers, comparisons and warnings around each averaging.

    Attributes:
        joinable: The wrapper; held weakly, so that the reducer does not keep it alive.
        group: Ranks that train together.
        table: Parameters of the module.
        buffers: Buffers of the module.
        handler: Called if gradients are not finite.
        hash_every: Number of averagings between two comparisons of parameters; 0 for none.
        warnings: Warnings about steps that are probably unintended.
        first_batch: Checks of the first batch; None once it has been checked.
        active_ranks: Group ranks that had input in the last step.
        optimizers: Optimizers of single parameters by name, for steps inside of backward.
        compares_early: Whether parameters are compared in the first steps.
    """

    joinable: weakref.ref[Joinable]
    group: Group
    table: ParamTable
    buffers: ModuleBuffers
    handler: NonfiniteHandler
    hash_every: int
    warnings: OnceWarnings
    first_batch: FirstBatch | None
    active_ranks: list[int] = field(init=False)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    compares_early: bool = True
    _make_optimizer: MakeOptimizer | None = None
    _has_adopted: bool = False
    _join_notice: Work | None = None

    def __post_init__(self) -> None:
        self.active_ranks = list(range(self.group.size))
        self._has_buffers = self.buffers.any()
        self._settings = StepSettings(record.param for record in self.table)

    def adopt_optimizers(self) -> None:
        """Take over the steps of optimizers that torch has set to run in backward."""
        self._has_adopted = adopt_optimizers(self.table) or self._has_adopted
        self.steps_in_backward |= self._has_adopted

    def step_in_backward(self, make_optimizer: MakeOptimizer) -> None:
        """Take optimizer steps inside of backward; see `DistributedDataParallel`.

        Raises:
            ConfigError: torch has registered optimizers on the parameters already.
        """
        if self._has_adopted:
            msg = (
                "parameters already have optimizers from _apply_optimizer_in_backward, so they "
                "would be updated twice: use only one of the two"
            )
            raise ConfigError(msg)
        self._make_optimizer = make_optimizer
        self.steps_in_backward = True
        for record in self.table.requires_grad:
            if not record.sparse:
                self.optimizers[record.name] = make_optimizer([record.param])

    def on_averaging_begins(self) -> None:
        """Notify joined ranks, which have no more input, that this rank still works."""
        joinable = self.joinable()
        join = None if joinable is None else joinable._join  # noqa: SLF001 - the other half
        if joinable is not None and join is not None and not join.throws:
            self._join_notice = Join.notify_join_context(joinable)

    def on_first_launch(self, bucket: Bucket) -> None:
        """Record this rank's first gradients."""
        if self.first_batch is not None:
            self.first_batch.note_gradients(bucket.index, bucket.buffer.views)

    def start_beside_status(self) -> Sequence[Work]:
        """Start to send buffers that changed in the last step; return the works to wait for."""
        notice, self._join_notice = self._join_notice, None
        works = self.buffers.start_early(self.active_ranks[0]) if self._has_buffers else []
        return works if notice is None else [*works, notice]

    def on_bucket_averaged(self, records: Sequence[ParamRecord], *, is_usable: bool) -> None:
        """Step the optimizers of a bucket's parameters, and drop the gradients.

        Args:
            records: Parameters of the averaged bucket.
            is_usable: Whether the averages are finite; if False, no optimizer steps.
        """
        if self._has_adopted:
            _step_adopted(records, is_usable=is_usable)
        if self._make_optimizer is None:
            return
        for record in records:
            if record.name not in self.optimizers:  # unfrozen after the first step
                self.optimizers[record.name] = self._make_optimizer([record.param])
            if is_usable:
                self.optimizers[record.name].step()
            record.param.grad = None

    def on_averaged(self, outcome: AveragingOutcome) -> None:
        """Make buffers equal, compare parameters, and report."""
        states = outcome.status.states
        if RankState.JOINED in states:
            joined = outcome.status.ranks(RankState.JOINED)
            self.active_ranks = [rank for rank in range(len(states)) if rank not in joined]
        else:
            self.active_ranks = list(range(len(states)))
        if self._has_buffers:
            with torch.no_grad():
                root = self.active_ranks[0]
                self.buffers.finish(root, changed=outcome.status.num_buffers_used > 0)
        # ranks that have joined have not taken the last steps
        when = f"before the optimizer's step {outcome.number}"
        is_complete = len(self.active_ranks) == len(states)
        due = self.hash_every and outcome.number % self.hash_every == 0
        if due and is_complete:
            compare_values(self.group, self.table.records, when)
        handle_nonfinite(outcome, self.group.ranks, self.handler)
        if self.first_batch is not None:
            first, self.first_batch = self.first_batch, None
            first.report(is_weighted=outcome.status.num_weighted > 0)
        if outcome.number in EARLY and is_complete and self.compares_early and not due:
            warn_of_different(self.group, self.table.records, when)
        self._settings.averaged([self.group], is_complete=is_complete)
        self.warnings.check(outcome)  # last: a filter may make it an error


def _step_adopted(records: Sequence[ParamRecord], *, is_usable: bool) -> None:
    for record in records:
        optimizers = optimizers_of(record.param)
        if is_usable:
            for optimizer in optimizers:
                optimizer.step()
        if optimizers:
            record.param.grad = None
