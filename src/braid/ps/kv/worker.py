"""`KVWorker` pushes values to servers, and pulls them.

    kv = KVWorker(node, app_id=0)
    kv.wait(kv.push(keys, grads))                  # keys sorted, each once
    kv.wait(kv.pull(keys, weights := torch.empty(0)))

    keys ──slicer──> slices by server ──filters──> parcels ──Customer──> servers
    vals <──────── places of each slice <──decode── answers <──────────────┘

`push`, `pull` and `push_pull` copy keys and values. With `copy=False` they do not: keys and values
must not change until the request is complete, and pulled values are received directly into the
memory of `vals` if its size is known and links do not lose messages.

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

MAX_BYTES = 1 << 30  # tensors for one server; the same as VanConfig's largest message
Callback = Callable[[], object]


@dataclass(slots=True)
class _Transfer:
    """A push, a pull or both in flight.

    Attributes:
        pairs: Keys, and values to push.
        slices: Places of each server's keys.
        out: Tensor for pulled values; None for a push.
        out_lens: Tensor for the number of values of each key; None if not requested.
        filters: Filters of the request.
        cmd: Number for the servers' handle.
        push: Whether values are pushed.
        parcels: Encoded request to each server.
        answers: Values of each server, with lengths if they differ.
        sent: Servers to which a parcel was sent already.
        codings: Encodings for the answers.
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
    """Pushes and pulls values by key on a worker.

    Args:
        node: Node of the process, which is a worker.
        app_id: Number of the app; servers have a `KVServer` with this number.
        customer_id: Number among the apps of this process with this `app_id`; one per thread.
        filters: Filters of requests that do not pass `filters`.

    Raises:
        ConfigError: The node is not a worker, or the numbers are in use.
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
            msg = f"{node.name} is not a worker: make a KVWorker on workers only"
            raise ConfigError(msg)
        super().__init__(node, app_id, customer_id)
        self._slicer: Slicer = by_range
        self._filters = tuple(filters)

    def set_slicer(self, slicer: Slicer) -> None:
        """Set the function that divides keys among servers.

        It takes keys and the number of servers; see `slicers`. All workers need the same one.
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
        """Start to push the values of some keys to the servers.

        Args:
            keys: Keys, sorted and unique; see `KVPairs`.
            vals: Values of all keys, one-dimensional.
            lens: Number of values of each key; all keys have the same number when None or empty.
            cmd: Number for the servers' handle.
            callback: Function that runs when all servers have answered.
            priority: Urgency, 0 to 15, most urgent 15. Equal priorities are first in, first out.
            filters: Filters of this request; the worker's filters when None.
            copy: Whether to copy keys and values. Without a copy, do not change them before the
                request is complete.

        Returns:
            The timestamp to `wait` for.

        Raises:
            ConfigError: Keys are not sorted or not unique, lengths do not add up, or the part for a
                server exceeds the largest message. Nothing was sent.
            CommError: An earlier request, for which the program did not wait, has failed.

        Cost: the bytes of keys and values once over the network; an answer of about 100 bytes from
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
        """Pull values into `vals`, which is valid once the request is complete; see `push`.

        Args:
            keys: Keys, sorted and unique.
            vals: One-dimensional tensor for the values; resized if it is empty.
            lens: Tensor for the number of values of each key; resized if it is empty.
            cmd: Number for the servers' handle.
            callback: Function that runs when all values have arrived.
            priority: Urgency, 0 to 15.
            filters: Filters of this request and of the answers.
            copy: Whether values are copied to `vals` after all have arrived. Without a copy they
                are received into `vals` directly: do not read it before.
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
        """Push `vals` and pull into `outs` in one request; `lens` is for both; see `push`."""
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
            msg = f"a priority must be from 0 to {NUM_PRIORITIES - 1}, got {priority}"
            raise ConfigError(msg)
        check_type("cmd must be a whole number", cmd, int)
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
                codings = [encoder.coding() for encoder in filters]
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
            for encoder in filters:
                encoder.undo()
            raise
        for encoder in filters:
            encoder.keep()
        return timestamp

    def _message_of(
        self, transfer: _Transfer, header: KVRequest
    ) -> tuple[Message, Sequence[Buffer]]:
        """Return the request for the server in the header's `part`."""
        parcel = self._parcel_to_send(transfer, header.part)
        names, specs, buffers = parcel.pack()
        message = Transfer(
            **asdict(header),
            cmd=transfer.cmd,
            push=transfer.push,
            pull=transfer.out is not None,
            ranged=self._slicer is by_range,
            digest=parcel.digest,
            heads=parcel.heads,
            names=names,
            specs=specs,
            codings=transfer.codings,
        )
        return message, buffers

    def _parcel(self, transfer: _Transfer, server: int, places: Places) -> Parcel:
        """Return the encoded parcel for a server; filters with state must see it only once."""
        pairs = transfer.pairs
        whole = isinstance(places, slice)
        keys = pairs.keys.view(torch.int64)[places].view(torch.uint64)
        tensors = {"keys": keys}
        if transfer.push:
            layout = KeyLayout(len(pairs), len(pairs.vals), pairs.lens)
            tensors["vals"] = layout.gather(pairs.vals, places)
            if pairs.lens is not None:
                tensors["lens"] = pairs.lens[places]
        assert whole or keys.is_contiguous(), "gathered keys are contiguous"
        parcel = Parcel(tensors)
        for encoder in transfer.filters:
            encoder.encode(parcel, server)
        if parcel.nbytes > MAX_BYTES:
            msg = (
                f"{parcel.nbytes} bytes for server {server} exceed the limit of a message, "
                f"{MAX_BYTES} bytes: push fewer keys per request"
            )
            raise ConfigError(msg)
        return parcel

    def _parcel_to_send(self, transfer: _Transfer, server: int) -> Parcel:
        """Return the parcel, with its keys included if it is sent to the server again."""
        parcel = transfer.parcels[server]
        if server in transfer.sent and parcel.keys is not None:
            for encoder in transfer.filters:
                if isinstance(encoder, KeyCache):
                    encoder.was_missed(parcel)
            parcel.tensors["keys"] = parcel.keys
            parcel.keys = None
        transfer.sent.add(server)
        return parcel

    def _memory(self, transfer: _Transfer) -> Callable[[int], list[memoryview]] | None:
        """Return a function from server to memory for its values; None if sizes are not known."""
        out = transfer.out
        if out is None or not len(out) or out.device.type != "cpu" or not out.is_contiguous():
            return None
        if not all(isinstance(places, slice) for places in transfer.slices.values()):
            return None
        if (
            transfer.pairs.lens is not None
            or transfer.codings
            or self._postoffice.resend_s is not None
        ):
            return None
        layout = KeyLayout(len(transfer.pairs), len(out), None)
        views: dict[int, list[memoryview]] = {
            server: [memory_of(layout.gather(out, places))]
            for server, places in transfer.slices.items()
        }
        return views.__getitem__

    def _answered(self, transfer: _Transfer, server: int, delivery: Delivery) -> None:
        """Store the answer of a server; assemble the pulled values after the last answer."""
        if transfer.out is None:
            return
        message = delivery.message
        assert isinstance(message, Transferred), "pushes and pulls have answers of their own"
        parcel = Parcel.unpack(message.names, message.specs, delivery.buffers, message.heads)
        parcel.decode(lambda head, nbytes: _count(transfer.filters, head, nbytes))
        vals, lens = parcel.tensors.get("vals"), parcel.tensors.get("lens")
        if vals is None or vals.dim() != 1:
            msg = (
                "the server's answer to a pull has no values: pass KVPairs with vals to "
                "response() on the server"
            )
            raise CommError(msg)
        if vals.dtype != transfer.out.dtype:
            msg = (
                f"the server has values of {vals.dtype}, but vals is a tensor of "
                f"{transfer.out.dtype}: pass a tensor of {vals.dtype}"
            )
            raise CommError(msg)
        places = transfer.slices[server]
        num_keys = _count_of(places)
        check_pairs(
            transfer.pairs.keys[:0] if lens is None else transfer.pairs.keys[:num_keys], None, lens
        )
        if (len(vals) % num_keys) if lens is None else (int(lens.sum()) != len(vals)):
            msg = (
                f"the server answered {num_keys} keys with {len(vals)} values: return equally many "
                "values for each key, or lens"
            )
            raise CommError(msg)
        transfer.answers[server] = vals, lens
        if len(transfer.answers) == len(transfer.slices):
            _assemble(transfer, transfer.out)


def _copied(keys: Keys, vals: torch.Tensor | None, lens: Lens) -> KVPairs:
    pairs = KVPairs(keys, vals, lens)
    pairs.keys = pairs.keys.clone()
    if vals is not None:
        pairs.vals = pairs.vals.clone()
    pairs.lens = None if pairs.lens is None else pairs.lens.clone()
    return pairs


def _check_out(num_keys: int, out: torch.Tensor | None, out_lens: torch.Tensor | None) -> None:
    if out is not None and (out.dim() != 1 or not out.is_contiguous()):
        msg = (
            f"vals must be one-dimensional and contiguous, got shape {tuple(out.shape)} and "
            f"strides {out.stride()}: pass torch.empty(n)"
        )
        raise ConfigError(msg)
    if out_lens is not None and len(out_lens) not in {0, num_keys}:
        msg = f"lens has {len(out_lens)} elements for {num_keys} keys: pass an empty tensor"
        raise ConfigError(msg)
    for name, tensor in (("vals", out), ("lens", out_lens)):
        if tensor is None or len(tensor):
            continue
        if tensor.requires_grad or not tensor.untyped_storage().resizable():
            msg = (
                f"{name} is empty but cannot be resized, since it shares an array's memory or "
                "requires a gradient: pass a tensor with room for the values"
            )
            raise ConfigError(msg)


def _count(filters: Sequence[Filter], head: Head, nbytes: int) -> None:
    """Add the bytes saved in an answer to its filter's count."""
    for encoder in filters:
        if encoder.head is not None and isinstance(head, encoder.head):
            encoder.saved_bytes += nbytes
            return


def _assemble(transfer: _Transfer, out: torch.Tensor) -> None:
    """Write the values of all servers into `out`.

    Raises:
        ConfigError: The number of values does not fit `out`.
    """
    num_keys, width = len(transfer.pairs), _width(transfer)
    lens = None if width is not None else _lens(transfer)
    total = int(lens.sum()) if lens is not None else num_keys * (width or 0)
    if not len(out):
        out.resize_(total)
    if len(out) != total:
        msg = (
            f"servers returned {total} values for {num_keys} keys, but vals has {len(out)} "
            "elements: pass a larger or an empty tensor"
        )
        raise ConfigError(msg)
    out = out.detach()  # may be a parameter: the copy must not be recorded by autograd
    layout = KeyLayout(num_keys, total, lens)
    for server, places in transfer.slices.items():
        layout.scatter(out, places, transfer.answers[server][0])
    if transfer.out_lens is not None:
        if not len(transfer.out_lens):
            transfer.out_lens.resize_(num_keys)
        transfer.out_lens.copy_(lens if lens is not None else torch.tensor(width))


def _width(transfer: _Transfer) -> int | None:
    """Return the number of values of each key; None if keys have different numbers."""
    widths = set()
    for server, places in transfer.slices.items():
        vals, lens = transfer.answers[server]
        if lens is None:
            widths.add(len(vals) // _count_of(places))
        elif bool((lens == lens[0]).all()):
            widths.add(int(lens[0]))
        else:
            return None
    return widths.pop() if len(widths) == 1 else None


def _lens(transfer: _Transfer) -> torch.Tensor:
    """Return the number of values of each key."""
    lens = torch.zeros(len(transfer.pairs), dtype=torch.int64)
    for server, places in transfer.slices.items():
        vals, answer_lens = transfer.answers[server]
        lens[places] = len(vals) // _count_of(places) if answer_lens is None else answer_lens
    return lens


def _count_of(places: Places) -> int:
    """Return the number of keys of a server."""
    return places.stop - places.start if isinstance(places, slice) else len(places)
