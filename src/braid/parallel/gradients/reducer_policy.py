"""Decisions of a gradient reducer: which buckets to send, and when. Pure."""

from __future__ import annotations

from typing import NamedTuple

from braid.parallel.gradients.backward_state import BackwardPhase, BackwardState
from braid.parallel.gradients.bucket_layout import BucketLayout
from braid.parallel.gradients.reducer_options import ReducerOptions
from braid.parallel.gradients.status import RankState, Status

__all__ = ["ReducerPolicy"]


class ReducerPolicy(NamedTuple):
    """Decisions of one rank about when to launch buckets and which state to report.

    Attributes:
        options: Options of the reducer.
    """

    options: ReducerOptions

    def next_phase(self, state: BackwardState, *, synchronizes: bool) -> BackwardPhase:
        """Return the kind of the backward that begins next.

        Args:
            state: State between two backwards.
            synchronizes: False while the program keeps gradients local.
        """
        last = state.num_accumulated + 1 >= self.options.gradient_accumulation_steps
        return (
            BackwardPhase.AVERAGING
            if synchronizes and (last or state.averages_next)
            else BackwardPhase.LOCAL
        )

    def launches_early(self, layout: BucketLayout, *, is_learnt: bool) -> bool:
        """Return whether a bucket is reduced as soon as all of its gradients are ready.

        Args:
            layout: Layout of the bucket.
            is_learnt: Whether a complete backward has shown how often each gradient comes, which
                a static graph needs.
        """
        return not layout.delayed and (is_learnt or not self.options.static_graph)

    def rank_state(self, state: BackwardState, *, is_finite: bool) -> RankState:
        """Return the state that this rank reports to other ranks, if it has input.

        Args:
            state: State of the backwards since the last average.
            is_finite: Whether this rank's gradients are finite.
        """
        if state.failed:
            return RankState.FAILED
        return RankState.ACTIVE if is_finite else RankState.NONFINITE

    def is_needed(self, layout: BucketLayout, status: Status) -> bool:
        """Return whether to reduce a bucket for which this rank has no gradients.

        It is reduced if any rank has gradients for it. If a rank's backward has raised, all
        buckets are reduced, since that rank may have begun to reduce some of them.
        """
        present = map(status.present.__getitem__, layout.members)
        return any(present) or RankState.FAILED in status.states

    def mean_weight(self, status: Status) -> float:
        """Return the divisor that converts means over ranks to means weighted by loss weights."""
        mean = status.weight / len(status.states)
        return mean if mean > 0 else 1.0
