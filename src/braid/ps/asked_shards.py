"""Requests that a server has not answered in full."""

from __future__ import annotations

from dataclasses import dataclass, field

from braid.ps.storage import Tensors

__all__ = ["AskedShards"]


@dataclass(slots=True)
class AskedShards:
    """A request to a server, with its unanswered shards and the answers that are ready to send.

    Attributes:
        queries: Tensors of the request for each unanswered shard.
        begun_ns: Time at which the request arrived.
        whole: Whether the request is for the whole state.
        number: Number that is requested instead of values, as in `Pull`.
        names: Names of the tensors of each whole state in `values`.
        was_parked: Whether some shard had to wait, since it could not be answered on arrival.
        accepted: Shards that have accepted the push or change.
        elsewhere: Shards that are now on other servers.
        values: Values and version of each shard that can be answered.
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
