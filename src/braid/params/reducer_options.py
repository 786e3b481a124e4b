"""How gradients are reduced, and what a reduction has shown: the two ends of `GradientReducer` as data."""

from __future__ import annotations

from dataclasses import dataclass, field

from braid.errors import ConfigError
from braid.params.bucket_state import Caps
from braid.params.status import Status
from braid.params.table import ParamRecord

__all__ = ["Outcome", "ReducerOptions"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReducerOptions:
    """How gradients are reduced.

    Attributes:
        caps: When buckets are closed.
        wire: Format in which float32 gradients cross a network; as they are when None.
        every: Average in every k-th backward; the others accumulate.
        static_graph: Every backward uses the same parameters, equally often; some may get their gradient in parts.
        delayed: Names of parameters that leave in buckets of their own.
        delayed_after: Name of the parameter whose gradient lets them go; the end of backward when empty.
        check_all: Look at every number for NaN and Inf, rather than at one of each gradient.

    Raises:
        ConfigError: `every` is less than 1.
    """

    caps: Caps = field(default_factory=Caps)
    wire: str | None = None
    every: int = 1
    static_graph: bool = False
    delayed: frozenset[str] = frozenset()
    delayed_after: str = ""
    check_all: bool = False

    def __post_init__(self) -> None:
        if type(self.every) is not int or self.every < 1:
            msg = f"expected every to be a number of backwards from 1, found {self.every!r}"
            raise ConfigError(msg)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a reduction has shown, the same on all ranks.

    Attributes:
        number: How many there have been, from 1.
        status: What all ranks said.
        records: The parameters that it speaks of.
    """

    number: int
    status: Status
    records: tuple[ParamRecord, ...]

    @property
    def unused(self) -> list[str]:
        """Names of trained parameters that have no gradient on any rank."""
        flags = zip(self.records, self.status.present, self.status.trained, strict=True)
        return [record.name for record, present, trained in flags if trained and not present]

    @property
    def spoiled(self) -> list[str]:
        """Names of parameters whose gradients are not finite on some rank."""
        return [r.name for r, count in zip(self.records, self.status.spoiled, strict=True) if count]
