"""Gradients of all ranks, averaged bucket by bucket.

A hook on every parameter moves the gradient into its bucket, which lies in shared memory. The hook
that completes a bucket launches it: the memory is offered to the other ranks. When backward ends,
`finish` tells them what this rank has (`status`), takes the steps of all that has been started and
waits for the peers'. Steps in between would not end sooner: sums in shared memory are work for the
same core, and they would drive what backward computes on out of its cache. But a rank that has
ended earlier sums what all have offered meanwhile, and the last one finds it done.

    backward   p6 p5 | p4 p3 p2 | p1 p0 |
    bucket 0         >                   :====        > offered   = steps
    bucket 1                    >        :====        : finish()
    bucket 2                            >:====
    status                               >==

The status carries who has a gradient of what. So parameters that nobody has used keep `.grad` None,
as in one process, without being declared; buckets that nobody needs are not sent. A gradient
accumulated by earlier backwards takes part, whether or not the last one added to it.

The result equals a loop over the ranks' shards in one process, bit by bit: sums are in the order of
ranks, and the division by their number happens once, at the end (`data_parallel.ddp.reference`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch._compile import _disable_dynamo

from braid.comm import Group
from braid.errors import CommError, ConfigError, MismatchError
from braid.params.autograd_grad import (
    at_end_of_backward,
    is_in_backward,
    is_nested,
    is_returned,
    refuse_grad,
)
from braid.params.backward_state import Action, BackwardState, Event, Phase
from braid.params.bucket import Bucket
from braid.params.bucket_layout_cache import BucketLayoutCache
from braid.params.bucket_times import BucketTimes, ReadyTimes
from braid.params.disagreements import (
    OWN_GRADIENTS,
    failed_ranks,
    requires_grad_differs,
    weights_differ,
)
from braid.params.gradient_hooks import ForwardPass, GradientHooks, GradientListener
from braid.params.hook_schedule import StateHook
from braid.params.local_steps import LocalSteps
from braid.params.reducer_options import Outcome, ReducerListener, ReducerOptions
from braid.params.reducer_policy import ReducerPolicy
from braid.params.sparse import average_sparse
from braid.params.status import RankState, Status
from braid.params.status_exchange import StatusExchange
from braid.params.table import ParamTable

__all__ = ["GradientReducer"]


class GradientReducer(GradientListener):
    """Averages gradients over a group during backward.

    Args:
        group: Ranks that train together.
        table: Their parameters; equal on all of them.
        options: Sizes, accumulation and checks.
        listener: Learns of each averaging.
        hears_outputs: Whether forward passes are registered (`register_outputs`). Otherwise a
            backward begins with the first part of a gradient that is computed.

    Attributes:
        buckets: Buckets of the parameters that require a gradient.
        synchronizes: False while gradients stay local and accumulate; read when backward begins.
        loss_weight: Weight of the gradients of forwards that begin now; every backward counts one
            when None.
        buffers_used: Whether the module has been used in training mode since buffers were equal.
        owes_average: Whether nested backwards have left gradients that `finish` has to average.
        num_reductions: Number of averagings so far.
    """

    def __init__(
        self,
        group: Group,
        table: ParamTable,
        options: ReducerOptions | None = None,
        listener: ReducerListener | None = None,
        *,
        hears_outputs: bool = True,
    ) -> None:
        self._group = group
        self._records = table.records
        self._options = options or ReducerOptions()
        self._policy = ReducerPolicy(self._options)
        self._listener = listener or ReducerListener()
        self._exchange = StatusExchange(group, len(self._records))
        self._hears_outputs = hears_outputs
        self._hooks = GradientHooks(self._records, self, partial_grads=not hears_outputs)
        self._cache = BucketLayoutCache(group, self._records, self._options)
        self._has_hook = False
        self._times = ReadyTimes(group.context.clock.now_ns, self._cache.current.layouts)
        self._local_steps = LocalSteps()
        self._state = BackwardState()
        self._nonfinite: set[int] = set()
        self._raised: Exception | None = None  # by the listener, while buckets were under way
        self.buckets = self._cache.current
        self.synchronizes = True
        self.loss_weight: float | None = None
        self.buffers_used = False
        self.owes_average = False
        self.num_reductions = 0
        self._hooks.attach(self.buckets.positions)

    @property
    def accumulates(self) -> bool:
        """Whether gradients of earlier backwards wait to be averaged."""
        return self._state.num_accumulated > 0

    def average_next(self) -> None:
        """Let the next backward average, whichever number it has."""
        self._state.averages_next = True

    def restart(self) -> None:
        """Discard the count of accumulated gradients, which have been dropped.

        No-op after a failed backward, so that all ranks keep counting alike.
        """
        if not self._state.failed:
            self._state.drop_accumulated()
            self._local_steps.forget()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients of backwards inside local."""
        before = self.synchronizes
        self.synchronizes = False
        try:
            yield
        finally:
            self.synchronizes = before

    def use_hook(self, hook: StateHook) -> None:
        """Let a communication hook take the place of the all-reduce, with its state.

        Raises:
            ConfigError: A backward is under way, or there is a hook already.
        """
        if self._has_hook:
            msg = "a communication hook has been registered before: a model takes one"
            raise ConfigError(msg)
        if self._state.phase is not Phase.IDLE:
            msg = "a backward is under way: register communication hooks between two steps"
            raise ConfigError(msg)
        self._has_hook = True
        self._cache.use_hook(hook)

    def set_loss_weight(self, weight: float | None) -> None:
        """Set the weight of the gradients of forwards that follow; scaled where they accumulate."""
        if weight is not None:
            self._hooks.hear_partial_grads()
        self.loss_weight = weight

    def refresh(self) -> None:
        """Free other ranks if an exception has ended the last backward; see what is frozen now.

        Called between steps.
        """
        if is_in_backward():  # a forward that is computed again
            return
        if self._state.phase is not Phase.IDLE:
            self._abandon_backward()
        if self._state.num_accumulated and all(r.param.grad is None for r in self._records):
            self.restart()
        if self._cache.refresh(accumulating=self._state.num_accumulated > 0):
            self.buckets = self._cache.current
            self._hooks.attach(self.buckets.positions)
        else:
            self._hooks.refresh()

    # Counts in a graph would be constants, and every step another graph. `torch.compiler.disable`
    # would do if it did not import the compiler here, which takes a second; this does so in its
    # first call, if no optimizer of torch has.
    @_disable_dynamo
    def forward_begins(self) -> None:
        """Prepare for a forward whose gradients are averaged; call before each."""
        if is_in_backward():  # a forward that is computed again
            return
        steps = self._options.gradient_accumulation_steps
        self._local_steps.check(self._state.num_accumulated, steps)
        self.refresh()
        self._state.num_forwards_without_backward += 1

    @_disable_dynamo
    def register_outputs(self, outputs: Sequence[torch.Tensor]) -> None:
        """Register the outputs of a forward pass. Call once per successful forward."""
        opened = None if is_in_backward() else self.num_reductions
        forward = ForwardPass(self.loss_weight, opened)
        if not self._hooks.register_outputs(outputs, forward):
            self._close_forward(forward)  # no backward will reach it

    def shadow_backward(self, weight: float) -> bool:
        """Take part in one averaging of the others; return False when all ranks have joined.

        What this rank has accumulated takes part in the first one; later it has nothing of its own.

        Args:
            weight: Weight of this rank in the average when it has no gradients.
        """
        state = self._state
        has_gradients = state.num_accumulated > 0
        if has_gradients:
            self._collect()
            weight = state.loss_weight
        else:
            self.buckets.zero()
        own = RankState.FAILED if state.failed else RankState.JOINED
        status = self._exchange_status(own, weight, present=has_gradients and not state.failed)
        if all(other is RankState.JOINED for other in status.states):
            return False
        self._launch_needed(status)
        self._conclude(status, own, has_gradients=has_gradients)
        return True

    def finish(self) -> None:
        """Launch what has not been launched and wait for all; `.grad` then holds the averages."""
        self.owes_average = False
        for bucket in self._collect():
            self._launch(bucket)
        state = self._state
        own = self._policy.rank_state(state, is_finite=not self._nonfinite)
        status = self._exchange_status(own, state.loss_weight, present=not state.failed)
        self._launch_needed(status)
        self._conclude(status, own, has_gradients=True)

    def bucket_times(self) -> BucketTimes:
        """Return when the buckets of the last averaging were ready, on all ranks; a collective."""
        device = self._exchange.device
        return self._times.gather(self._group, self._records, self.num_reductions, device)

    def close(self) -> None:
        """Remove the hooks."""
        self._hooks.close()
        self.owes_average = False

    # One backward, as autograd tells it.

    def on_output(self, forward: ForwardPass, /) -> None:
        """Begin a backward that has reached an output of `forward`."""
        if self._state.phase is Phase.IDLE:
            self._backward_begins()
        self._close_forward(forward)
        self._state.add_weight(forward.weight)

    def on_partial_grad(self, position: int, grad: torch.Tensor, /) -> torch.Tensor | None:
        """Return a part of a gradient times the loss weight of its forward."""
        state = self._state
        if state.phase is Phase.IDLE:
            if self._hears_outputs:
                if is_returned(self._records[position].param):
                    return None
                self._backward_begins()
            elif self.synchronizes:
                is_inner = is_nested()
                self.owes_average |= is_inner
                self._backward_begins(Phase.NESTED if is_inner else None)
            else:
                return None
        if not state.weights:  # a parameter that the loss uses itself, or behind a hidden output
            state.add_weight(self.loss_weight)
        (weight,) = state.weights
        return None if weight is None else grad * weight

    def on_gradient(self, position: int, /) -> None:
        """Move a gradient into its bucket, and launch the bucket when it is complete."""
        state = self._state
        if state.phase is Phase.IDLE:
            self._backward_begins()
        if not state.has_gradient:
            state.has_gradient = True
            if state.phase is Phase.AVERAGING:
                self._listener.on_averaging_begins()
        buckets = self.buckets
        bucket = buckets.of.get(position)
        if bucket is None or state.phase is not Phase.AVERAGING:
            return
        if not buckets.is_learnt:
            buckets.arrivals.setdefault(position)
        if bucket.mark_ready(position) and self._policy.launches_early(
            bucket.layout, is_learnt=buckets.is_learnt
        ):
            self._launch(bucket)
        if position == buckets.trigger:
            for delayed in buckets:
                if delayed.layout.delayed and delayed.is_ready and not delayed.is_launched:
                    self._launch(delayed)

    def _backward_begins(self, phase: Phase | None = None) -> None:
        state = self._state
        state.begin(phase or self._policy.next_phase(state, synchronizes=self.synchronizes))
        at_end_of_backward(self._backward_ended)

    def _close_forward(self, forward: ForwardPass) -> None:
        """Count a forward no longer among those that no backward has reached."""
        if forward.open == self.num_reductions:
            self._state.num_forwards_without_backward -= 1
        forward.open = None

    def _backward_ended(self) -> None:
        action = self._state.end(Event.END)
        if action is Action.NOTHING:
            refuse_grad(self._records)
        elif action is Action.AVERAGE:
            self.finish()
        elif self.synchronizes:
            self._local_steps.remember(self._records)
        else:
            self._local_steps.forget()

    def _abandon_backward(self) -> None:
        """Let other ranks end the backward that an exception has ended here, and tell them."""
        is_announced = self._state.has_gradient
        if self._state.end(Event.ABANDON) is not Action.REPORT:
            return
        if not is_announced:
            self._listener.on_averaging_begins()
        for bucket in self.buckets:
            if not bucket.is_launched:
                bucket.zero()
        status = self._exchange_status(RankState.FAILED, 1.0, present=False)
        self._launch_needed(status)
        self.buckets.wait()  # averages come, and may come over zeros of the program
        self.buckets.zero()
        self._end_step()

    # The average.

    def _launch(self, bucket: Bucket) -> None:
        self._nonfinite.update(bucket.find_nonfinite(check_all=self._options.check_all))
        self._times.bucket_is_ready(bucket.index)
        bucket.launch()

    def _collect(self) -> list[Bucket]:
        """Move accumulated gradients into buckets; return those not launched that hold some."""
        holding = [b for b in self.buckets if not b.is_launched and b.collect_all()]
        for position in self.buckets.sparse:
            grad = self._records[position].param.grad
            if grad is None:
                continue
            values = grad._values() if grad.is_sparse else grad  # noqa: SLF001 - values() wants it coalesced
            if not bool(values.isfinite().all()):
                self._nonfinite.add(position)
        return holding

    def _exchange_status(self, own: RankState, weight: float, *, present: bool) -> Status:
        """Tell other ranks what this rank has, and learn what they have; a collective."""
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
            state=own,
            num_forwards_without_backward=state.num_forwards_without_backward,
            weight=weight,
            is_weighted=state.is_weighted and own in OWN_GRADIENTS,
            buffers_used=self.buffers_used and own is not RankState.JOINED,
        )
        status = self._exchange.run(vector, self._listener.start_beside_status())
        differing = requires_grad_differs(status, self._records)
        if differing is not None:
            self._group.abort(differing)  # buckets under way will never be matched
            raise MismatchError(differing)
        self._cache.agree()
        return status

    def _launch_needed(self, status: Status) -> None:
        """Launch buckets of which only other ranks have gradients."""
        for bucket in self.buckets:
            if not bucket.is_launched and self._policy.is_needed(bucket.layout, status):
                self._launch(bucket)

    def _conclude(self, status: Status, own: RankState, *, has_gradients: bool) -> None:
        """Wait for the averages, and report what they have shown."""
        failed = failed_ranks(status, self._group.ranks)
        if failed is not None:
            self.buckets.wait()
            self._end_step()
            if own is RankState.JOINED:
                return
            raise CommError(failed)
        mean_weight = self._policy.mean_weight(status)
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
        self.buffers_used = False
        self._listener.on_averaged(Outcome(self.num_reductions, status, self._records))
        if raised is not None:
            raise raised

    def _learn(self) -> None:
        """Use what the first whole backward has shown."""
        if self._options.static_graph:
            self.buckets.learn()
        else:
            self._cache.improve(self._exchange.device)
            self.buckets = self._cache.current

    def _bucket_averaged(self, status: Status, mean_weight: float, bucket: Bucket) -> None:
        """Let `.grad` hold the averages of a bucket."""
        if mean_weight != 1.0:
            bucket.buffer.tensor.mul_(1.0 / mean_weight)
        present = bucket.layout.members
        if not all(map(status.present.__getitem__, present)):
            bucket.keep_residuals([p for p in present if not status.present[p]])
            present = tuple(p for p in present if status.present[p])
        records = list(map(self._records.__getitem__, present))
        for record, position in zip(records, present, strict=True):
            if record.param.grad is None:  # another rank has used it
                record.param.grad = bucket.views[position].detach()
        is_usable = not any(status.nonfinite) and self._raised is None
        try:
            self._listener.on_bucket_averaged(records, is_usable=is_usable)
        except Exception as error:  # noqa: BLE001 - raised when all ranks have ended the step
            self._raised = error

    def _end_step(self) -> None:
        self.num_reductions += 1
        self.owes_average = False
        self._raised = None
        self._nonfinite.clear()
        self._times.restart()
        self._local_steps.forget()
        self._state.averaged()
        self.buckets.reset()
