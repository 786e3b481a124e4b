"""One-time warnings about steps that are legal but probably unintended, on rank 0.

Two cases: parameters without a gradient on any rank, and forwards without a backward. torch does
not warn about the second: if the forward or loss of a rank raises an exception that the program
catches, the rank continues with its next batch, and averages gradients of other steps from then on.
"""

from __future__ import annotations

import warnings

from braid.parallel.gradients import AveragingOutcome, RankState
from braid.types import first_few, ranks_text

__all__ = ["OnceWarnings"]


class OnceWarnings:
    """Emitter of warnings about unused parameters and skipped backwards, each at most once.

    Args:
        model: Name of the model in the messages.
        ranks: Global ranks of the group.
        is_speaker: Whether this rank emits the warnings.
        names_unused: Whether to warn about unused parameters.
    """

    def __init__(
        self, model: str, ranks: tuple[int, ...], *, is_speaker: bool, names_unused: bool
    ) -> None:
        self._model = model
        self._ranks = ranks
        self._names_unused = is_speaker and names_unused
        self._names_ahead = is_speaker

    def check(self, outcome: AveragingOutcome) -> None:
        """Warn if an averaging shows unused parameters or skipped backwards."""
        if self._names_unused and outcome.unused:
            self._names_unused = False
            _warn(_unused_text(self._model, outcome))
        forwards = outcome.status.num_forwards_without_backward
        if not self._names_ahead or not any(forwards):
            return
        counts = {
            self._ranks[rank]: count
            for rank, count in enumerate(forwards)
            if outcome.status.states[rank] is not RankState.JOINED
        }
        if len(set(counts.values())) > 1:
            self._names_ahead = False
            _warn(_ahead_text(self._model, outcome.number, counts))


def _unused_text(model: str, outcome: AveragingOutcome) -> str:
    names = outcome.unused
    listed = first_few(map(repr, names))
    count = "1 parameter" if len(names) == 1 else f"{len(names)} parameters"
    return (
        f"{count} of {model} got no gradient on any rank in step {outcome.number}: {listed}; .grad "
        "stays None. Shown once; find_unused_parameters=True turns this warning off"
    )


def _ahead_text(model: str, number: int, counts: dict[int, int]) -> str:
    by_count: dict[int, list[int]] = {}
    for rank, count in sorted(counts.items()):
        by_count.setdefault(count, []).append(rank)
    listed = "; ".join(
        f"{count} on {ranks_text(by_count[count], 8)}" for count in sorted(by_count) if count
    )
    return (
        f"{model} ran forwards without a backward in step {number}: {listed}. If an exception "
        "(in the forward or in the loss) was caught there that rank is one batch ahead from now "
        "on: skip such a batch on all ranks. Shown once; run forwards that need no backward "
        "under torch.no_grad()"
    )


def _warn(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=4)
