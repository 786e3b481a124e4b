"""Messages about differences between ranks that a status shows. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from braid.params.status import RankState, Status
from braid.params.table import ParamRecord
from braid.types import first_few

__all__ = ["OWN_GRADIENTS", "failed_ranks", "requires_grad_differs", "weights_differ"]

OWN_GRADIENTS = (RankState.ACTIVE, RankState.NONFINITE)  # ranks that bring those of a whole step


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
        f"{first_few(differing, separator='; ')}. Freeze and unfreeze parameters on all "
        "ranks in the same step"
    )


def weights_differ(status: Status) -> str | None:
    """Describe loss weights that only some ranks have set; None if all or none have."""
    if not status.num_weighted:
        return None
    own = sum(map(OWN_GRADIENTS.__contains__, status.states))
    if status.num_weighted >= own:
        return None
    return (
        f"set_loss_weight() was called on {status.num_weighted} of {own} ranks, beside which the "
        "others count 1: the averages of this step are meaningless. Call it on every rank, with "
        "its number of samples"
    )


def failed_ranks(status: Status, ranks: Sequence[int]) -> str | None:
    """Describe ranks whose backward raised an exception; None if there are none."""
    if RankState.FAILED not in status.states:
        return None
    failed = [ranks[rank] for rank in status.ranks(RankState.FAILED)]
    named = f"rank {failed[0]}" if len(failed) == 1 else f"ranks {', '.join(map(str, failed))}"
    return (
        f"an exception ended the backward of {named} (see there), so gradients of this step are "
        "meaningless on every rank. Zero them and go on with the next batch, or stop"
    )
