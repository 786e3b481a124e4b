"""Plan of `rpc`, which its front and its processes share."""

from __future__ import annotations

import msgspec

__all__ = ["BRAID", "BYTES", "OBSERVERS", "PARTS", "TORCH", "Plan"]

BRAID, TORCH = "braid", "torch"
PARTS = ("small", "1 MiB", "16 MiB", "windowed", "autograd", "serving")
OBSERVERS = 8
BYTES = {"1 MiB": 1 << 20, "16 MiB": 16 << 20}


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements to make.

    Attributes:
        parts: Names out of `PARTS`.
        num_small: Small calls in a round, of which the median counts.
        window: Calls that are under way at the same time.
        requests: Requests of each observer.
        with_torch: Whether torch's RPC is measured, too.
    """

    parts: tuple[str, ...] = PARTS
    num_small: int = 300
    window: int = 2000
    requests: int = 50
    with_torch: bool = True
