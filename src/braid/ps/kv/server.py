"""`KVServer` answers pushes and pulls with a handle of the program.

    server = KVServer(node, app_id=0)
    server.set_request_handle(KVServerDefaultHandle())

    def handle(meta, pairs, server):           # or a custom handle
        if meta.push:
            ...                                # pairs.keys, pairs.ids, pairs.vals, pairs.lens
        server.response(meta, KVPairs(pairs.keys, vals) if meta.pull else None)

The handle runs for one request at a time. `response` may be called later, and from any thread. An
invalid request is refused before the handle is called. If the handle raises, the request is refused
with the error's text, and the server continues.

Source: PS-Lite's KVServer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from braid.errors import BraidError, CommError, ConfigError
from braid.ps.kv.app import Ticket
from braid.ps.kv.filters import digest_of, filter_of
from braid.ps.kv.groups import id_of, key_ranges
from braid.ps.kv.messages import Coding, KVRequest, Transfer, Transferred
from braid.ps.kv.pairs import KVPairs, check_pairs
from braid.ps.kv.parcel import Parcel
from braid.ps.kv.simple_app import SimpleApp, SimpleData
from braid.ps.kv.store import SumStore
from braid.runtime.message import Delivery

if TYPE_CHECKING:
    from braid.ps.kv.node import KVNode

__all__ = ["KVMeta", "KVServer", "KVServerDefaultHandle", "RequestHandle"]

NUM_CACHED = 256  # key sets that a server caches for `KeyCache`


@dataclass(frozen=True, slots=True)
class KVMeta:
    """Properties of a request, in addition to its pairs.

    Attributes:
        cmd: Number that the worker has passed as `cmd`.
        push: Whether the pairs have values.
        pull: Whether the worker waits for values.
        sender: Number of the worker's node.
        timestamp: Number of the request at the worker.
        customer_id: Number of the worker's customer.
        ticket: Address of the answer.
        codings: Encodings for the answer.
        num_keys: Number of keys.
    """

    cmd: int
    push: bool
    pull: bool
    sender: int
    timestamp: int
    customer_id: int
    ticket: Ticket
    codings: tuple[Coding, ...]
    num_keys: int


RequestHandle: TypeAlias = Callable[[KVMeta, KVPairs, "KVServer"], object]


class KVServer(SimpleApp):
    """Answers the pushes and pulls of an app on one server.

    Args:
        node: Node of the process, which is a server.
        app_id: Number of the app; workers use a `KVWorker` with the same number.
        num_cached: Number of key sets to cache for `KeyCache`.

    Raises:
        ConfigError: The node is not a server, or the number is in use.
    """

    def __init__(self, node: KVNode, app_id: int = 0, *, num_cached: int = NUM_CACHED) -> None:
        if not node.is_server:
            msg = f"{node.name} is not a server: make a KVServer on servers only"
            raise ConfigError(msg)
        self._kv_handle: RequestHandle | None = None
        self._num_cached = num_cached
        self._cached: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._range = key_ranges(node.num_servers)[node.number]
        super().__init__(node, app_id)

    def set_request_handle(self, handle: RequestHandle) -> None:  # type: ignore[override]
        """Set the function that is called with each push or pull; it calls `response` to answer."""
        self._kv_handle = handle
        self._node.dispatch_parked()

    def is_ready_for(self, message: KVRequest) -> bool:
        """Return whether a request can be executed now: a push or pull needs a handle."""
        return self._kv_handle is not None or not isinstance(message, Transfer)

    def set_note_handle(self, handle: Callable[..., object]) -> None:
        """Set the function that is called with each note; see `SimpleApp.set_request_handle`."""
        super().set_request_handle(handle)

    def response(self, asked: KVMeta | SimpleData, pairs: KVPairs | str | None = None) -> None:
        """Answer a push, a pull or a note.

        Args:
            asked: The request that the handle was called with.
            pairs: Values for a pull, with lengths if they differ; keys are optional. They are sent
                without a copy, perhaps twice: do not change them afterwards. For a note, the text
                of the answer.

        Raises:
            ConfigError: The request was answered before, the number of values does not fit the
                keys, a note is answered with pairs, or a push or pull with a text.
        """
        if isinstance(asked, SimpleData):
            super().response(asked, "" if pairs is None else pairs)  # type: ignore[arg-type]
            return
        if isinstance(pairs, str):
            msg = (
                "the answer has the wrong type: pass KVPairs to answer a push or pull, and a str "
                "to answer a SimpleApp"
            )
            raise ConfigError(msg)
        parcel = Parcel({})
        if asked.pull:
            pairs = KVPairs() if pairs is None else pairs
            lens = pairs.lens
            if lens is not None and len(lens) != asked.num_keys:
                msg = (
                    f"the answer to {asked.num_keys} keys has {len(lens)} lens: return one "
                    "length per key"
                )
                raise ConfigError(msg)
            total = asked.num_keys if lens is None else int(lens.sum())
            count = len(pairs.vals)
            if (count % total if total else count) if lens is None else count != total:
                msg = (
                    f"the answer to {asked.num_keys} keys has {count} vals: return values for "
                    "each key"
                )
                raise ConfigError(msg)
            parcel.tensors["vals"] = pairs.vals
            if lens is not None:
                parcel.tensors["lens"] = lens
            for coding in asked.codings:
                filter_of(coding, asked.timestamp).encode(parcel, -1)
        names, specs, buffers = parcel.pack()
        ticket = asked.ticket
        answer = Transferred((ticket.part,), ticket.message_id, parcel.heads, names, specs)
        self._reply(ticket, answer, buffers)

    # -- inside

    def _execute(self, delivery: Delivery, ticket: Ticket) -> None:
        message = delivery.message
        if not isinstance(message, Transfer):
            super()._execute(delivery, ticket)
            return
        if self._kv_handle is None:
            msg = (
                f"app {self.app_id} of {self._node.name} has no function that handles pushes and "
                "pulls: call set_request_handle(function) of its KVServer first"
            )
            raise CommError(msg)
        pairs = self._pairs(message, delivery)
        if pairs is None:
            self._ask_again(ticket)
            return
        meta = KVMeta(
            message.cmd,
            message.push,
            message.pull,
            id_of(ticket.node),
            message.timestamp,
            message.customer,
            ticket,
            tuple(message.codings),
            len(pairs),
        )
        self._kv_handle(meta, pairs, self)

    def _pairs(self, message: Transfer, delivery: Delivery) -> KVPairs | None:
        """Return the keys and values of a request; None if its keys are not cached any more.

        Raises:
            CommError: They are invalid, or belong to another server.
        """
        parcel = Parcel.unpack(message.names, message.specs, delivery.buffers, message.heads)
        if not {*message.names} <= {"keys", "vals", "lens", "places"}:
            msg = (
                f"a request may contain keys, vals, lens and places, got {list(message.names)}: "
                "install the same version of braid on all nodes"
            )
            raise CommError(msg)
        parcel.decode()
        keys = parcel.tensors.get("keys")
        if keys is None:
            if not message.digest:
                msg = "the request has no keys: pass at least one"
                raise CommError(msg)
            keys = self._cached.get(message.digest)
            if keys is None:
                return None
        elif keys.dtype != torch.uint64 or keys.dim() != 1:
            msg = f"keys must be uint64 in one dim, got {keys.dtype}{list(keys.shape)}"
            raise CommError(msg)
        elif message.digest:
            self._remember(message.digest, keys)
        try:
            vals = parcel.tensors.get("vals")
            pairs = KVPairs(keys, vals, parcel.tensors.get("lens"))
            check_pairs(keys, len(pairs.vals) if message.push else None, pairs.lens)
        except BraidError as exc:
            raise CommError(str(exc)) from exc
        if message.ranged and len(keys):
            first, end = self._range
            low, high = (int(key) for key in keys.numpy()[[0, -1]])
            if low < first or high >= end:
                msg = (
                    f"keys {low} to {high} are outside of the range of {self._node.name}, "
                    f"{first} to {end - 1}: use the same slicer and number of servers on all "
                    "nodes"
                )
                raise CommError(msg)
        return pairs

    def _remember(self, digest: bytes, keys: torch.Tensor) -> None:
        if digest != digest_of(keys):
            msg = "the digest of a request does not match its keys: the message is damaged"
            raise CommError(msg)
        with self._postoffice.lock:
            self._cached[digest] = keys
            self._cached.move_to_end(digest)
            while len(self._cached) > self._num_cached:
                self._cached.popitem(last=False)


class KVServerDefaultHandle:
    """Sums the pushed values of each key, and answers pulls with the sums.

    Args:
        length: Number of zeros per key that a pull returns before the first push.
        dtype: Dtype of these zeros.

    Attributes:
        store: The sums by key.
    """

    def __init__(self, length: int = 1, dtype: torch.dtype = torch.float32) -> None:
        self.store = SumStore()
        self._length, self._dtype = length, dtype

    def __call__(self, meta: KVMeta, pairs: KVPairs, server: KVServer) -> None:
        """Handle a push, a pull or both."""
        if meta.push and len(pairs):
            if pairs.lens is not None and int(pairs.lens.min()) != int(pairs.lens.max()):
                msg = (
                    "the default handle needs the same number of values for all keys: set "
                    "another handle with set_request_handle"
                )
                raise CommError(msg)
            self.store.add(pairs.ids, pairs.vals.reshape(len(pairs), -1))
        answer = None
        if meta.pull:
            dtype = self.store.dtype or self._dtype
            answer = KVPairs((), self.store.read(pairs.ids, self._length, dtype).reshape(-1))
        server.response(meta, answer)
