"""A request to a server, until all of its shards are answered."""

from __future__ import annotations

from dataclasses import dataclass, field

from braid.ps.storage import Tensors

__all__ = ["AskedShards"]


@dataclass(slots=True)
class AskedShards:
    """A request of which shards are unanswered.

    Attributes:
        queries: Tensors with which it asks each shard.
        begun_ns: Time at which it came.
        whole: Whether it asks for the whole state.
        number: Number that it asks for instead of values, as in `Pull`.
        names: Names of that state's tensors.
        was_parked: Whether it could not be answered when it came.
        ready: Shards that can be answered now, by the kind of answer.
    """

    queries: dict[int, Tensors]
    begun_ns: int
    whole: bool = False
    number: str = ""
    names: list[list[str]] = field(default_factory=list)
    was_parked: bool = False
    accepted: list[int] = field(default_factory=list)
    elsewhere: list[int] = field(default_factory=list)
    values: dict[int, tuple[Tensors, int]] = field(default_factory=dict)
