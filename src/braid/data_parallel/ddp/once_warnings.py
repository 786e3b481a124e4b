"""What is said of steps that work, but may not be meant: once, on rank 0.

Parameters that nobody uses, and forwards to which no backward has come. Of the latter torch says nothing: a rank whose forward or loss raises
an exception that the program catches goes on to its next batch, and from then on averages gradients of other steps than its peers do.
"""

from __future__ import annotations

import warnings

from braid.params import Outcome, Standing

__all__ = ["Remarks"]

MAX_NAMES = 8


class Remarks:
    """Says each thing once.

    Args:
        model: What it is that is trained, for the texts.
        ranks: Global ranks of the group.
        speaks: Whether this rank is the one that says it.
        names_unused: Whether unused parameters are to be spoken of.
    """

    def __init__(
        self, model: str, ranks: tuple[int, ...], *, speaks: bool, names_unused: bool
    ) -> None:
        self._model = model
        self._ranks = ranks
        self._names_unused = speaks and names_unused
        self._names_ahead = speaks

    def of(self, outcome: Outcome) -> None:
        """Look at what an averaging has shown."""
        if self._names_unused and outcome.unused:
            self._names_unused = False
            _warn(_unused_text(self._model, outcome))
        if not self._names_ahead or not any(outcome.status.unreached):
            return
        counts = {
            self._ranks[rank]: count
            for rank, count in enumerate(outcome.status.unreached)
            if outcome.status.standings[rank] is not Standing.JOINED
        }
        if len(set(counts.values())) > 1:
            self._names_ahead = False
            _warn(_ahead_text(self._model, outcome.number, counts))


def _unused_text(model: str, outcome: Outcome) -> str:
    names, more = outcome.unused, len(outcome.unused) - MAX_NAMES
    listed = ", ".join(map(repr, names[:MAX_NAMES])) + (f" and {more} more" if more > 0 else "")
    count = "1 parameter" if len(names) == 1 else f"{len(names)} parameters"
    return (
        f"{count} of {model} got no gradient on any rank in step {outcome.number}: {listed}; .grad stays None. Said once; "
        "find_unused_parameters=True says that this is expected"
    )


def _ahead_text(model: str, number: int, counts: dict[int, int]) -> str:
    by_count: dict[int, list[int]] = {}
    for rank, count in sorted(counts.items()):
        by_count.setdefault(count, []).append(rank)
    found = "; ".join(
        f"{count} on {_ranks_text(by_count[count])}" for count in sorted(by_count) if count
    )
    return (
        f"expected a backward to every forward of {model} on every rank, found forwards without one in step {number}: {found}. If an exception "
        "(in the forward or in the loss) was caught there and the batch was not tried again, that rank is one batch ahead from now on: skip such "
        "a batch on all ranks. Said once; run forwards that need no backward under torch.no_grad()"
    )


def _ranks_text(ranks: list[int]) -> str:
    word = "rank" if len(ranks) == 1 else "ranks"
    more = len(ranks) - MAX_NAMES
    listed = ", ".join(map(str, ranks[:MAX_NAMES]))
    return f"{word} {listed}" + (f" and {more} more" if more > 0 else "")


def _warn(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=4)
