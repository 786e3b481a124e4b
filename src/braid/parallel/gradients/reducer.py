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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from braid.comm import Group
from braid.errors import ConfigError
from braid.parallel.gradients.autograd_grad import (
    at_end_of_backward,
    is_in_backward,
    is_nested,
    is_returned,
    refuse_grad,
)
from braid.parallel.gradients.averager import Averager
from braid.parallel.gradients.backward_state import (
    BackwardEnd,
    BackwardPhase,
    BackwardState,
    ReducerAction,
)
from braid.parallel.gradients.bucket_times import BucketTimes
from braid.parallel.gradients.buckets import Buckets
from braid.parallel.gradients.gradient_hooks import ForwardPass, GradientHooks, GradientListener
from braid.parallel.gradients.hook_schedule import StateHook
from braid.parallel.gradients.local_steps import LocalSteps
from braid.parallel.gradients.reducer_options import ReducerListener, ReducerOptions
from braid.parallel.gradients.reducer_policy import ReducerPolicy
from braid.parallel.gradients.table import ParamTable
from braid.runtime.torch_internals import disable_dynamo

__all__ = ["GradientReducer"]


class GradientReducer(GradientListener):
    """Averages gradients over a group during backward.

    Args:
        group: Ranks that train together.
        table: Parameters of the model, the same on all ranks.
        options: Sizes, accumulation and checks.
        listener: Learns of each averaging.
        registers_outputs: Whether forward passes are registered (`register_outputs`). Otherwise a
            backward begins with the first part of a gradient that is computed.
        agree: Makes the reducer wait with its memory and its channels until a backward averages
            for the first time. Called then, before they are made; a collective. Copies of a model
            need none as long as they are not trained, and one rank alone may make them.

    Attributes:
        synchronizes: False while gradients stay local and accumulate; read when backward begins.
        loss_weight: Weight of the gradients of forwards that begin now; every backward counts one
            when None.
        is_set_up: Whether there are memory and channels already; see the argument `agree`.
        needs_average: Whether nested backwards have left gradients that `finish` has to average.
    """

    def __init__(
        self,
        group: Group,
        table: ParamTable,
        options: ReducerOptions | None = None,
        listener: ReducerListener | None = None,
        *,
        registers_outputs: bool = True,
        agree: Callable[[], None] | None = None,
    ) -> None:
        self._group = group
        self._records = table.records
        self._options = options or ReducerOptions()
        self._policy = ReducerPolicy(self._options)
        self._listener = listener or ReducerListener()
        self._registers_outputs = registers_outputs
        self._agree = agree
        self._state = BackwardState()
        self._local_steps = LocalSteps()
        self._hook: StateHook | None = None
        self._early_residuals: Mapping[str, torch.Tensor] = {}
        self._hooks = GradientHooks(self._records, self, partial_grads=not registers_outputs)
        self.is_set_up = False
        if agree is None:
            self._set_up()
        self._hooks.attach(self._positions())
        self.synchronizes = True
        self.loss_weight: float | None = None
        self.needs_average = False

    def _set_up(self) -> None:
        """Make the part with memory and channels, at the same point on all ranks."""
        if self.is_set_up:
            return
        if self._agree is not None:
            self._agree()
        averager = Averager(self._group, self._records, self._options, self._listener, self._state)
        if self._hook is not None:
            averager.use_hook(self._hook)
        if self._early_residuals:
            averager.buckets.add_residuals(self._early_residuals)
        self._averager = averager
        self.is_set_up = True

    @property
    def is_in_backward(self) -> bool:
        """Whether a backward through the model is under way in this thread."""
        return self._state.phase is not BackwardPhase.IDLE and is_in_backward()

    @property
    def buckets(self) -> Buckets:
        """Buckets of the parameters that require a gradient; a collective if not set up."""
        self._set_up()
        return self._averager.buckets

    @property
    def num_reductions(self) -> int:
        """Number of averagings so far."""
        return self._averager.num_reductions if self.is_set_up else 0

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
        if self._hook is not None:
            msg = "a communication hook has been registered before: a model takes one"
            raise ConfigError(msg)
        if self._state.phase is not BackwardPhase.IDLE:
            msg = "a backward is under way: register communication hooks between two steps"
            raise ConfigError(msg)
        self._hook = hook
        if self.is_set_up:
            self._averager.use_hook(hook)

    def residuals(self) -> dict[str, torch.Tensor]:
        """Return what lossy formats have left out on this rank, by parameter name."""
        return self.buckets.residuals() if self.is_set_up else dict(self._early_residuals)

    def add_residuals(self, residuals: Mapping[str, torch.Tensor]) -> None:
        """Replace what has been left out so far; see `Buckets.add_residuals`."""
        if self.is_set_up:
            self.buckets.add_residuals(residuals)
        else:
            self._early_residuals = residuals

    def use_static_graph(self) -> None:
        """Expect from now on that every backward uses the same parameters, equally often.

        Raises:
            ConfigError: Gradients have been averaged, or a backward is under way.
        """
        if self.num_reductions or self._state.phase is not BackwardPhase.IDLE:
            msg = (
                f"static_graph was set after {self.num_reductions} averagings: pass "
                "static_graph=True to the constructor, or set it before the first backward"
            )
            raise ConfigError(msg)
        self._options = replace(self._options, static_graph=True)
        self._policy = ReducerPolicy(self._options)
        if self.is_set_up:
            self._averager.use_options(self._options)

    def set_loss_weight(self, weight: float | None) -> None:
        """Set the loss weight of the forwards that follow; gradients are scaled by the weight."""
        if weight is not None:
            self._hooks.register_partial_grad_hooks()
        self.loss_weight = weight

    def refresh(self) -> None:
        """Free other ranks if an exception has ended the last backward; see what is frozen now.

        Called between steps.
        """
        if is_in_backward():  # a forward that is computed again
            return
        if self._state.phase is not BackwardPhase.IDLE:
            self._abandon_backward()
        if self._state.num_accumulated and all(r.param.grad is None for r in self._records):
            self.restart()
        if not self.is_set_up:
            self._hooks.attach(self._positions())
        elif self._averager.refresh():
            self._hooks.attach(self.buckets.positions)
        else:
            self._hooks.refresh()

    # Counts in a graph would be constants, and every step another graph. `torch.compiler.disable`
    # would do if it did not import the compiler here, which takes a second; this does so in its
    # first call, if no optimizer of torch has.
    @disable_dynamo
    def forward_begins(self) -> None:
        """Prepare for a forward whose gradients are averaged; call before each."""
        if is_in_backward():  # a forward that is computed again
            return
        steps = self._options.gradient_accumulation_steps
        self._local_steps.check(self._state.num_accumulated, steps)
        self.refresh()
        self._state.num_forwards_without_backward += 1

    @disable_dynamo
    def register_outputs(
        self, outputs: Sequence[torch.Tensor], *, buffers_used: bool = False
    ) -> None:
        """Register the outputs of a forward pass. Call once per successful forward.

        Args:
            outputs: Tensors that autograd follows.
            buffers_used: Whether the forward may have changed buffers that are kept equal.
        """
        self._state.buffers_used |= buffers_used
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
        self._local_steps.forget()
        self._set_up()
        return self._averager.shadow(weight)

    def finish(self) -> None:
        """Launch what has not been launched and wait for all; `.grad` then holds the averages."""
        self.needs_average = False
        self._local_steps.forget()
        self._set_up()
        self._averager.average()

    def bucket_times(self) -> BucketTimes:
        """Return when the buckets of the last averaging were ready, on all ranks; a collective."""
        self._set_up()
        return self._averager.bucket_times()

    def close(self) -> None:
        """Remove the hooks."""
        self._hooks.close()
        self.needs_average = False

    # One backward, as autograd tells it.

    def on_output(self, forward: ForwardPass, /) -> None:
        """Begin a backward that has reached an output of `forward`."""
        if self._state.phase is BackwardPhase.IDLE:
            self._backward_begins()
        self._close_forward(forward)
        self._state.add_weight(forward.weight)

    def on_partial_grad(self, position: int, grad: torch.Tensor, /) -> torch.Tensor | None:
        """Return a part of a gradient times the loss weight of its forward."""
        state = self._state
        if state.phase is BackwardPhase.IDLE:
            if self._registers_outputs:
                if is_returned(self._records[position].param):
                    return None
                self._backward_begins()
            elif self.synchronizes:
                is_inner = is_nested()
                self.needs_average |= is_inner
                self._backward_begins(BackwardPhase.NESTED if is_inner else None)
            else:
                return None
        if not state.weights:  # a parameter that the loss uses itself, or behind a hidden output
            state.add_weight(self.loss_weight)
        (weight,) = state.weights
        return None if weight is None else grad * weight

    def on_gradient(self, position: int, /) -> None:
        """Move a gradient into its bucket, and launch the bucket when it is complete."""
        state = self._state
        if state.phase is BackwardPhase.IDLE:
            self._backward_begins()
        if not state.has_gradient:
            state.has_gradient = True
            if state.phase is BackwardPhase.AVERAGING:
                self._listener.on_averaging_begins()
        if state.phase is not BackwardPhase.AVERAGING:
            return
        if not self.is_set_up:
            self._set_up()
        averager = self._averager
        buckets = averager.buckets
        bucket = buckets.of.get(position)
        if bucket is None:
            return
        if not buckets.is_learnt:
            buckets.arrivals.setdefault(position)
        try:
            is_full = bucket.mark_ready(position)
        except ConfigError as error:
            raise self._failed(error) from None
        if is_full and self._policy.launches_early(bucket.layout, is_learnt=buckets.is_learnt):
            averager.launch(bucket)
        if position == buckets.trigger:
            averager.launch_delayed()

    def _backward_begins(self, phase: BackwardPhase | None = None) -> None:
        state = self._state
        state.begin(phase or self._policy.next_phase(state, synchronizes=self.synchronizes))
        at_end_of_backward(self._backward_ended)

    def _close_forward(self, forward: ForwardPass) -> None:
        """Note that a backward has reached a forward."""
        if forward.open == self.num_reductions:
            self._state.num_forwards_without_backward -= 1
        forward.open = None

    def _backward_ended(self) -> None:
        if self._state.phase is BackwardPhase.AVERAGING and self.is_set_up:
            try:
                self._averager.buckets.check_gradients()
            except ConfigError as error:
                raise self._failed(error) from None
        action = self._state.end(BackwardEnd.END)
        if action is ReducerAction.NOTHING:
            refuse_grad(self._records)
        elif action is ReducerAction.AVERAGE:
            self.finish()
        elif self.synchronizes:
            self._local_steps.remember(self._records)
        else:
            self._local_steps.forget()

    def _abandon_backward(self) -> None:
        """Report a backward that an exception has ended, so that other ranks can end theirs."""
        is_announced = self._state.has_gradient
        if self._state.end(BackwardEnd.ABANDON) is not ReducerAction.REPORT:
            return
        if not is_announced:
            self._listener.on_averaging_begins()
        self.needs_average = False
        self._local_steps.forget()
        self._set_up()
        self._averager.abandon()

    def _failed(self, error: ConfigError) -> ConfigError:
        """Return an error of this rank's backward with its rank, and keep it for other ranks."""
        self._state.failure = f"rank {self._group.ranks[self._group.rank]}: {error}"
        return ConfigError(self._state.failure)

    def _positions(self) -> list[int]:
        return [p for p, record in enumerate(self._records) if record.param.requires_grad]
