"""What is said of steps that work, but may not be meant: once, on rank 0.

Parameters that nobody uses, and forwards whose backward has never come. Of the latter torch says nothing: a rank whose loss raises an
exception that the program catches goes on to its next batch, and from then on averages gradients of other steps than its peers do.
"""

from __future__ import annotations

import warnings

from braid.params import Outcome, Standing

__all__ = ["Remarks"]

MAX_NAMES = 8


class Remarks:
    """Says each thing once.

    Args:
        ranks: Global ranks of the group.
        aloud: Whether this rank is the one that speaks.
        unused: Whether unused parameters are to be spoken of.
    """

    def __init__(self, ranks: tuple[int, ...], *, aloud: bool, unused: bool) -> None:
        self._ranks = ranks
        self._unused = aloud and unused
        self._uneven = aloud

    def of(self, outcome: Outcome) -> None:
        """Look at what an averaging has shown."""
        if self._unused and outcome.unused:
            self._unused = False
            _warn(_unused_text(outcome))
        counts = {
            self._ranks[rank]: count
            for rank, count in enumerate(outcome.status.forwards)
            if outcome.status.standings[rank] is not Standing.JOINED
        }
        if self._uneven and len(set(counts.values())) > 1:
            self._uneven = False
            _warn(_uneven_text(outcome.number, counts))


def _unused_text(outcome: Outcome) -> str:
    names, more = outcome.unused, len(outcome.unused) - MAX_NAMES
    listed = ", ".join(map(repr, names[:MAX_NAMES])) + (f" and {more} more" if more > 0 else "")
    count = "1 parameter" if len(names) == 1 else f"{len(names)} parameters"
    return (
        f"{count} got no gradient on any rank in step {outcome.number}: {listed}; .grad stays None. Said once; "
        "find_unused_parameters=True says that this is expected"
    )


def _uneven_text(number: int, counts: dict[int, int]) -> str:
    by_count: dict[int, list[int]] = {}
    for rank, count in sorted(counts.items()):
        by_count.setdefault(count, []).append(rank)
    found = ", ".join(f"{count} on {_ranks_text(by_count[count])}" for count in sorted(by_count))
    return (
        f"expected as many forwards on every rank before an averaging, found {found} before step {number}: where there are more, backward of one "
        "has never come to the model, as after an exception in the loss that is caught, and ranks are at different batches from now on. "
        "Said once; run forwards that need no backward under torch.no_grad()"
    )


def _ranks_text(ranks: list[int]) -> str:
    word = "rank" if len(ranks) == 1 else "ranks"
    more = len(ranks) - MAX_NAMES
    listed = ", ".join(map(str, ranks[:MAX_NAMES]))
    return f"{word} {listed}" + (f" and {more} more" if more > 0 else "")


def _warn(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=4)
