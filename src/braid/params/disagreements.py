"""What ranks may not do differently, found in what they told each other, in words. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from braid.params.status import Standing, Status
from braid.params.table import ParamRecord

__all__ = ["OWN_GRADIENTS", "left_backward", "trained_apart", "weighed_apart"]

MAX_SHOWN = 8
OWN_GRADIENTS = (Standing.WORKS, Standing.SPOILED)  # of ranks that bring gradients of a whole step


def trained_apart(status: Status, records: Sequence[ParamRecord]) -> str | None:
    """Parameters that some ranks train and others do not; None if there are none."""
    size = len(status.standings)
    differ = [
        f"{record.name!r} requires a gradient on {count} of {size} ranks"
        for record, count in zip(records, status.trained, strict=True)
        if 0 < count < size
    ]
    if not differ:
        return None
    return (
        f"expected the same parameters to be trained on every rank, found that {'; '.join(differ[:MAX_SHOWN])}: freeze and unfreeze "
        "parameters on all ranks in the same step"
    )


def weighed_apart(status: Status) -> str | None:
    """Weights on some ranks only, while the gradients of others count one; None if there are none."""
    own = sum(standing in OWN_GRADIENTS for standing in status.standings)
    if not 0 < status.weighed < own:
        return None
    return (
        f"expected weigh() on all ranks or on none, found it on {status.weighed} of {own}, beside which the others count 1: averages of this step "
        "mean nothing; call it on every rank, with the number of its samples"
    )


def left_backward(status: Status, ranks: Sequence[int]) -> str | None:
    """Ranks that left backward by an exception; None if there are none."""
    broke = [ranks[rank] for rank in status.ranks(Standing.BROKE)]
    if not broke:
        return None
    named = f"rank {broke[0]}" if len(broke) == 1 else f"ranks {', '.join(map(str, broke))}"
    return (
        f"expected gradients of all {len(ranks)} ranks, found that {named} left backward by an exception (see there): gradients of this step "
        "mean nothing on any rank; zero them and go on with the next batch, or stop"
    )
