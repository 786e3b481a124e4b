"""The claims of `braid.comm.Group` as one suite, which every group must keep, on any engine.

The claims stand by subject in the modules that are imported here; `claims` has their building
blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from support.claims import Claim
from support.host_claims import HOST_CLAIMS
from support.life_claims import LIFE_CLAIMS
from support.message_claims import MESSAGE_CLAIMS
from support.movement_claims import MOVING_CLAIMS
from support.order_claims import ORDER_CLAIMS
from support.program_claims import PROGRAM_CLAIMS
from support.reduction_claims import REDUCTION_CLAIMS
from support.refusal_claims import MISMATCHES, REFUSAL_CLAIMS, check_mismatch

__all__ = ["GROUP_CLAIMS", "check_group"]

Run = Callable[..., list[Any]]

GROUP_CLAIMS: tuple[Claim, ...] = (
    *REDUCTION_CLAIMS,
    *PROGRAM_CLAIMS,
    *HOST_CLAIMS,
    *MOVING_CLAIMS,
    *MESSAGE_CLAIMS,
    *ORDER_CLAIMS,
    *LIFE_CLAIMS,
    *REFUSAL_CLAIMS,
)


def check_group(run: Run, sizes: Sequence[int] = (1, 2, 3)) -> None:
    """Check that a kind of group keeps all claims.

    Args:
        run: `run(size, main)` calls `main(group)` on `size` ranks.
        sizes: World sizes.

    Raises:
        AssertionError: Some claim does not hold; the claim's name is in the traceback.
    """
    for size in sizes:
        for claim in GROUP_CLAIMS:
            run(size, claim)
        for kind in MISMATCHES:
            if size > 1:
                run(size, check_mismatch, kind)
