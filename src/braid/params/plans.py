"""Plans of buckets by what is trained: made for it, improved after its first backward, kept where it comes back.

Problem: programs freeze and unfreeze. Some do it once, for fine tuning; others in every step, as adversarial pairs do, and then new
buffers in shared memory and a new order to agree on would cost more than the step itself. But a plan that is kept keeps its buffers.

Idea: what is trained is the key. When it changes, the old plan goes, unless its key has come back before: from then on that
program alternates, and its plans stay, the last few of them. What goes gives up its memory and its channels.

It goes when all ranks have said that they train the same. Until then one of them may be alone: it runs the model once with parameters that
are frozen, to look at something, and comes back. Nobody else sees that, so its plan and its channels must be those of before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import or_

import torch

from braid.comm import Group
from braid.params.bucket_state import Bucket, BucketState, held_back, plan_buckets
from braid.params.buckets import Buckets
from braid.params.reducer_options import ReducerOptions
from braid.params.table import ParamRecord

__all__ = ["Plan", "Plans"]

PAYS = 0.9  # share of the present waiting that is left by a plan that is worth new buffers
MAX_KEPT = 4  # plans of programs that alternate
MAX_SEEN = 64  # what has been trained lately; programs may choose at random in every step


class Plan:
    """Buckets of what is trained, and how far a backward has filled them.

    Attributes:
        trained: By parameter, whether it requires a gradient.
        buckets: Memory and requests of the dense ones.
        state: Counts what is ready.
        sparse: Positions of sparse parameters.
        after: Position whose gradient lets delayed buckets go; -1 for the end of backward.
        learnt: Whether a whole backward has been seen.
    """

    def __init__(
        self,
        group: Group,
        records: Sequence[ParamRecord],
        trained: tuple[bool, ...],
        options: ReducerOptions,
        order: Sequence[int] = (),
    ) -> None:
        self.trained = trained
        own = {p: r for p, r in enumerate(records) if trained[p]}
        dense = {p: r for p, r in own.items() if not r.sparse}
        self.sparse = [p for p, r in own.items() if r.sparse]
        self.after = next((p for p, r in own.items() if options.delayed_after in r.names), -1)
        self.specs = {p: r.spec for p, r in dense.items()}
        self.devices = {p: str(r.param.device) for p, r in dense.items()}
        self.delayed = frozenset(p for p, r in dense.items() if options.delayed & set(r.names))
        plan = self.divide(options, order)
        self.buckets = Buckets(group, plan, dense, wire=options.wire, check_all=options.check_all)
        self.state = BucketState(plan, {p: r.name for p, r in enumerate(records)})
        self.learnt = False

    @property
    def positions(self) -> list[int]:
        """Of what is trained."""
        return [position for position, trained in enumerate(self.trained) if trained]

    def divide(self, options: ReducerOptions, order: Sequence[int]) -> tuple[Bucket, ...]:
        """These parameters in buckets for gradients that come in `order`."""
        return plan_buckets(
            self.specs, options.caps, order=order, delayed=self.delayed, devices=self.devices
        )


class Plans:
    """The plan of what is trained now, and those that are kept.

    Args:
        group: Ranks that reduce together.
        records: Their parameters.
        options: How.

    Attributes:
        current: Of what is trained now.
    """

    def __init__(
        self, group: Group, records: Sequence[ParamRecord], options: ReducerOptions
    ) -> None:
        self._group = group
        self._records = records
        self._options = options
        self._seen: deque[tuple[bool, ...]] = deque(maxlen=MAX_SEEN)
        self._kept: dict[tuple[bool, ...], Plan] = {}  # the one that was used last comes last
        self.current = self._agreed = Plan(group, records, self._trained(), options)

    def follow(self, *, accumulating: bool) -> bool:
        """Look at what is trained now; whether that has changed, and with it the plan.

        Args:
            accumulating: Gradients have come that are not averaged yet; those of what is frozen meanwhile shall be, too.
        """
        old = self.current
        held = old.trained if accumulating else (False,) * len(old.trained)
        trained = tuple(map(or_, self._trained(), held))
        if trained == old.trained:
            return False
        left_out = old.buckets.residuals()
        old.buckets.owe({})  # the plan that comes has them
        known = {plan.trained: plan for plan in (*self._kept.values(), self._agreed)}
        if old not in known.values():  # and nobody else knows it
            old.buckets.retire()
        # on channels of its own: a rank that changes alone must not be taken for one that sends the old buckets wrongly
        self.current = known.get(trained) or Plan(
            self._group, self._records, trained, self._options
        )
        self.current.buckets.owe(left_out)
        return True

    def agree(self) -> None:
        """All ranks train what this plan is for, and have heard it of each other."""
        old, self._agreed = self._agreed, self.current
        if old is self.current:
            return
        self._kept.pop(self.current.trained, None)
        if old.trained in self._seen:
            self._kept[old.trained] = old
        else:
            self._seen.append(old.trained)
            old.buckets.retire()
        if len(self._kept) > MAX_KEPT:
            self._kept.pop(next(iter(self._kept))).buckets.retire()

    def improve(self, device: torch.device) -> None:
        """After the first backward: fill buckets in the order in which rank 0's gradients came, if that pays; a collective.

        Args:
            device: Where the group takes small messages.
        """
        plan = self.current
        dense = [p for bucket in plan.buckets.plan for p in bucket.members]
        came = plan.state.order + [p for p in dense if not plan.state.came(p)]
        agreed = torch.tensor(came, dtype=torch.int64, device=device)
        self._group.broadcast(agreed, 0)
        order: list[int] = agreed.tolist()
        better = plan.divide(self._options, order)
        before = held_back(plan.buckets.plan, plan.specs, order)
        if not plan.delayed and held_back(better, plan.specs, order) < PAYS * before:
            left_out = plan.buckets.residuals()
            better_plan = Plan(self._group, self._records, plan.trained, self._options, order)
            better_plan.buckets.owe(left_out)
            self.current = self._agreed = better_plan
            plan.buckets.retire()
        self.current.learnt = True

    def _trained(self) -> tuple[bool, ...]:
        return tuple(record.param.requires_grad for record in self._records)

    def __repr__(self) -> str:
        return f"Plans({self.current.buckets!r}, {len(self._kept)} kept)"
