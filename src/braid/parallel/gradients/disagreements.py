"""Messages about differences between ranks, derived from a status. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from braid.parallel.gradients.status import RankState, Status
from braid.parallel.gradients.table import ParamRecord
from braid.types import first_few, ranks_text

__all__ = [
    "OWN_GRADIENTS",
    "failed_ranks",
    "hooks_differ",
    "requires_grad_differs",
    "weights_differ",
]

OWN_GRADIENTS = (RankState.ACTIVE, RankState.NONFINITE)  # ranks with gradients of a whole step


def requires_grad_differs(status: Status, records: Sequence[ParamRecord]) -> str | None:
    """Describe parameters that require a gradient on some ranks only; None if there are none."""
    size = len(status.states)
    if {0, size}.issuperset(status.requires_grad):
        return None
    differing = [
        f"{record.name!r} requires a gradient on {count} of {size} ranks"
        for record, count in zip(records, status.requires_grad, strict=True)
        if 0 < count < size
    ]
    return (
        f"{first_few(differing, separator='; ')}. Gradients differ between ranks: freeze and "
        "unfreeze parameters on all ranks in the same step"
    )


def hooks_differ(status: Status, ranks: Sequence[int]) -> str | None:
    """Describe ranks without the communication hook of other ranks; None if all are equal."""
    if len(set(status.has_hook)) == 1:
        return None
    having = [rank for rank, has in zip(ranks, status.has_hook, strict=True) if has]
    lacking = [rank for rank, has in zip(ranks, status.has_hook, strict=True) if not has]
    return (
        f"a communication hook is registered on {ranks_text(having)} and none on "
        f"{ranks_text(lacking)}, so ranks do not match: call register_comm_hook with the same "
        "hook on every rank, before the first backward"
    )


def weights_differ(status: Status) -> str | None:
    """Describe loss weights that only some ranks have set; None if all or none have."""
    if not status.num_weighted:
        return None
    num_active = sum(map(OWN_GRADIENTS.__contains__, status.states))
    if status.num_weighted >= num_active:
        return None
    return (
        f"set_loss_weight() was called on {status.num_weighted} of {num_active} ranks, while the "
        "others have weight 1: the averages of this step are meaningless. Call it on every rank, "
        "with its number of samples"
    )


def failed_ranks(status: Status, ranks: Sequence[int], reasons: Sequence[str]) -> str:
    """Describe ranks whose backward raised an exception.

    Args:
        status: Status with at least one such rank.
        ranks: Global ranks of the group.
        reasons: Error text of each rank if its reducer raised the error; else an empty text.
    """
    known = "; ".join(filter(None, reasons))
    if known:
        return (
            f"{known}. Gradients of this step are meaningless on every rank: drop them with "
            "zero_grad()"
        )
    failed = [ranks[rank] for rank in status.ranks(RankState.FAILED)]
    return (
        f"an exception ended the backward of {ranks_text(failed)} (see there), so gradients of "
        "this step are meaningless on every rank. Zero them and go on with the next batch, or stop"
    )
