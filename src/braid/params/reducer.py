"""Gradients of all ranks, averaged bucket by bucket.

A hook on every parameter copies the gradient into its bucket, which lies in shared memory, and makes `.grad` a view of it.
The hook that completes a bucket lets it go: it offers the memory to the others. When backward ends, `finish` tells them what this rank
has (`status`), takes the steps of all that has been started and waits for the peers'. Steps in between would not end sooner: sums in shared
memory are work for the same core, and they would drive what backward computes on out of its cache. But a rank that has ended earlier sums
what all have offered meanwhile (`comm.claims`), and the last one finds it done.

    backward   p6 p5 | p4 p3 p2 | p1 p0 |
    bucket 0         >                   :====        > offered   = steps
    bucket 1                    >        :====        : finish()
    bucket 2                            >:====
    status                               >==

The status carries who has a gradient of what. So parameters that nobody has used keep `.grad` None, as in one process, and nobody has to ask
for that beforehand; buckets that nobody needs are not sent. A gradient accumulated by earlier backwards takes part, whether or not the last one added to it.

The result equals a loop over the ranks' shards in one process, bit by bit: sums are in the order of ranks, and the
division by their number happens once, at the end (`braid.data_parallel.ddp.reference`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch._compile import _disable_dynamo

from braid.comm import Group, Work
from braid.errors import CommError, ConfigError, MismatchError
from braid.params.autograd_grad import is_returned, refuse_grad
from braid.params.bucket_state import Bucket
from braid.params.bucket_times import BucketTimes
from braid.params.buckets import Buckets, StateHook
from braid.params.disagreements import (
    OWN_GRADIENTS,
    left_backward,
    trained_apart,
    weighed_apart,
)
from braid.params.gradient_hooks import Forward, GradientHooks
from braid.params.local_steps import LocalSteps
from braid.params.plans import Plan, Plans
from braid.params.reducer_options import Outcome, ReducerOptions
from braid.params.sparse import average_sparse
from braid.params.status import Standing, Status, StatusLayout
from braid.params.table import ParamRecord, ParamTable

__all__ = ["GradientReducer"]


class GradientReducer:
    """Averages gradients over a group, from hooks.

    Args:
        group: Ranks that train together.
        table: Their parameters; equal on all of them.
        options: How.

    Attributes:
        synchronize: False while gradients stay local and accumulate; looked at when backward begins.
        weight: What gradients of a forward that begins now count; every backward counts one when None.
        on_begin: Called before anything is sent for an average.
        on_exchange: Called before ranks tell each other what they have, on all of them, also if one has joined or left backward by an
            exception; what it starts goes beside that.
        on_outcome: Called after each reduction, before gradients are used.
        on_bucket: Called with the parameters of each bucket that is there, while others are on their way, and whether their averages may be used: not
            where some gradient is not finite, or an earlier call has raised.
    """

    def __init__(
        self, group: Group, table: ParamTable, options: ReducerOptions | None = None
    ) -> None:
        self._group = group
        self._records = table.records
        self._options = options or ReducerOptions()
        self._layout = StatusLayout(len(self._records), group.size)
        self._status = torch.zeros(self._layout.length, dtype=torch.float64, device=_device(group))
        self._status_request = group.persistent("all_reduce", self._status)
        self._hook: StateHook | None = None
        self._hooks = GradientHooks(
            self._records,
            on_output=self._on_output,
            on_part=self._on_part,
            on_gradient=self._on_gradient,
        )
        self._plans = Plans(group, self._records, self._options)
        self.num_reductions = 0
        self._now_ns = group.context.clock.now_ns
        self._ended_ns = self._now_ns()
        self._ready_ns: dict[int, int] = {}  # by bucket, since the last averaging ended
        self._last_times: tuple[tuple[Bucket, ...], dict[int, int]] = self.buckets.plan, {}
        self._local_steps = LocalSteps()
        self._reset_counts()
        self._hooks.place(self._plan.positions)
        self.synchronize = True
        self.weight: float | None = None
        self.buffers_used = False
        self.on_begin: Callable[[], None] | None = None
        self.on_exchange: Callable[[], Sequence[Work]] | None = None
        self.on_outcome: Callable[[Outcome], None] | None = None
        self.on_bucket: Callable[[list[ParamRecord], bool], None] | None = None

    @property
    def averages_next(self) -> bool:
        """Whether the next backward averages."""
        return self.synchronize and (self._due or self._passed + 1 >= self._options.every)

    @property
    def accumulates(self) -> bool:
        """Whether gradients of earlier backwards wait to be averaged."""
        return self._passed > 0

    def average_next(self) -> None:
        """Let the next backward average, whichever number it has."""
        self._due = True

    def restart(self) -> None:
        """What has accumulated has been dropped: count backwards from the next one; a rank whose backward broke stays in step with the others."""
        if not self._broke:
            self._drop()

    def _drop(self) -> None:
        self._passed = 0
        self._total_weight = 0.0
        self._weighted = False
        self._local_steps.forget()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside keep their gradients local."""
        before = self.synchronize
        self.synchronize = False
        try:
            yield
        finally:
            self.synchronize = before

    def use(self, hook: StateHook | None) -> None:
        """Let a communication hook take the place of the all-reduce, with its state.

        Raises:
            ConfigError: It is set during a backward, or there is one already.
        """
        if self._hook is not None and hook is not None:
            msg = (
                "expected one communication hook, found that another one has been registered before"
            )
            raise ConfigError(msg)
        if self._in_backward:
            msg = "expected a communication hook to be registered between two steps, found that backward is under way"
            raise ConfigError(msg)
        self._hook = hook

    def weigh(self, weight: float | None) -> None:
        """Set what gradients of the forwards that follow count: from now on they are scaled where they are accumulated."""
        if weight is not None:
            self._hooks.weigh()
        self.weight = weight

    def follow(self) -> None:
        """Call between steps: frees the others if the last backward was left by an exception, and sees what is trained now."""
        if _in_backward():  # a forward that is computed again
            return
        if self._in_backward:
            self._give_up()
        if self._passed and all(r.param.grad is None for r in self._records):
            self.restart()
        if self._plans.follow(accumulating=self._passed > 0):
            self._hooks.place(self._plan.positions)
        else:
            self._hooks.follow()

    # Counts in a graph would be constants, and every step another graph. `torch.compiler.disable` would do if it did not import the
    # compiler here, which takes a second; this takes it in the first call, if no optimizer of torch has done so.
    @_disable_dynamo
    def begin(self) -> None:
        """Call before each forward whose gradients shall be averaged."""
        if _in_backward():  # a forward that is computed again
            return
        self._local_steps.check(self._passed, self._options.every)
        self.follow()
        self._unreached += 1

    @_disable_dynamo
    def watch(self, outputs: Sequence[torch.Tensor]) -> None:
        """Call after each such forward that has raised nothing, with what it has returned and autograd follows."""
        counted = None if _in_backward() else self.num_reductions
        forward = Forward(self.weight, counted)
        if not self._hooks.watch(outputs, forward):
            self._reach(forward)  # no backward will come to it

    def help_others(self, weight: float) -> bool:
        """Take part in one reduction of the others; False when nobody works any more.

        What this rank has accumulated and not averaged yet takes part in the first one; after that it has nothing of its own.

        Args:
            weight: What this rank counts in their average when it brings nothing.
        """
        brings = self._passed > 0
        if brings:
            self._collect()
        else:
            self.buckets.zero(list(self.buckets.views))
        weight = self._own_weight() if brings else weight
        standing = Standing.BROKE if self._broke else Standing.JOINED
        status = self._exchange(standing, weight=weight, brings=brings and not self._broke)
        if len(status.ranks(Standing.JOINED)) == self._group.size:
            return False
        self._start_used(status)
        self._conclude(status, standing, brings=brings)
        return True

    def bucket_times(self) -> BucketTimes:
        """When the buckets of the last averaging were ready, on all ranks; a collective."""
        plan, ready_ns = self._last_times
        own = [ready_ns.get(number, 0) * 1e-9 for number in range(len(plan))]
        table = self._group.all_gather(
            torch.tensor([own], dtype=torch.float64, device=self._status.device)
        )
        return BucketTimes.of(
            self.num_reductions,
            self._group.ranks,
            [[self._records[p].name for p in bucket.members] for bucket in plan],
            table.view(self._group.size, -1).tolist(),
        )

    def close(self) -> None:
        """Remove the hooks."""
        self._hooks.close()

    # Plans.

    @property
    def buckets(self) -> Buckets:
        """Where gradients lie now."""
        return self._plan.buckets

    @property
    def _plan(self) -> Plan:
        return self._plans.current

    # One backward.

    def _reset_counts(self) -> None:
        self._in_backward = False
        self._averages = False
        self._any_gradient = False
        self._due = False
        self._drop()
        self._unreached = 0  # forwards to which no backward has come
        self._broke = False
        self._raised: Exception | None = None  # by `on_bucket`
        self._seen_weights: set[float | None] = set()
        self._spoiled: set[int] = set()

    def _enter(self) -> None:
        if self._in_backward:
            return
        self._in_backward = True
        self._averages = self.averages_next
        self._any_gradient = False
        self._seen_weights.clear()
        # runs when the engine has finished the whole backward, in the thread that called it
        torch.autograd.Variable._execution_engine.queue_callback(self._leave)  # noqa: SLF001 - there is no public way

    def _on_output(self, forward: Forward) -> None:
        self._enter()
        self._reach(forward)
        weight = forward.weight
        if self._seen_weights and weight not in self._seen_weights:
            (other,) = self._seen_weights
            msg = f"expected forwards of one weight in a backward, found {other} and {weight}: call backward for each of them"
            raise ConfigError(msg)
        self._seen_weights.add(weight)

    def _reach(self, forward: Forward) -> None:
        """Count a forward no longer among those to which no backward has come."""
        if forward.counted == self.num_reductions:
            self._unreached -= 1
        forward.counted = None

    def _on_part(self, position: int, grad: torch.Tensor) -> torch.Tensor | None:
        """A gradient is about to be accumulated: let it count what the forward counts."""
        if not self._in_backward and is_returned(self._records[position].param):
            return None
        self._enter()
        if (
            not self._seen_weights
        ):  # of a parameter that the loss uses itself, or behind an output that hides its tensors
            self._seen_weights.add(self.weight)
        (weight,) = self._seen_weights
        return None if weight is None else grad * weight

    def _on_gradient(self, position: int) -> None:
        self._enter()
        first, self._any_gradient = not self._any_gradient, True
        if not self._averages:
            return
        if first and self.on_begin is not None:
            self.on_begin()
        if self._records[position].sparse:
            return
        complete = self._plan.state.ready(position)
        self.buckets.collect(position)
        learns = self._options.static_graph and not self._plan.learnt  # how often gradients come
        if complete is not None and not learns and not self.buckets.plan[complete].delayed:
            self._start(complete)
        if position == self._plan.after:
            self._start_delayed()

    def _start_delayed(self) -> None:
        for number, bucket in enumerate(self.buckets.plan):
            full = all(map(self._plan.state.came, bucket.members))
            if bucket.delayed and full and not self._plan.state.has_left(number):
                self._start(number)

    def _start(self, number: int) -> None:
        self._spoiled.update(self.buckets.spoiled(number))
        self._plan.state.leave(number)
        self._ready_ns[number] = self._now_ns() - self._ended_ns
        self.buckets.start(number, self._hook)

    def _leave(self) -> None:
        """Autograd has ended a backward."""
        self._in_backward = False
        weight = next(iter(self._seen_weights), None)
        if weight is not None and self._any_gradient:
            self._total_weight += weight
            self._weighted = True
        if not self._any_gradient:
            refuse_grad(self._records)
        elif self._averages:
            self.finish()
        else:
            self._passed += 1
            if self.synchronize:
                self._local_steps.note(self._records)
            else:
                self._local_steps.forget()

    def finish(self) -> None:
        """Start what has not been started, and wait for all buckets; `.grad` then holds the averages."""
        for number in self._collect():
            self._start(number)
        standing = Standing.SPOILED if self._spoiled else Standing.WORKS
        standing = Standing.BROKE if self._broke else standing
        status = self._exchange(standing, weight=self._own_weight(), brings=not self._broke)
        self._start_used(status)
        self._conclude(status, standing, brings=True)

    def _collect(self) -> list[int]:
        """Bring what has been accumulated into the buckets that have not left; those that hold some of it."""
        holding = []
        for number, bucket in enumerate(self.buckets.plan):
            if self._plan.state.has_left(number):
                continue
            missing = [p for p in bucket.members if not self.buckets.collect(p)]
            self.buckets.zero(missing)
            if len(missing) < len(bucket.members):
                holding.append(number)
        for position in self._plan.sparse:
            grad = self._records[position].param.grad
            numbers = None if grad is None else grad._values() if grad.is_sparse else grad  # noqa: SLF001 - values() wants it coalesced
            if numbers is not None and not bool(numbers.isfinite().all()):
                self._spoiled.add(position)
        return holding

    def _own_weight(self) -> float:
        """What this rank counts."""
        return self._total_weight if self._weighted else 1.0

    def _give_up(self) -> None:
        """The last backward was left by an exception: let the others end theirs, and tell them."""
        if self._averages:
            if not self._any_gradient and self.on_begin is not None:
                self.on_begin()
            for number, bucket in enumerate(self.buckets.plan):
                if not self._plan.state.has_left(number):
                    self.buckets.zero(bucket.members)
            status = self._exchange(Standing.BROKE, weight=1.0, brings=False)
            self._start_used(status)
            self.buckets.wait()  # averages come, and may come over zeros of the program
            self.buckets.zero(list(self.buckets.views))
            self._end_step()
        else:  # it is told when this rank averages next, as the others do
            self._passed += 1
            self._broke = True
        self._in_backward = False

    def _exchange(self, standing: Standing, *, weight: float, brings: bool) -> Status:
        """Tell the others what this rank has, and hear what they have; a collective."""
        own = self._layout.encode(
            self._group.rank,
            present=[
                brings and trained and r.param.grad is not None
                for r, trained in zip(self._records, self._plan.trained, strict=True)
            ],
            spoiled=[p in self._spoiled for p in range(len(self._records))],
            trained=self._plan.trained,
            standing=standing,
            unreached=self._unreached,
            weight=weight,
            weighed=self._weighted and standing in OWN_GRADIENTS,
            buffers=self.buffers_used and standing is not Standing.JOINED,
        )
        self._status.copy_(torch.tensor(own, dtype=torch.float64))
        beside = () if self.on_exchange is None else self.on_exchange()
        self._status_request.start().wait()
        for work in beside:
            work.wait()
        status = self._layout.decode(self._status.tolist())
        differ = trained_apart(status, self._records)
        if differ is not None:
            self._group.abort(differ)  # buckets on their way will never be matched
            raise MismatchError(differ)
        self._plans.agree()
        return status

    def _start_used(self, status: Status) -> None:
        """Let buckets go of which this rank has nothing, if some other rank has."""
        for number, bucket in enumerate(self.buckets.plan):
            used = any(status.present[p] for p in bucket.members) or status.ranks(Standing.BROKE)
            if used and not self._plan.state.has_left(number):
                self._start(number)

    def _conclude(self, status: Status, standing: Standing, *, brings: bool) -> None:
        broken = left_backward(status, self._group.ranks)
        if broken is not None:
            self.buckets.wait()
            self._end_step()
            if standing is Standing.JOINED:
                return
            raise CommError(broken)
        mean = status.weight / self._group.size
        self.buckets.wait(partial(self._bucket_came, status, mean))
        for position in self._plan.sparse:
            if status.present[position]:
                param = self._records[position].param
                grad = param.grad if brings else None
                param.grad = average_sparse(self._group, param, grad, mean)
        outcome = Outcome(self.num_reductions + 1, status, self._records)
        self._last_times = self.buckets.plan, self._ready_ns
        if not self._plan.learnt:
            if self._options.static_graph:
                self._plan.state.learn()
                self._plan.learnt = True
            else:
                self._plans.improve(self._status.device)
        raised = self._raised
        self._end_step()
        differ = weighed_apart(status)
        if differ is not None:
            raise MismatchError(differ)
        if self.on_outcome is not None:
            self.on_outcome(outcome)
        if raised is not None:
            raise raised

    def _bucket_came(self, status: Status, mean: float, number: int) -> None:
        """A bucket is there: let `.grad` hold the averages."""
        if mean != 1.0 and mean > 0:
            self.buckets.scale(number, 1.0 / mean)
        members = self.buckets.plan[number].members
        present = [p for p in members if status.present[p]]
        if len(present) < len(members):
            self.buckets.owe_unused([p for p in members if not status.present[p]])
        for position in present:
            param = self._records[position].param
            if param.grad is None:  # some other rank has used it
                param.grad = self.buckets.views[position].detach()
        if self.on_bucket is None:
            return
        usable = not any(status.spoiled) and self._raised is None
        try:
            self.on_bucket([self._records[position] for position in present], usable)
        except Exception as error:  # noqa: BLE001 - raised when this rank has gone with the others to the end of the step
            self._raised = error

    def _end_step(self) -> None:
        self.num_reductions += 1
        self._ready_ns = {}
        self._ended_ns = self._now_ns()
        self._plan.state.reset()
        self._reset_counts()


def _in_backward() -> bool:
    """Whether autograd is at work in this thread."""
    return torch._C._current_graph_task_id() != -1  # noqa: SLF001 - there is no public way


def _device(group: Group) -> torch.device:
    """Where a group takes small messages."""
    kinds = group.engine.device_types
    return torch.device("cpu" if "cpu" in kinds else min(kinds))
