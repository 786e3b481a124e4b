"""The answers of a server: requests that are not answered in full, and the shards that are ready.

A request concerns several shards, which may be ready at different times. Each answer has the shards
that are ready when it is sent, and the rest of the request stays open.

    Pull of shards 0 1 2     resolve(0) resolve(2)   send ──> Pulled 0 2
                             resolve(1)              send ──> Pulled 1
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from braid.ps.messages import Accepted, Elsewhere, Pulled
from braid.ps.postoffice import Postoffice
from braid.ps.protocol.instructions import Accept, AnswerPull, Moved, Request
from braid.ps.shard import TableShard
from braid.ps.storage import Tensors
from braid.runtime.message import split_node
from braid.runtime.tensor_buffers import as_buffers

__all__ = ["Answers"]


class AskedShards(msgspec.Struct):
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
    names: list[list[str]] = []
    was_parked: bool = False
    accepted: list[int] = []
    elsewhere: list[int] = []
    values: dict[int, tuple[Tensors, int]] = {}


class Answers:
    """Open requests to a server; sends their answers.

    Args:
        postoffice: Sends and receives the node's messages.
    """

    def __init__(self, postoffice: Postoffice) -> None:
        self._postoffice = postoffice
        self._asked: dict[Request, AskedShards] = {}
        self._ready: set[Request] = set()

    def add(
        self,
        request: Request,
        queries: Mapping[int, Tensors],
        *,
        whole: bool = False,
        number: str = "",
    ) -> None:
        """Add a request with its tensors for each shard; see `Pull` for `whole` and `number`."""
        begun_ns = self._postoffice.events.now_ns()
        self._asked[request] = AskedShards(dict(queries), begun_ns, whole, number)

    def drop(self, request: Request) -> None:
        """Drop a request, which is refused; some of its shards may have been ready."""
        self._asked.pop(request, None)
        self._ready.discard(request)

    def note_parked(self, request: Request, shard: int) -> None:
        """Record whether a pull must wait for a shard, after the shard has decided."""
        self._asked[request].was_parked |= shard in self._asked[request].queries

    def resolve(self, shard: TableShard, how: Accept | AnswerPull | Moved) -> None:
        """Queue a shard's answer for the next message to the requester."""
        asked = self._asked.get(how.request)
        if asked is None or shard.number not in asked.queries:
            return
        query = asked.queries.pop(shard.number)
        self._ready.add(how.request)
        _, worker = split_node(how.request[0])
        if isinstance(how, Accept):
            asked.accepted.append(shard.number)
        elif isinstance(how, Moved):
            asked.elsewhere.append(shard.number)
        elif asked.number:
            oldest = shard.state.applied.oldest_task
            number = shard.state.clock(worker) if asked.number == "clock" else oldest
            asked.values[shard.number] = (), number
        elif asked.whole:
            shard.step()
            state = shard.storage.export()
            asked.names.append(list(state))
            asked.values[shard.number] = tuple(state.values()), shard.state.applied.number
        else:
            asked.values[shard.number] = shard.read(worker, query)

    def send(self) -> None:
        """Send the answers that are ready, one message for each kind."""
        ready, self._ready = self._ready, set()
        for request in sorted(ready):
            asked = self._asked[request]
            self._send(request, asked)
            if asked.queries:
                asked.accepted, asked.elsewhere, asked.values, asked.names = [], [], {}, []
            else:
                del self._asked[request]

    def _send(self, request: Request, asked: AskedShards) -> None:
        office, (node, number) = self._postoffice, request
        if asked.accepted:
            office.send(node, Accepted(tuple(asked.accepted)), answers=number)
        if asked.elsewhere:
            elsewhere = Elsewhere(tuple(asked.elsewhere), office.epoch)
            office.send(node, elsewhere, answers=number)
        if not asked.values:
            return
        specs, buffers, versions = [], [], []
        for values, version in asked.values.values():
            shard_specs, views = as_buffers(values)
            specs.append(shard_specs)
            buffers.extend(views)
            versions.append(version)
        pulled = Pulled(tuple(asked.values), number, specs, tuple(versions), asked.names)
        office.send(node, pulled, buffers, answers=number)
        if asked.was_parked:
            waited_ns = office.events.now_ns() - asked.begun_ns
            office.events.complete("parked pull", asked.begun_ns, waited_ns)
