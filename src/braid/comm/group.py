"""A group of ranks that communicate: what users call.

The group checks and describes; its engine moves data. All members call the same operations in the same order, with the
same shapes and dtypes; if they do not, every one of them raises the same MismatchError with the table of what each
asked for. The tensor of a synchronous call holds the result when the call returns.

On failure of any call: PeerLostError on every surviving member, at once, when a member dies; CommTimeout naming who has
not come when the deadline passes (300 s, the first call 600 s); the tensors involved are then undefined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, overload

import torch

from braid.comm.arguments import Flat, apart, check_peer, flatten, result, slice_shape
from braid.comm.channel import Port
from braid.comm.describe import Describer, Key
from braid.comm.engine import Call, Engine, MemoryEngine
from braid.comm.progress import Progress
from braid.comm.request import Request
from braid.comm.work import Work
from braid.errors import ConfigError, StaleError
from braid.transport import MemoryTransport, RankContext

__all__ = ["Group"]

DEADLINE_S = 300.0
FIRST_DEADLINE_S = 600.0


class Group:
    """Ranks that communicate.

    Attributes:
        rank: This rank's index in the group.
        size: Number of members.
        ranks: Their global ranks.
        epoch: Counts rebuilds after losses; 0 at first.
        context: The rank that this is.

    Args:
        context: Handed by whoever started the rank.
        engine: How data moves.
        ranks: Global ranks of the members, in group order.
        epoch: See above.
    """

    def __init__(
        self, context: RankContext, engine: MemoryEngine, ranks: tuple[int, ...], *, epoch: int = 0
    ) -> None:
        self.context = context
        self.ranks = ranks
        self.rank = ranks.index(context.rank)
        self.size = len(ranks)
        self.epoch = epoch
        self._engine: Engine = engine
        self._memory = engine
        self._describer = Describer(engine.transport.names, context.events)
        self._deadline_s = FIRST_DEADLINE_S
        self._num_requests = 0
        self._closed = ""
        self._given_back = False

    @classmethod
    def world(cls, context: RankContext, transport: MemoryTransport) -> Group:
        """The group of all ranks. Collective through the store; every rank calls it once."""
        page = Port.first_page(transport)
        store = context.store
        store.set(f"group/world/{context.rank}", str(page.word).encode())
        keys = [f"group/world/{rank}" for rank in range(context.world_size)]
        store.wait(keys, FIRST_DEADLINE_S)
        pages = [int(value) for value in store.multi_get(keys)]
        ranks = tuple(range(context.world_size))
        port = Port(transport, ranks, context.rank, pages)
        # a rank that is quick to leave must not be gone before the others have mapped its page
        store.set(f"group/mapped/{context.rank}", b"")
        store.wait([f"group/mapped/{rank}" for rank in ranks], FIRST_DEADLINE_S)
        engine = MemoryEngine(
            transport, port, Progress(transport), context.events, owns_progress=True
        )
        return cls(context, engine, ranks)

    @overload
    def all_reduce(
        self,
        x: torch.Tensor,
        op: str = "sum",
        *,
        async_op: Literal[False] = False,
        wire: str | None = None,
        algorithm: str | None = None,
        timeout_s: float | None = None,
    ) -> torch.Tensor: ...
    @overload
    def all_reduce(
        self,
        x: torch.Tensor,
        op: str = "sum",
        *,
        async_op: Literal[True],
        wire: str | None = None,
        algorithm: str | None = None,
        timeout_s: float | None = None,
    ) -> Work: ...
    def all_reduce(
        self,
        x: torch.Tensor,
        op: str = "sum",
        *,
        async_op: bool = False,
        wire: str | None = None,
        algorithm: str | None = None,
        timeout_s: float | None = None,
    ) -> torch.Tensor | Work:
        """Replace `x` on every member by the reduction of all members' `x`, in the order of ranks.

        Args:
            x: Any shape; need not be contiguous. On memory from `empty` no copies are made.
            op: sum, avg (integers truncate), product, min, max.
            async_op: Return at once; the progress thread carries it out.
            wire: Number format between ranks; in shared memory only the tensor's own (None).
            algorithm: direct, two_phase or registered instead of the choice by size.
            timeout_s: Seconds until CommTimeout.

        Returns:
            `x`, or with `async_op` the Work to wait for.

        Raises:
            ConfigError: Unknown op or algorithm, or a tensor that cannot be reduced.
            MismatchError, PeerLostError, CommTimeout: See the module.

        Cost: a + (n+1) l b for little data or two ranks, see `braid.comm.all_reduce`.
        """
        if wire is not None:
            msg = f"expected wire=None for ranks of one host, found {wire!r}: shared memory sends tensors as they are"
            raise ConfigError(msg)
        flat, after = self._flat(x)
        key = Key("all_reduce", x.shape, x.dtype, op, algorithm=algorithm)
        call = self._call(key, x, (flat,), after=after, timeout_s=timeout_s)
        return self._carry_out(call, x, background=async_op)

    @overload
    def broadcast(
        self,
        x: torch.Tensor,
        root: int = 0,
        *,
        async_op: Literal[False] = False,
        timeout_s: float | None = None,
    ) -> torch.Tensor: ...
    @overload
    def broadcast(
        self,
        x: torch.Tensor,
        root: int = 0,
        *,
        async_op: Literal[True],
        timeout_s: float | None = None,
    ) -> Work: ...
    def broadcast(
        self,
        x: torch.Tensor,
        root: int = 0,
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> torch.Tensor | Work:
        """Replace `x` on every member by `x` of the member `root` (a group rank).

        Cost: ceil(l / chunk) a + l b.
        """
        check_peer(root, self.size, "root")
        flat, after = self._flat(x)
        key = Key("broadcast", x.shape, x.dtype, peer=root)
        call = self._call(key, x, (flat,), after=after, timeout_s=timeout_s)
        return self._carry_out(call, x, background=async_op)

    def all_gather(
        self,
        x: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        timeout_s: float | None = None,
    ) -> torch.Tensor:
        """Concatenate all members' `x` along dim 0.

        Shape:
            x: (d0, ...); zero-dim tensors count as (1,). Result: (n d0, ...).

        Cost: a + l b, with l the bytes of the result.
        """
        flat, _ = self._flat(x, written=False)
        shape = (self.size * x.shape[0], *x.shape[1:]) if x.dim() else (self.size,)
        out = result(out, shape, x)
        rows, after = self._flat(out)
        if flat.data_ptr() != rows.data_ptr() + self.rank * flat.numel() * flat.element_size():
            flat = apart(flat, rows)  # exactly the own row is where it belongs already
        key = Key("all_gather", x.shape, x.dtype)
        tensors = (rows.view(self.size, -1) if rows.numel() else rows.view(self.size, 0), flat)
        call = self._call(key, out, tensors, after=after, timeout_s=timeout_s)
        self._carry_out(call, out, background=False)
        return out

    def reduce_scatter(
        self,
        x: torch.Tensor,
        op: str = "sum",
        *,
        out: torch.Tensor | None = None,
        timeout_s: float | None = None,
    ) -> torch.Tensor:
        """Reduce all members' `x` and keep the slice of dim 0 that belongs to this member.

        Shape:
            x: (n d0, ...). Result: (d0, ...).

        Cost: a + 2 l b, with l the bytes of `x`.
        """
        flat, _ = self._flat(x, written=False)
        shape = slice_shape(x, self.size, "reduce_scatter")
        out = result(out, shape, x)
        part, after = self._flat(out)
        flat = apart(flat, part)
        key = Key("reduce_scatter", x.shape, x.dtype, op)
        tensors = (part, flat.view(self.size, part.numel()))
        call = self._call(key, x, tensors, after=after, timeout_s=timeout_s)
        self._carry_out(call, out, background=False)
        return out

    def all_to_all(
        self,
        x: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        timeout_s: float | None = None,
    ) -> torch.Tensor:
        """Send slice r of dim 0 to member r, and concatenate what the members sent here.

        Shape:
            x and result: (n d0, ...).

        Cost: a + 2 l b.
        """
        flat, _ = self._flat(x, written=False)
        slice_shape(x, self.size, "all_to_all")
        out = result(out, tuple(x.shape), x)
        rows, after = self._flat(out)
        flat = apart(flat, rows)
        key = Key("all_to_all", x.shape, x.dtype)
        width = x.numel() // self.size
        tensors = (rows.view(self.size, width), flat.view(self.size, width))
        call = self._call(key, x, tensors, after=after, timeout_s=timeout_s)
        self._carry_out(call, out, background=False)
        return out

    @overload
    def send(
        self,
        x: torch.Tensor,
        to: int,
        *,
        async_op: Literal[False] = False,
        timeout_s: float | None = None,
    ) -> torch.Tensor: ...
    @overload
    def send(
        self,
        x: torch.Tensor,
        to: int,
        *,
        async_op: Literal[True],
        timeout_s: float | None = None,
    ) -> Work: ...
    def send(
        self, x: torch.Tensor, to: int, *, async_op: bool = False, timeout_s: float | None = None
    ) -> torch.Tensor | Work:
        """Send `x` to member `to`; returns when it may be changed, which for up to 512 KiB is at once.

        Two members that send each other more than that at the same time must use `async_op`.
        """
        return self._pair("send", x, to, background=async_op, timeout_s=timeout_s)

    @overload
    def recv(
        self,
        x: torch.Tensor,
        source: int,
        *,
        async_op: Literal[False] = False,
        timeout_s: float | None = None,
    ) -> torch.Tensor: ...
    @overload
    def recv(
        self,
        x: torch.Tensor,
        source: int,
        *,
        async_op: Literal[True],
        timeout_s: float | None = None,
    ) -> Work: ...
    def recv(
        self,
        x: torch.Tensor,
        source: int,
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> torch.Tensor | Work:
        """Receive into `x` what member `source` sends; messages of one pair keep their order."""
        return self._pair("recv", x, source, background=async_op, timeout_s=timeout_s)

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Return when every member has called it. Cost: a."""
        key = Key("barrier")
        self._carry_out(self._call(key, None, (), timeout_s=timeout_s), None, background=False)

    def persistent(self, kind: str, x: torch.Tensor, *, op: str = "sum") -> Request:
        """Register `x` for an operation that will be started many times, on its own channel.

        All members create their requests in the same order; after that they may start them in any order. On memory
        from `empty` nothing is copied.

        Args:
            kind: all_reduce.
            x: Contiguous; kept alive by the request.
            op: Reduction.

        Cost: none; the first start compares what the members registered.
        """
        if kind != "all_reduce":
            msg = f"expected kind 'all_reduce' for a persistent request, found {kind!r}"
            raise ConfigError(msg)
        flat, after = self._flat(x)
        if after is not None:
            msg = f"expected a contiguous tensor to register, found strides {x.stride()}: pass x.contiguous()"
            raise ConfigError(msg)
        number = self._num_requests
        self._num_requests += 1
        key = Key("all_reduce", x.shape, x.dtype, op)
        call = self._call(key, x, (flat,))
        return Request(self._engine, call, number, self._describer.call_site)

    def empty(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Tensor in memory that all members can read; collectives on it make no copies. Not a collective."""
        self._check_open()
        return self._engine.empty(shape, dtype)

    def split(self, color: int | None, key: int = 0) -> Group | None:
        """Divide the group; members that pass the same color form a new one, ordered by (key, rank).

        Args:
            color: Not negative; None to be in no new group.
            key: Order among equals.

        Returns:
            The new group, or None for color None. Cost: one all_gather of 24 bytes a member.
        """
        if color is not None and color < 0:
            msg = (
                f"expected a color of at least 0 or None, found {color} on rank {self.context.rank}"
            )
            raise ConfigError(msg)
        transport = self._memory.transport
        page = Port.first_page(transport)
        mine = torch.tensor([[-1 if color is None else color, key, page.word]], device="cpu")
        answers = self.all_gather(mine).tolist()
        if color is None:
            transport.arena.free(page)
            return None
        members = sorted((k, r) for r, (c, k, _) in enumerate(answers) if c == color)
        order = [r for _, r in members]
        ranks = tuple(self.ranks[r] for r in order)
        pages = [answers[r][2] for r in order]
        retired = self._memory.port.retired
        port = Port(transport, ranks, order.index(self.rank), pages, retired=retired)
        engine = MemoryEngine(transport, port, self._memory.progress, self.context.events)
        return Group(self.context, engine, ranks, epoch=self.epoch)

    def abort(self, reason: str) -> None:
        """Leave every operation of this group for good; the members' waits end with CommError and `reason`."""
        if not self._closed:
            self._closed = f"was aborted here: {reason}"
            self._engine.stop(reason)

    def close(self) -> None:
        """Give the group's memory back, but for 4 KiB; not a collective.

        Members that still need this rank raise PeerLostError; what is under way here fails with StaleError.
        """
        if not self._given_back:
            self._given_back = True
            self._closed = self._closed or "has been closed"
            self._engine.close()

    def statistics(self) -> dict[str, int]:
        """Operations, bytes, nanoseconds spent in operations and waited in them so far."""
        counts = self._engine.statistics
        return {
            "num_operations": counts.num_operations,
            "nbytes": counts.nbytes,
            "spent_ns": counts.spent_ns,
            "waited_ns": counts.waited_ns,
        }

    def __repr__(self) -> str:
        state = self._closed or f"{self._engine.statistics.num_operations} operations"
        return f"Group(rank {self.rank} of {self.size}, ranks {list(self.ranks)}, {state})"

    # What the calls above share.

    def _call(
        self,
        key: Key,
        full: torch.Tensor | None,
        tensors: tuple[torch.Tensor, ...],
        *,
        after: Callable[[], object] | None = None,
        timeout_s: float | None = None,
    ) -> Call:
        text, digest = self._describer.describe(key)
        return Call(
            key.kind,
            text,
            digest,
            tensors,
            key.op,
            key.peer,
            key.algorithm,
            0 if full is None else full.numel() * full.element_size(),
            self._describer.call_site(),
            self._deadline_s if timeout_s is None else timeout_s,
            after,
        )

    def _carry_out(
        self, call: Call, returned: torch.Tensor | None, *, background: bool
    ) -> torch.Tensor | Work:
        self._check_open()
        if background:
            return self._engine.start(call)
        self._engine.run(call)
        self._deadline_s = DEADLINE_S
        return returned  # type: ignore[return-value]  # None for a barrier, whose caller drops it

    def _pair(
        self, kind: str, x: torch.Tensor, peer: int, *, background: bool, timeout_s: float | None
    ) -> torch.Tensor | Work:
        check_peer(peer, self.size, "destination" if kind == "send" else "source")
        if peer == self.rank:
            msg = f"expected another member than oneself to {kind} with, found {peer} on rank {self.context.rank}"
            raise ConfigError(msg)
        flat, after = self._flat(x, written=kind == "recv")
        key = Key(kind, x.shape, x.dtype, peer=peer)
        after = after if kind == "recv" else None
        call = self._call(key, x, (flat,), after=after, timeout_s=timeout_s)
        return self._carry_out(call, x, background=background)

    def _flat(self, x: torch.Tensor, *, written: bool = True) -> Flat:
        return flatten(x, self._engine.device_types, written=written)

    def _check_open(self) -> None:
        if self._closed or self._memory.transport.forked:
            state = self._closed or "belongs to the parent of this forked process"
            msg = f"expected a group in use, found that this one (ranks {list(self.ranks)}) {state}"
            raise StaleError(msg)
