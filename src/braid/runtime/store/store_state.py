"""State machine of a store: requests in, replies out, some of them later.

Problem: ranks need a place to meet before they can communicate. Operations that block (`get` of a
key that another rank will set) and deadlines are the most error-prone parts of such a service, and
the hardest to test.

Idea: `StoreTable` holds the keys and applies one request at a time. `StoreState` adds waiting: a
request for missing keys waits in the state until they are set or its deadline passes. Neither uses
sockets, threads or clocks. The server passes the time in, `HashStore` shares one state between
threads, `FileStore` replays a log of requests through a `StoreTable`.

    request                    keys set                  keys missing
    Set, MultiSet              -> None                   creates them
    Append                     -> None                   creates it
    Add                        -> new number             counts from 0
    CompareSet                 sets if equal             sets if `expected` is empty -> value after,
                               -> value after            else -> `expected`
    Get, MultiGet, StoreWait   -> value, values, None    waits; at its deadline -> Missing
    Check                      -> True                   -> False
    Delete                     -> True                   -> False
    NumKeys                    -> number of keys

Source: the operations and edge cases of torch.distributed.Store, except that an addition to a value
that is not a number is refused here, but ends the connection of torch's TCPStore.
"""

from __future__ import annotations

import heapq
import re
from typing import NamedTuple, TypeAlias

import msgspec

__all__ = [
    "Add",
    "AddressedReply",
    "Append",
    "Check",
    "CompareSet",
    "Delete",
    "Get",
    "Missing",
    "MultiGet",
    "MultiSet",
    "NumKeys",
    "Refusal",
    "Reply",
    "Request",
    "Set",
    "StoreAnswer",
    "StoreState",
    "StoreTable",
    "StoreWait",
    "Value",
]

_NUMBER = re.compile(rb"-?[0-9]{1,19}")
_INT64 = range(-(1 << 63), 1 << 63)

Value: TypeAlias = bytes | int | bool | list[bytes] | None


class Set(msgspec.Struct, tag="set", array_like=True, frozen=True):
    """Request: set `key` to `value`."""

    key: str
    value: bytes


class Get(msgspec.Struct, tag="get", array_like=True, frozen=True):
    """Request: return the value of `key`; wait until it is set."""

    key: str


class Add(msgspec.Struct, tag="add", array_like=True, frozen=True):
    """Request: add `amount` to the decimal number in `key`."""

    key: str
    amount: int


class CompareSet(msgspec.Struct, tag="cas", array_like=True, frozen=True):
    """Request: set `key` to `desired` if it holds `expected`."""

    key: str
    expected: bytes
    desired: bytes


class StoreWait(msgspec.Struct, tag="wait", array_like=True, frozen=True):
    """Request: wait until all `keys` are set."""

    keys: list[str]


class Check(msgspec.Struct, tag="check", array_like=True, frozen=True):
    """Request: return whether all `keys` are set."""

    keys: list[str]


class Delete(msgspec.Struct, tag="del", array_like=True, frozen=True):
    """Request: remove `key`; return whether it was set."""

    key: str


class NumKeys(msgspec.Struct, tag="num", array_like=True, frozen=True):
    """Request: return the number of keys."""


class MultiGet(msgspec.Struct, tag="mget", array_like=True, frozen=True):
    """Request: return the values of `keys`; wait until all are set."""

    keys: list[str]


class MultiSet(msgspec.Struct, tag="mset", array_like=True, frozen=True):
    """Request: set several keys together, so that no client sees only some of them."""

    items: dict[str, bytes]


class Append(msgspec.Struct, tag="append", array_like=True, frozen=True):
    """Request: append `value` to the value of `key`."""

    key: str
    value: bytes


Request: TypeAlias = (
    Set
    | Get
    | Add
    | CompareSet
    | StoreWait
    | Check
    | Delete
    | NumKeys
    | MultiGet
    | MultiSet
    | Append
)


class StoreAnswer(msgspec.Struct, tag="ok", array_like=True, frozen=True):
    """Reply to a request that was executed."""

    value: Value


class Missing(msgspec.Struct, tag="missing", array_like=True, frozen=True):
    """Reply to a request that waited for `keys` until its deadline, in vain."""

    keys: list[str]


class Refusal(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """Reply to a request that cannot be executed, with the reason."""

    reason: str


Reply: TypeAlias = StoreAnswer | Missing | Refusal


class StoreTable:
    """Keys and values, with the effect of each request. Deterministic."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def missing(self, request: Request) -> list[str]:
        """Return the keys that `request` has to wait for, in its order."""
        if isinstance(request, Get):
            return [] if request.key in self.values else [request.key]
        if isinstance(request, (StoreWait, MultiGet)):
            return [key for key in dict.fromkeys(request.keys) if key not in self.values]
        return []

    def apply(self, request: Request) -> Reply:
        """Execute `request`, or return the missing keys."""
        absent = self.missing(request)
        if absent:
            return Missing(absent)
        values = self.values
        result: Value = None
        match request:
            case Set(key, value):
                values[key] = value
            case Get(key):
                result = values[key]
            case Check(keys):
                result = all(key in values for key in keys)
            case MultiGet(keys):
                result = [values[key] for key in keys]
            case MultiSet(items):
                values.update(items)
            case Append(key, value):
                values[key] = values.get(key, b"") + value
            case Delete(key):
                result = values.pop(key, None) is not None
            case NumKeys():
                result = len(values)
            case CompareSet():
                result = self._compare_set(request)
            case Add():
                return self._add(request)
        return StoreAnswer(result)

    def _compare_set(self, request: CompareSet) -> bytes:
        current = self.values.get(request.key)
        if current == request.expected or (current is None and not request.expected):
            current = self.values[request.key] = request.desired
        return request.expected if current is None else current

    def _add(self, request: Add) -> Reply:
        text = self.values.get(request.key, b"0")
        if not _NUMBER.fullmatch(text):
            return Refusal(
                f"key {request.key!r} holds {text[:40]!r}, which is not a decimal number: use "
                "another key for the counter"
            )
        total = int(text) + request.amount
        if total not in _INT64:
            return Refusal(
                f"the sum {total} in key {request.key!r} does not fit into 64 bits: set it again"
            )
        self.values[request.key] = str(total).encode()
        return StoreAnswer(total)


class AddressedReply(NamedTuple):
    """A reply, with the client and the request that it belongs to.

    Attributes:
        client: Client that sent the request.
        number: Number that the client gave to the request.
        reply: The reply.
    """

    client: int
    number: int
    reply: Reply


class _Waiting(NamedTuple):
    """A request that waits for keys; ordered by deadline."""

    deadline_ns: int
    order: int
    client: int
    number: int
    request: Request


class StoreState:
    """A `StoreTable` together with the requests that wait for missing keys."""

    def __init__(self) -> None:
        self._table = StoreTable()
        self._waiting: dict[tuple[int, int], _Waiting] = {}
        self._by_key: dict[str, set[tuple[int, int]]] = {}  # requests that wait for a key
        self._deadlines: list[_Waiting] = []  # a heap; may hold requests that no longer wait
        self._order = 0

    @property
    def num_keys(self) -> int:
        """Number of keys in the table."""
        return len(self._table.values)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a key."""
        return len(self._waiting)

    def request(
        self, client: int, number: int, request: Request, *, now_ns: int, timeout_ns: int
    ) -> list[AddressedReply]:
        """Execute `request`, or keep it until its keys are set.

        Returns all replies to send now: to this client, and to clients that waited for these keys.

        Args:
            client: Client that sent the request.
            number: Number that the client gave to the request; unique while it waits.
            request: The request.
            now_ns: Current time.
            timeout_ns: Nanoseconds to wait for missing keys.
        """
        if (client, number) in self._waiting:
            reason = f"request {number} of this client is still unanswered: use another number"
            return [AddressedReply(client, number, Refusal(reason))]
        reply = self._table.apply(request)
        if isinstance(reply, Missing) and timeout_ns > 0:
            self._order += 1
            waiting = _Waiting(now_ns + timeout_ns, self._order, client, number, request)
            self._waiting[client, number] = waiting
            heapq.heappush(self._deadlines, waiting)
            for key in reply.keys:
                self._by_key.setdefault(key, set()).add((client, number))
            return []
        due = [AddressedReply(client, number, reply)]
        if self._by_key:
            for key in _written_keys(request):
                due += self._wake(key)
        return due

    def expire(self, now_ns: int) -> list[AddressedReply]:
        """Return the replies to requests whose deadline has passed."""
        due = []
        while self._deadlines and self._deadlines[0].deadline_ns <= now_ns:
            waiting = heapq.heappop(self._deadlines)
            if self._waits(waiting):
                absent = self._table.missing(waiting.request)
                self._drop(waiting)
                due.append(AddressedReply(waiting.client, waiting.number, Missing(absent)))
        return due

    def next_deadline_ns(self) -> int | None:
        """Return the time at which to call `expire` next; None when no request waits."""
        while self._deadlines and not self._waits(self._deadlines[0]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0].deadline_ns if self._deadlines else None

    def forget(self, client: int) -> None:
        """Drop the requests of a client that is gone."""
        for waiting in [entry for entry in self._waiting.values() if entry.client == client]:
            self._drop(waiting)

    def _waits(self, waiting: _Waiting) -> bool:
        return self._waiting.get((waiting.client, waiting.number)) is waiting

    def _wake(self, key: str) -> list[AddressedReply]:
        """Return the replies to requests that waited only for `key`."""
        due = []
        names = self._by_key.get(key, set())
        for waiting in sorted((self._waiting[name] for name in names), key=lambda w: w.order):
            reply = self._table.apply(waiting.request)
            if not isinstance(reply, Missing):
                self._drop(waiting)
                due.append(AddressedReply(waiting.client, waiting.number, reply))
        return due

    def _drop(self, waiting: _Waiting) -> None:
        name = (waiting.client, waiting.number)
        del self._waiting[name]
        for key in _awaited_keys(waiting.request):
            names = self._by_key.get(key)
            if names is not None:
                names.discard(name)
                if not names:
                    del self._by_key[key]


def _written_keys(request: Request) -> list[str]:
    if isinstance(request, MultiSet):
        return list(request.items)
    if isinstance(request, (Set, Add, CompareSet, Append)):
        return [request.key]
    return []


def _awaited_keys(request: Request) -> list[str]:
    if isinstance(request, Get):
        return [request.key]
    return request.keys if isinstance(request, (StoreWait, MultiGet)) else []
