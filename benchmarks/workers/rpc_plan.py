"""Options of `rpc`, shared by its command and its processes."""

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
        num_small: Number of small calls in a round; their median is used.
        window: Number of concurrent calls.
        requests: Number of requests of each observer.
        with_torch: Whether torch's RPC is also measured.
    """

    parts: tuple[str, ...] = PARTS
    num_small: int = 300
    window: int = 2000
    requests: int = 50
    with_torch: bool = True
