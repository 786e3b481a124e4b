"""Options of the engine and of the agreement; the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from braid.compat.horovod.fusion.autotune import TuneOptions
from braid.errors import ConfigError, below, raise_all

__all__ = ["FusionOptions", "StateOptions"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StateOptions:
    """Options of the agreement (`FusionState`); the same on all ranks.

    Attributes:
        threshold_bytes: Largest size of a batch.
        cache_capacity: Number of responses in the cache.
        split_groups: Whether members of explicit groups are batched like other requests.
        stall_check_s: Seconds until a name that some ranks have not submitted is reported; 0 for
            never.
        stall_shutdown_s: Seconds until such a name ends the engine; 0 for never.

    Raises:
        ConfigError: A number is negative.
    """

    threshold_bytes: int = 128 << 20
    cache_capacity: int = 1024
    split_groups: bool = False
    stall_check_s: float = 60.0
    stall_shutdown_s: float = 0.0

    def __post_init__(self) -> None:
        raise_all(
            below(
                0,
                threshold_bytes=self.threshold_bytes,
                cache_capacity=self.cache_capacity,
                stall_check_s=self.stall_check_s,
                stall_shutdown_s=self.stall_shutdown_s,
            )
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class FusionOptions:
    """Options of an engine; the same on all ranks.

    Attributes:
        state: Options of the agreement.
        cycle_time_s: Time for which requests are collected before an exchange, while no thread
            waits for one.
        algorithm: Algorithm of all_reduce, see `Group.all_reduce`.
        autotune: Search for the limit of a batch and the cycle time; they are fixed when None.

    Raises:
        ConfigError: A time is negative.
    """

    state: StateOptions = field(default_factory=StateOptions)
    cycle_time_s: float = 0.001
    algorithm: str | None = None
    autotune: TuneOptions | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.cycle_time_s < float("inf"):
            msg = f"cycle_time_s must not be negative or infinite, got {self.cycle_time_s!r}"
            raise ConfigError(msg)
