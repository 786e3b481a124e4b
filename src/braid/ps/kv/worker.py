"""`KVWorker` pushes values to servers, and pulls them.

    kv = KVWorker(node, app_id=0)
    kv.wait(kv.push(keys, grads))                  # keys sorted, each once
    kv.wait(kv.pull(keys, weights := torch.empty(0)))

    keys ──slicer──> slices by server ──filters──> parcels ──Customer──> servers
    vals <──────── places of each slice <──decode── answers <──────────────┘

`push`, `pull` and `push_pull` copy what they are given. The forms with a z do not: keys and values
must not change until the request is complete, and what is pulled arrives in the memory of `vals`,
if its size is known and links lose nothing.

Source: PS-Lite's KVWorker; M. Li et al., Parameter Server, OSDI 2014, section 3.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from msgspec.structs import asdict

from braid.errors import CommError, ConfigError
from braid.ps.kv.filters import Filter, KeyCache
from braid.ps.kv.messages import Coding, Head, KVRequest, Transfer, Transferred
from braid.ps.kv.pairs import Keys, KVPairs, Lens, check_pairs
from braid.ps.kv.parcel import Parcel
from braid.ps.kv.simple_app import SimpleApp
from braid.ps.kv.slicers import KeyLayout, Places, Slicer, by_hash, by_range, check_slices
from braid.ps.messages import check_type
from braid.ps.protocol.directory import server_node
from braid.runtime.message import NUM_PRIORITIES, Delivery, Message
from braid.runtime.tensor_buffers import memory_of
from braid.runtime.wire import Buffer

if TYPE_CHECKING:
    from braid.ps.kv.node import KVNode

__all__ = ["KVWorker"]

MAX_BYTES = 1 << 30  # of the tensors for one server; that of a message, see VanConfig
Callback = Callable[[], object]


@dataclass(slots=True)
class _Transfer:
    """A push, a pull or both, under way.

    Attributes:
        pairs: Keys, and values to push.
        slices: Places of each server's keys.
        out: Tensor for pulled values; None for a push.
        out_lens: Tensor for their lengths, if the program wants them.
        filters: Filters of the request.
        cmd: Number for the servers' handle.
        push: Whether values are pushed.
        parcels: Request to each server.
        answers: Values, and lengths if they differ, of each server.
        sent: Servers that the parcel was sent to, with those keys that were left out.
        codings: Encodings of the answers.
    """

    pairs: KVPairs
    slices: dict[int, Places]
    out: torch.Tensor | None
    out_lens: torch.Tensor | None
    filters: Sequence[Filter]
    cmd: int
    push: bool
    parcels: dict[int, Parcel] = field(default_factory=dict)
    answers: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = field(default_factory=dict)
    sent: set[int] = field(default_factory=set)
    codings: list[Coding] = field(default_factory=list)


class KVWorker(SimpleApp):
    """A worker's requests for keys and values.

    Args:
        node: Node of the process, which is a worker.
        app_id: Number of the program's part; servers have a `KVServer` of this number.
        customer_id: Number among those of this process; one for each thread.
        filters: Filters of all requests that name none.

    Raises:
        ConfigError: The node is no worker, or the numbers are taken.
    """

    def __init__(
        self,
        node: KVNode,
        app_id: int = 0,
        customer_id: int = 0,
        *,
        filters: Sequence[Filter] = (),
    ) -> None:
        if not node.is_worker:
            msg = f"{node.name} is no worker: only workers push and pull"
            raise ConfigError(msg)
        super().__init__(node, app_id, customer_id)
        self._slicer: Slicer = by_range
        self._filters = tuple(filters)

    def set_slicer(self, slicer: Slicer) -> None:
        """Set the function of keys and the number of servers that says which server has which.

        All workers need the same; see `slicers`.
        """
        self._slicer = slicer

    def push(
        self,
        keys: Keys,
        vals: torch.Tensor,
        lens: Lens = None,
        *,
        cmd: int = 0,
        callback: Callback | None = None,
        priority: int = 0,
        filters: Sequence[Filter] | None = None,
        copy: bool = True,
    ) -> int:
        """Push values.

        Args:
            keys: Keys, sorted and unique; see `KVPairs`.
            vals: Values of all keys, in one dim.
            lens: Number of values of each key; the same for each when None or empty.
            cmd: Number for the servers' handle.
            callback: Function that runs when all servers have answered.
            priority: Urgency, 0 to 15; more is more urgent. Equal ones are first in, first out.
            filters: Filters of this request; those of the worker when None.
            copy: Whether keys and values may be changed at once; without a copy, not before the
                request is complete.

        Returns:
            The timestamp to `wait` for.

        Raises:
            ConfigError: Keys are not sorted or not unique, lengths do not add up, or a server's
                share is larger than a message may be. Nothing was sent.
            CommError: An earlier request, for which nobody waited, has failed.

        Cost: the bytes of keys and values once over the network; an answer of some 100 bytes from
        each server.
        """
        pairs = _copied(keys, vals, lens) if copy else KVPairs(keys, vals, lens)
        return self._start(pairs, None, None, cmd, callback, priority, filters)

    def pull(
        self,
        keys: Keys,
        vals: torch.Tensor,
        lens: torch.Tensor | None = None,
        *,
        cmd: int = 0,
        callback: Callback | None = None,
        priority: int = 0,
        filters: Sequence[Filter] | None = None,
        copy: bool = True,
    ) -> int:
        """Pull values into `vals`, once the request is complete; see `push`.

        Args:
            keys: Keys, sorted and unique.
            vals: Tensor for the values in one dim; resized if it is empty.
            lens: Tensor for the number of values of each key; resized if it is empty.
            cmd: Number for the servers' handle.
            callback: Function that runs when all values are there.
            priority: Urgency.
            filters: Filters of this request and of the answers.
            copy: Whether values go to `vals` together, once all are there; without a copy each
                server's arrive in the memory of `vals`, which nothing may read before.
        """
        pairs = _copied(keys, None, None) if copy else KVPairs(keys)
        return self._start(pairs, vals, lens, cmd, callback, priority, filters, direct=not copy)

    def push_pull(
        self,
        keys: Keys,
        vals: torch.Tensor,
        outs: torch.Tensor,
        lens: torch.Tensor | None = None,
        *,
        cmd: int = 0,
        callback: Callback | None = None,
        priority: int = 0,
        filters: Sequence[Filter] | None = None,
        copy: bool = True,
    ) -> int:
        """Push `vals` and pull into `outs` in one request; `lens` is of both. See them."""
        pairs = _copied(keys, vals, lens) if copy else KVPairs(keys, vals, lens)
        return self._start(pairs, outs, lens, cmd, callback, priority, filters, direct=not copy)

    # -- inside

    def _start(  # noqa: PLR0917 - called by the three forms above
        self,
        pairs: KVPairs,
        out: torch.Tensor | None,
        out_lens: torch.Tensor | None,
        cmd: int,
        callback: Callback | None,
        priority: int,
        filters: Sequence[Filter] | None,
        *,
        direct: bool = False,
    ) -> int:
        if not 0 <= priority < NUM_PRIORITIES:
            msg = f"a priority is 0 to {NUM_PRIORITIES - 1}, got {priority}"
            raise ConfigError(msg)
        check_type("cmd is a whole number", cmd, int)
        push = bool(len(pairs.vals)) or out is None
        check_pairs(pairs.keys, len(pairs.vals) if push else None, pairs.lens)
        _check_out(len(pairs), out, out_lens)
        num_servers = self._node.num_servers
        slices = self._slicer(pairs.keys, num_servers)
        if self._slicer not in {by_range, by_hash}:
            check_slices(slices, len(pairs), num_servers)
        filters = self._filters if filters is None else filters
        transfer = _Transfer(pairs, slices, out, out_lens, filters, cmd, push)
        try:
            for server, places in slices.items():
                transfer.parcels[server] = self._parcel(transfer, server, places)
            if out is not None:
                codings = [each.coding() for each in filters]
                transfer.codings = [coding for coding in codings if coding is not None]
            timestamp = self._ask(
                {server: server_node(server) for server in slices},
                partial(self._message_of, transfer),
                on_answer=partial(self._answered, transfer),
                callback=callback,
                memory=self._memory(transfer) if direct else None,
                priority=priority,
            )
        except BaseException:
            for each in filters:
                each.undo()
            raise
        for each in filters:
            each.keep()
        return timestamp

    def _message_of(self, own: _Transfer, header: KVRequest) -> tuple[Message, Sequence[Buffer]]:
        """Return the request to the server of the header's part."""
        parcel = self._parcel_to_send(own, header.part)
        names, specs, buffers = parcel.pack()
        message = Transfer(
            **asdict(header),
            cmd=own.cmd,
            push=own.push,
            pull=own.out is not None,
            ranged=self._slicer is by_range,
            digest=parcel.digest,
            heads=parcel.heads,
            names=names,
            specs=specs,
            codings=own.codings,
        )
        return message, buffers

    def _parcel(self, own: _Transfer, server: int, places: Places) -> Parcel:
        """Return what goes to a server, encoded once: filters may remember what they left out."""
        pairs = own.pairs
        whole = isinstance(places, slice)
        keys = pairs.keys.view(torch.int64)[places].view(torch.uint64)
        tensors = {"keys": keys}
        if own.push:
            layout = KeyLayout(len(pairs), len(pairs.vals), pairs.lens)
            tensors["vals"] = layout.gather(pairs.vals, places)
            if pairs.lens is not None:
                tensors["lens"] = pairs.lens[places]
        assert whole or keys.is_contiguous(), "what is gathered lies in one piece"
        parcel = Parcel(tensors)
        for each in own.filters:
            each.encode(parcel, server)
        if parcel.nbytes > MAX_BYTES:
            msg = (
                f"{parcel.nbytes} bytes for server {server} are more than a message may have "
                f"({MAX_BYTES}): push fewer keys at once"
            )
            raise ConfigError(msg)
        return parcel

    def _parcel_to_send(self, own: _Transfer, server: int) -> Parcel:
        """Return the parcel, with its keys if it goes to the server for a second time."""
        parcel = own.parcels[server]
        if server in own.sent and parcel.keys is not None:
            for each in own.filters:
                if isinstance(each, KeyCache):
                    each.was_missed(parcel)
            parcel.tensors["keys"] = parcel.keys
            parcel.keys = None
        own.sent.add(server)
        return parcel

    def _memory(self, own: _Transfer) -> Callable[[int], list[memoryview]] | None:
        """Return where each server's values go, if that is known before they come."""
        out = own.out
        if out is None or not len(out) or out.device.type != "cpu" or not out.is_contiguous():
            return None
        if not all(isinstance(each, slice) for each in own.slices.values()):
            return None
        if own.pairs.lens is not None or own.codings or self._postoffice.resend_s is not None:
            return None
        layout = KeyLayout(len(own.pairs), len(out), None)
        views: dict[int, list[memoryview]] = {
            server: [memory_of(layout.gather(out, places))] for server, places in own.slices.items()
        }
        return views.__getitem__

    def _answered(self, own: _Transfer, server: int, delivery: Delivery) -> None:
        """Take in the answer of a server; the last one completes the pulled values."""
        if own.out is None:
            return
        message = delivery.message
        assert isinstance(message, Transferred), "pushes and pulls have answers of their own"
        parcel = Parcel.unpack(message.names, message.specs, delivery.buffers, message.heads)
        parcel.decode(lambda head, nbytes: _count(own.filters, head, nbytes))
        vals, lens = parcel.tensors.get("vals"), parcel.tensors.get("lens")
        if vals is None or vals.dim() != 1:
            msg = "it has no values, though they were asked for"
            raise CommError(msg)
        if vals.dtype != own.out.dtype:
            msg = f"the server has {vals.dtype}, and vals is a tensor of {own.out.dtype}"
            raise CommError(msg)
        places = own.slices[server]
        num_keys = _count_of(places)
        check_pairs(own.pairs.keys[:0] if lens is None else own.pairs.keys[:num_keys], None, lens)
        if (len(vals) % num_keys) if lens is None else (int(lens.sum()) != len(vals)):
            msg = f"{len(vals)} values came for {num_keys} keys"
            raise CommError(msg)
        own.answers[server] = vals, lens
        if len(own.answers) == len(own.slices):
            _assemble(own, own.out)


def _copied(keys: Keys, vals: torch.Tensor | None, lens: Lens) -> KVPairs:
    pairs = KVPairs(keys, vals, lens)
    pairs.keys = pairs.keys.clone()
    if vals is not None:
        pairs.vals = pairs.vals.clone()
    pairs.lens = None if pairs.lens is None else pairs.lens.clone()
    return pairs


def _check_out(num_keys: int, out: torch.Tensor | None, out_lens: torch.Tensor | None) -> None:
    if out is not None and (out.dim() != 1 or not out.is_contiguous()):
        msg = f"vals must be contiguous in one dim, got {tuple(out.shape)}, {out.stride()}"
        raise ConfigError(msg)
    if out_lens is not None and len(out_lens) not in {0, num_keys}:
        msg = f"lens is for {len(out_lens)} keys, and there are {num_keys}: pass an empty tensor"
        raise ConfigError(msg)
    for name, tensor in (("vals", out), ("lens", out_lens)):
        if tensor is None or len(tensor):
            continue
        if tensor.requires_grad or not tensor.untyped_storage().resizable():
            msg = (
                f"{name} is empty, and cannot be resized since it shares the memory of an array or "
                "requires a gradient: pass a tensor with room for the values"
            )
            raise ConfigError(msg)


def _count(filters: Sequence[Filter], head: Head, nbytes: int) -> None:
    """Count what a filter of the answer has saved."""
    for each in filters:
        if each.head is not None and isinstance(head, each.head):
            each.saved_bytes += nbytes
            return


def _assemble(own: _Transfer, out: torch.Tensor) -> None:
    """Write the values of all servers where they belong.

    Raises:
        ConfigError: There are more or fewer than `vals` has room for.
    """
    num_keys, width = len(own.pairs), _width(own)
    lens = None if width is not None else _lens(own)
    total = int(lens.sum()) if lens is not None else num_keys * (width or 0)
    if not len(out):
        out.resize_(total)
    if len(out) != total:
        msg = f"{total} values came for {num_keys} keys, and vals has room for {len(out)}"
        raise ConfigError(msg)
    out = out.detach()  # such as a parameter: what is pulled has no gradient
    layout = KeyLayout(num_keys, total, lens)
    for server, places in own.slices.items():
        layout.scatter(out, places, own.answers[server][0])
    if own.out_lens is not None:
        if not len(own.out_lens):
            own.out_lens.resize_(num_keys)
        own.out_lens.copy_(lens if lens is not None else torch.tensor(width))


def _width(own: _Transfer) -> int | None:
    """Return the number of values of each key; None if keys have different numbers."""
    widths = set()
    for server, places in own.slices.items():
        vals, given = own.answers[server]
        if given is None:
            widths.add(len(vals) // _count_of(places))
        elif bool((given == given[0]).all()):
            widths.add(int(given[0]))
        else:
            return None
    return widths.pop() if len(widths) == 1 else None


def _lens(own: _Transfer) -> torch.Tensor:
    """Return the number of values of each key."""
    lens = torch.zeros(len(own.pairs), dtype=torch.int64)
    for server, places in own.slices.items():
        vals, given = own.answers[server]
        lens[places] = len(vals) // _count_of(places) if given is None else given
    return lens


def _count_of(places: Places) -> int:
    """Return the number of keys of a server."""
    return places.stop - places.start if isinstance(places, slice) else len(places)
