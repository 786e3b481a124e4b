"""Averaging of gradients in buckets, with an exchange of the status of all ranks.

    launch(bucket) ... launch(bucket)     during backward, in any order
    average()                             status, buckets of other ranks, wait, report

A rank without input (`shadow`) and a rank that raised during backward (`abandon`) take the same
steps with zeros, so that the other ranks do not wait for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from braid.comm import Group, Work
from braid.errors import CommError, ConfigError, MismatchError
from braid.parallel.gradients.backward_state import BackwardState
from braid.parallel.gradients.bucket import Bucket
from braid.parallel.gradients.bucket_layout_cache import BucketLayoutCache
from braid.parallel.gradients.bucket_times import BucketTimes, ReadyTimes
from braid.parallel.gradients.disagreements import (
    OWN_GRADIENTS,
    failed_ranks,
    hooks_differ,
    requires_grad_differs,
    weights_differ,
)
from braid.parallel.gradients.grad_view import averaged_with_graph
from braid.parallel.gradients.hook_schedule import StateHook
from braid.parallel.gradients.reducer_options import (
    AveragingOutcome,
    ReducerListener,
    ReducerOptions,
)
from braid.parallel.gradients.reducer_policy import ReducerPolicy
from braid.parallel.gradients.sparse import average_sparse
from braid.parallel.gradients.status import RankState, Status, StatusLayout
from braid.parallel.gradients.table import ParamRecord
from braid.runtime.torch_internals import sparse_values

__all__ = ["Averager"]

WEIGHTED_GRAPH = (
    "gradient of {!r} has a graph (create_graph=True) and a loss weight, which the "
    "second backward would count twice: call set_loss_weight(None) for such losses, and multiply "
    "the loss itself"
)


class StatusExchange:
    """Exchange of the status vectors that ranks report with their gradients.

    Args:
        group: Ranks that train together.
        num_params: Number of parameters.

    Attributes:
        layout: Layout of the vector.
        device: Device on which the group sends small messages.
    """

    def __init__(self, group: Group, num_params: int) -> None:
        kinds = group.engine.device_types
        self.device = torch.device("cpu" if "cpu" in kinds else min(kinds))
        self.layout = StatusLayout(num_params, group.size)
        self._vector = torch.zeros(self.layout.length, dtype=torch.float64, device=self.device)
        self._request = group.persistent("all_reduce", self._vector)

    def run(self, vector: Sequence[float], beside: Sequence[Work]) -> Status:
        """Sum the status vectors of all ranks; a collective.

        Args:
            vector: This rank's vector, see `StatusLayout.encode`.
            beside: Works that run at the same time; this method also waits for them.
        """
        self._vector.copy_(torch.tensor(vector, dtype=torch.float64))
        self._request.start().wait()
        for work in beside:
            work.wait()
        return self.layout.decode(self._vector.tolist())


class Averager:
    """Averager of gradients in buckets over a group.

    Args:
        group: Ranks that train together.
        records: Parameters with gradients that are averaged.
        options: Sizes, wire format and checks.
        listener: Object with methods that are called during each averaging.
        state: State of the backwards since the last average.

    Attributes:
        policy: Rules for the start of reductions and for the state that this rank reports.
        listener: Object with methods that are called during each averaging.
        buckets: Buckets of the parameters that require a gradient.
        num_reductions: Number of averagings so far.
    """

    def __init__(
        self,
        group: Group,
        records: tuple[ParamRecord, ...],
        options: ReducerOptions,
        listener: ReducerListener,
        state: BackwardState,
    ) -> None:
        self._group = group
        self._records = records
        self._options = options
        self._state = state
        self._exchange = StatusExchange(group, len(records))
        self._cache = BucketLayoutCache(group, records, options)
        self._nonfinite: set[int] = set()
        self._has_hook = False
        self._raised: Exception | None = None  # by the listener, while other buckets were in flight
        self.policy = ReducerPolicy(options)
        self.listener = listener
        self.buckets = self._cache.current
        self.num_reductions = 0
        self._times = ReadyTimes(group.context.clock.now_ns, self.buckets.layouts)

    def use_options(self, options: ReducerOptions) -> None:
        """Replace the options; they must have the same bucket sizes and formats as before."""
        self._options = options
        self.policy = ReducerPolicy(options)

    def use_hook(self, hook: StateHook) -> None:
        """Run a communication hook, instead of the all-reduce, in all current and later buckets."""
        self._has_hook = True
        self._cache.use_hook(hook)

    def refresh(self) -> bool:
        """Record which parameters require a gradient now; return whether buckets have changed."""
        changed = self._cache.refresh(accumulating=self._state.num_accumulated > 0)
        self.buckets = self._cache.current
        return changed

    def launch(self, bucket: Bucket) -> None:
        """Start the reduction of a bucket, and record gradients in it that are not finite."""
        check = self._options.finite_check
        if check == "late" and self.listener.steps_in_backward:
            check = "first"
        self._nonfinite.update(bucket.find_nonfinite(check))
        self._times.bucket_is_ready(bucket.index)
        if not self.num_reductions:
            self.listener.on_first_launch(bucket)
        bucket.launch()

    def launch_delayed(self) -> None:
        """Start the reduction of the delayed buckets that are complete."""
        for bucket in self.buckets:
            if bucket.layout.delayed and bucket.is_ready and not bucket.is_launched:
                self.launch(bucket)

    def average(self) -> None:
        """Reduce all remaining buckets, and wait for the averages, which `.grad` then holds."""
        for bucket in self._collect():
            self.launch(bucket)
        state = self._state
        rank_state = self.policy.rank_state(state, is_finite=not self._nonfinite)
        status = self._exchange_status(rank_state, state.loss_weight, present=not state.failed)
        self._launch_needed(status)
        self._conclude(status, rank_state, has_gradients=True)

    def shadow(self, weight: float) -> bool:
        """Take part in an averaging without input; return False when all ranks are without input.

        Accumulated gradients of this rank take part in the first averaging; later ones use zeros.

        Args:
            weight: Weight of this rank in the average if it has no gradients.
        """
        state = self._state
        has_gradients = state.num_accumulated > 0
        if has_gradients:
            self._collect()
            weight = state.loss_weight
        else:
            self.buckets.zero()
        rank_state = RankState.FAILED if state.failed else RankState.JOINED
        status = self._exchange_status(
            rank_state, weight, present=has_gradients and not state.failed
        )
        if all(other is RankState.JOINED for other in status.states):
            return False
        self._launch_needed(status)
        self._conclude(status, rank_state, has_gradients=has_gradients)
        return True

    def abandon(self) -> None:
        """Finish the collectives of a backward that raised on this rank, so that no rank hangs."""
        for bucket in self.buckets:
            if not bucket.is_launched:
                bucket.zero()
        status = self._exchange_status(RankState.FAILED, 1.0, present=False)
        self._launch_needed(status)
        self.buckets.wait()  # averages may arrive after the program has zeroed gradients
        self._group.objects.all_gather(self._state.failure)
        self.buckets.zero()
        self._end_step()

    def bucket_times(self) -> BucketTimes:
        """Return when the buckets of the last averaging were ready, on all ranks; a collective."""
        device = self._exchange.device
        return self._times.gather(self._group, self._records, self.num_reductions, device)

    def _collect(self) -> list[Bucket]:
        """Move accumulated gradients into buckets; return unlaunched buckets with gradients."""
        holding = [b for b in self.buckets if not b.is_launched and b.collect_all()]
        for position in self.buckets.sparse:
            grad = self._records[position].param.grad
            if grad is None:
                continue
            # values() needs a coalesced tensor
            values = sparse_values(grad) if grad.is_sparse else grad
            if not bool(values.isfinite().all()):
                self._nonfinite.add(position)
        return holding

    def _exchange_status(self, rank_state: RankState, weight: float, *, present: bool) -> Status:
        """Exchange the gradients and the state of each rank as a status vector; a collective."""
        state, required = self._state, self.buckets.requires_grad
        has_gradient = [
            present and requires and record.param.grad is not None
            for record, requires in zip(self._records, required, strict=True)
        ]
        vector = self._exchange.layout.encode(
            self._group.rank,
            present=has_gradient,
            nonfinite=list(map(self._nonfinite.__contains__, range(len(required)))),
            requires_grad=required,
            state=rank_state,
            num_forwards_without_backward=state.num_forwards_without_backward,
            has_hook=self._has_hook,
            weight=weight,
            is_weighted=state.is_weighted and rank_state in OWN_GRADIENTS,
            buffers_used=state.buffers_used and rank_state is not RankState.JOINED,
        )
        status = self._exchange.run(vector, self.listener.start_beside_status())
        differing = requires_grad_differs(status, self._records) or hooks_differ(
            status, self._group.ranks
        )
        if differing is not None:
            self._group.abort(differing)  # buckets in flight will never be matched
            raise MismatchError(differing)
        self._cache.agree()
        return status

    def _launch_needed(self, status: Status) -> None:
        """Launch buckets with gradients on other ranks only."""
        for bucket in self.buckets:
            if not bucket.is_launched and self.policy.is_needed(bucket.layout, status):
                self.launch(bucket)

    def _conclude(self, status: Status, state: RankState, *, has_gradients: bool) -> None:
        """Wait for the averages, and report the outcome."""
        if RankState.FAILED in status.states:
            self.buckets.wait()
            reasons = self._group.objects.all_gather(self._state.failure)
            self._end_step()
            if state is RankState.JOINED:
                return
            raise CommError(failed_ranks(status, self._group.ranks, reasons))
        mean_weight = self.policy.mean_weight(status)
        self.buckets.wait(partial(self._bucket_averaged, status, mean_weight))
        for position in self.buckets.sparse:
            if status.present[position]:
                param = self._records[position].param
                grad = param.grad if has_gradients else None
                param.grad = average_sparse(self._group, param, grad, mean_weight)
        self._times.averaging_ended(self.buckets.layouts)
        if not self.buckets.is_learnt:
            self._learn()
        raised = self._raised
        self._end_step()
        differing = weights_differ(status)
        if differing is not None:
            raise MismatchError(differing)
        self._state.buffers_used = False
        self.listener.on_averaged(AveragingOutcome(self.num_reductions, status, self._records))
        if raised is not None:
            raise raised

    def _learn(self) -> None:
        """Adapt buckets to the order and counts of the first complete backward."""
        if self._options.static_graph:
            self.buckets.learn()
        else:
            self._cache.improve(self._exchange.device)
            self.buckets = self._cache.current

    def _bucket_averaged(self, status: Status, mean_weight: float, bucket: Bucket) -> None:
        """Make `.grad` hold the averages of a bucket."""
        if mean_weight != 1.0:
            bucket.buffer.tensor.mul_(1.0 / mean_weight)
        present = bucket.layout.members
        if not all(map(status.present.__getitem__, present)):
            bucket.keep_residuals([p for p in present if not status.present[p]])
            present = tuple(p for p in present if status.present[p])
        records = list(map(self._records.__getitem__, present))
        for record, position in zip(records, present, strict=True):
            grad = record.param.grad
            if grad is None:  # used by another rank only
                record.param.grad = bucket.views[position].detach()
            elif grad.requires_grad:
                if status.num_weighted and self._raised is None:
                    self._raised = ConfigError(WEIGHTED_GRAPH.format(record.name))
                record.param.grad = averaged_with_graph(grad, bucket.views[position])
        is_usable = not any(status.nonfinite) and self._raised is None
        try:
            self.listener.on_bucket_averaged(records, is_usable=is_usable)
        except Exception as error:  # noqa: BLE001 - raised when all ranks have ended the step
            self._raised = error

    def _end_step(self) -> None:
        self.num_reductions += 1
        self._raised = None
        self._nonfinite.clear()
        self._times.restart()
        self._state.averaged()
        self.buckets.reset()
