"""Averaging of gradients over all ranks, bucket by bucket.

A hook on every parameter moves the gradient into its bucket, which is in shared memory. The hook
that completes a bucket launches it: other ranks may read the memory from then on. When backward
ends, `finish` exchanges the status of all ranks (`status`), runs the steps of all launched buckets
and waits for the other ranks. Running steps during backward would not end sooner: sums in shared
memory use the same core, and would evict the data of backward from its cache. But a rank that ends
earlier sums all launched buckets, so the last rank finds the sums complete.

    backward   p6 p5 | p4 p3 p2 | p1 p0 |
    bucket 0         >                   :====        > launch    = steps
    bucket 1                    >        :====        : finish()
    bucket 2                            >:====
    status                               >==

The status contains which rank has which gradients. So parameters that no rank has used keep `.grad`
None, as in one process, without being declared; buckets without gradients are not sent. A gradient
accumulated by earlier backwards takes part, also if the last backward did not add to it.

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
from braid.runtime.torch_internals import disable_dynamo, queue_callback

__all__ = ["GradientReducer"]


class GradientReducer(GradientListener):
    """Reducer that averages gradients over a group during backward.

    Args:
        group: Ranks that train together.
        table: Parameters of the model, the same on all ranks.
        options: Sizes, accumulation and checks.
        listener: Object with methods that are called during each averaging.
        registers_outputs: Whether forward passes are registered (`register_outputs`). If not, a
            backward begins with the first partial gradient.
        agree: If given, memory and channels are created only when a backward averages for the first
            time, right after a call of this function; a collective. A copy of a model that is never
            trained then uses none, and a single rank may make copies.

    Attributes:
        synchronizes: False while gradients stay local and accumulate; read when backward begins.
        loss_weight: Weight of the gradients of forwards that begin now; None for 1 per backward.
        is_set_up: Whether memory and channels exist; see the argument `agree`.
        needs_average: Whether nested backwards have left gradients that `finish` must average.
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
        """Create the averager with its memory and channels, at the same point on all ranks."""
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
        """Whether a backward through the model is running in this thread."""
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
        """Whether gradients of earlier backwards have not been averaged yet."""
        return self._state.num_accumulated > 0

    def average_next(self) -> None:
        """Average in the next backward, regardless of the count of accumulated backwards."""
        self._state.averages_next = True

    def restart(self) -> None:
        """Reset the count of accumulated gradients, after the program has dropped them.

        No-op after a failed backward, so that all ranks keep the same count.
        """
        if not self._state.failed:
            self._state.drop_accumulated()
            self._local_steps.forget()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which gradients of backwards stay local."""
        before = self.synchronizes
        self.synchronizes = False
        try:
            yield
        finally:
            self.synchronizes = before

    def use_hook(self, hook: StateHook) -> None:
        """Call a communication hook, with its state, instead of the all-reduce.

        Raises:
            ConfigError: A backward is running, or a hook is already registered.
        """
        if self._hook is not None:
            msg = "this model already has a communication hook: register only one"
            raise ConfigError(msg)
        if self._state.phase is not BackwardPhase.IDLE:
            msg = (
                "a communication hook was registered during backward: register it between two steps"
            )
            raise ConfigError(msg)
        self._hook = hook
        if self.is_set_up:
            self._averager.use_hook(hook)

    def residuals(self) -> dict[str, torch.Tensor]:
        """Return the errors of lossy formats on this rank, by parameter name."""
        return self.buckets.residuals() if self.is_set_up else dict(self._early_residuals)

    def add_residuals(self, residuals: Mapping[str, torch.Tensor]) -> None:
        """Replace the compression errors; see `Buckets.add_residuals`."""
        if self.is_set_up:
            self.buckets.add_residuals(residuals)
        else:
            self._early_residuals = residuals

    def use_static_graph(self) -> None:
        """Expect that every later backward uses the same parameters the same number of times.

        Raises:
            ConfigError: Gradients have been averaged, or a backward is running.
        """
        if self.num_reductions or self._state.phase is not BackwardPhase.IDLE:
            msg = (
                f"static_graph was set after gradients had been averaged {self.num_reductions} "
                "times: pass static_graph=True to the constructor, or set it before the first "
                "backward"
            )
            raise ConfigError(msg)
        self._options = replace(self._options, static_graph=True)
        self._policy = ReducerPolicy(self._options)
        if self.is_set_up:
            self._averager.use_options(self._options)

    def set_loss_weight(self, weight: float | None) -> None:
        """Set the loss weight of later forwards; their gradients are multiplied by it."""
        if weight is not None:
            self._hooks.register_partial_grad_hooks()
        self.loss_weight = weight

    def refresh(self) -> None:
        """Prepare for the next backward; if the last one raised, let waiting ranks continue.

        Called between steps. It also records which parameters are frozen now.
        """
        if is_in_backward():  # recomputation of a forward
            return
        if self._state.phase is not BackwardPhase.IDLE:
            self._abandon_backward()
        if self._state.num_accumulated and all(r.param.grad is None for r in self._records):
            self.restart()
        self._note_frozen()

    def _note_frozen(self) -> None:
        """Record which parameters are frozen now."""
        if not self.is_set_up:
            self._hooks.attach(self._positions())
        elif self._averager.refresh():
            followed = self.buckets.positions if self._registers_outputs else self._positions()
            self._hooks.attach(followed)
        else:
            self._hooks.refresh()

    # A compiled graph would contain the counts as constants, and be recompiled in every step.
    # `torch.compiler.disable` would import the compiler here, which takes a second; this decorator
    # imports it in the first call, if no optimizer of torch has done so.
    @disable_dynamo
    def forward_begins(self) -> None:
        """Prepare for a forward whose gradients are averaged; call before each such forward."""
        if is_in_backward():  # recomputation of a forward
            return
        steps = self._options.gradient_accumulation_steps
        self._local_steps.check(self._state.num_accumulated, steps)
        self.refresh()
        self._state.num_forwards_without_backward += 1

    @disable_dynamo
    def register_outputs(
        self, outputs: Sequence[torch.Tensor], *, buffers_used: bool = False
    ) -> None:
        """Register the outputs of a forward pass. Call it once per successful forward.

        Args:
            outputs: Outputs that require a gradient.
            buffers_used: Whether the forward may have changed buffers that are kept equal.
        """
        self._state.buffers_used |= buffers_used
        opened = None if is_in_backward() else self.num_reductions
        forward = ForwardPass(self.loss_weight, opened)
        if not self._hooks.register_outputs(outputs, forward):
            self._close_forward(forward)  # no backward will reach it

    def shadow_backward(self, weight: float) -> bool:
        """Take part in an averaging without input; return False when all ranks are without input.

        Accumulated gradients of this rank take part in the first averaging; later ones use zeros.

        Args:
            weight: Weight of this rank in the average if it has no gradients.
        """
        self._local_steps.forget()
        self._set_up()
        return self._averager.shadow(weight)

    def finish(self) -> None:
        """Reduce all remaining buckets, and wait for the averages, which `.grad` then holds."""
        self.needs_average = False
        self._local_steps.forget()
        self._set_up()
        self._averager.average()

    def bucket_times(self) -> BucketTimes:
        """Return when the buckets of the last averaging were ready, on all ranks; a collective."""
        self._set_up()
        return self._averager.bucket_times()

    def close(self) -> None:
        """Remove the hooks from parameters."""
        self._hooks.close()
        self.needs_average = False

    # Events of one backward, in the order in which autograd calls them.

    def on_output(self, forward: ForwardPass, /) -> None:
        """Begin this backward, which has reached an output of the forward pass `forward`."""
        if self._state.phase is BackwardPhase.IDLE:
            self._backward_begins()
        self._close_forward(forward)
        self._state.add_weight(forward.weight)

    def on_partial_grad(self, position: int, grad: torch.Tensor, /) -> torch.Tensor | None:
        """Return the partial gradient `grad` multiplied by the loss weight of its forward."""
        state = self._state
        if state.phase is BackwardPhase.IDLE:
            if not self._registers_outputs:
                self._note_frozen()  # since the last step
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
        if not state.weights:  # the loss uses a parameter directly, or a hidden output
            state.add_weight(self.loss_weight)
        (weight,) = state.weights
        return None if weight is None else grad * weight

    def on_gradient(self, position: int, /) -> None:
        """Move gradient number `position` into its bucket; start to reduce a complete bucket."""
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
        queue_callback(self._backward_ended)

    def _close_forward(self, forward: ForwardPass) -> None:
        """Record that a backward has reached a forward."""
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
        """Report a backward that raised, so that other ranks can finish theirs."""
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
        """Return an error of this rank's backward with its rank, and store it for other ranks."""
        number = self._group.context.health.number(self._group.ranks[self._group.rank])
        self._state.failure = f"rank {number}: {error}"
        return ConfigError(self._state.failure)

    def _positions(self) -> list[int]:
        """Return the parameters that need hooks: those that require a gradient.

        Without calls before a backward also those that may be unfrozen before it.
        """
        params = [record.param for record in self._records]
        if self._registers_outputs:
            return [position for position, param in enumerate(params) if param.requires_grad]
        return [
            position
            for position, param in enumerate(params)
            if (param.is_floating_point() or param.is_complex()) and not param.is_inference()
        ]
