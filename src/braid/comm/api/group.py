"""A group of ranks that communicate: what users call.

The group checks and describes; its engine moves data. All members call the same operations in the same order, with the
same shapes and dtypes; if they do not, every one of them raises the same MismatchError with the table of what each
asked for. The tensor of a synchronous call holds the result when the call returns.

On failure of any call: PeerLostError on every surviving member, at once, when a member dies; CommTimeout naming who has
not come when the deadline passes (300 s, the first call 600 s); the tensors involved are then undefined.

The operations themselves are in `reducing`, `moving` and `messaging`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch

from braid.comm.algorithms.programs import PROGRAMS, check_equal_parts
from braid.comm.api.batch import Batch
from braid.comm.api.call import Order
from braid.comm.api.describe import Describer
from braid.comm.api.movements import Moving
from braid.comm.api.objects import Objects
from braid.comm.api.point_to_point import Messaging
from braid.comm.api.rebuild import meet_survivors
from braid.comm.api.reductions import Reducing
from braid.comm.api.request import Numbers, Request
from braid.comm.channel.control_pages import Port
from braid.comm.engines.engine import Call, Engine
from braid.comm.engines.progress import Progress
from braid.comm.engines.shared_memory import MemoryEngine
from braid.comm.engines.work import Work
from braid.comm.tensors.arguments import Data, as_tensor, check_movable, check_seconds, is_number
from braid.errors import ConfigError, StaleError
from braid.events import NameTable
from braid.store import Store
from braid.transport import MemoryTransport, RankContext

__all__ = ["Group"]

DEADLINE_S = 300.0
FIRST_DEADLINE_S = 600.0
REBUILD_S = 60.0
PERSISTENT = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")


class Group(Reducing, Moving, Messaging):
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
        names: Where descriptions are kept so that peers can read them.
        epoch: See above.
        lineage: How it was made; tells its meetings in the store from those of other groups.

    Attributes:
        numbers: Of its requests.
    """

    def __init__(
        self,
        context: RankContext,
        engine: Engine,
        ranks: tuple[int, ...],
        names: NameTable,
        *,
        epoch: int = 0,
        lineage: str = "world",
    ) -> None:
        self.context = context
        self.ranks = ranks
        self.rank = ranks.index(context.rank)
        self.size = len(ranks)
        self.epoch = epoch
        self._engine = engine
        self._by_device: dict[str, Engine] = {}
        self._names = names
        self._describer = Describer(names, context.events, ranks)
        self._deadline_s = FIRST_DEADLINE_S
        self._lineage = lineage
        self._successor: Group | None = None
        self._word = ""  # what this rank brings when the group is rebuilt
        self.numbers = Numbers()
        self._closed = ""
        self._given_back = False

    @classmethod
    def world(
        cls, context: RankContext, transport: MemoryTransport, *, sum_order: str = "any"
    ) -> Group:
        """The group of all ranks. Collective through the store; every rank calls it once.

        Args:
            context: Of this rank.
            transport: By which all ranks can be reached.
            sum_order: Of ranks of several hosts: `rank` sums in the order of ranks, as inside of a host, so that results do not
                depend on which ranks share one; `any` sums inside of each host first, which sends less.
        """
        if sum_order not in {"rank", "any"}:
            msg = f"expected sum_order 'rank' or 'any', found {sum_order!r}"
            raise ConfigError(msg)
        page = Port.first_page(transport)
        ranks = tuple(range(context.world_size))
        pages = _meet(context.store, "group/world", context.rank, ranks, page.word)
        port = Port(transport, ranks, context.rank, pages)
        # a rank that is quick to leave must not be gone before the others have mapped its page
        _meet(context.store, "group/mapped", context.rank, ranks, 0)
        engine = MemoryEngine(
            transport,
            port,
            Progress(transport),
            context.events,
            in_order=sum_order == "rank",
            owns_progress=True,
        )
        return cls(context, engine, ranks, transport.names)

    @property
    def objects(self) -> Objects:
        """Collectives of Python objects."""
        return Objects(self)

    @property
    def engine(self) -> Engine:
        """What carries out this group's calls, for whoever wants to know or to tune it."""
        return self._engine

    def attach(self, engine: Engine) -> None:
        """Let `engine` take the tensors of its devices, such as a delegate to NCCL those on GPUs.

        Args:
            engine: Of the same ranks; all members attach theirs. Groups made of this one later get one of their own.
        """
        self._by_device.update(dict.fromkeys(engine.device_types, engine))

    def coalesce(self, *, lazily: bool = False) -> Batch:
        """A block in which operations are written down, to be started together at its end; see `braid.comm.api.batch`.

        Args:
            lazily: Take no steps before somebody in this process waits or asks, for whatever, or starts something in the
                background behind it. For what will be waited for soon, where steps would only take time from other work.
        """
        self._check_open()
        launch = partial(self._launch, lazily=lazily)
        return Batch(self.rank, self.size, self._device_types, launch)

    def persistent(
        self,
        kind: str,
        x: Data,
        *,
        out: Data | None = None,
        op: str = "sum",
        root: int = 0,
        wire: str | None = None,
    ) -> Request:
        """Register `x` for an operation that will be started many times, on its own channel.

        All members create their requests in the same order; after that they may start them in any order. On memory
        from `empty` nothing is copied.

        Args:
            kind: all_reduce, broadcast, all_gather, reduce_scatter or all_to_all.
            x: Contiguous; kept alive by the request.
            out: Where the result of the last three goes; contiguous, too.
            op: Reduction.
            root: Of a broadcast.
            wire: Of an all_reduce. What a lossy format leaves out at one start is added at the next.

        Cost: none; the first start compares what the members registered.
        """
        if kind not in PERSISTENT:
            msg = f"expected kind out of {', '.join(PERSISTENT)} for a persistent request, found {kind!r}"
            raise ConfigError(msg)
        if wire is not None and kind != "all_reduce":
            msg = f"expected wire=None for {kind}, found {wire!r}: only an all_reduce converts numbers on their way"
            raise ConfigError(msg)
        batch = Batch(self.rank, self.size, self._device_types, lambda _: [])
        order = batch.one(kind, x, out=out, op=op, root=root, wire=wire)
        copied = order.copies is not None and order.copies.needed
        if copied or order.ins[0].data_ptr() != as_tensor(x).data_ptr():  # one of a read-only array
            msg = (
                f"expected contiguous tensors on the group's device to register for {kind}, found one that must be "
                "copied: pass x.contiguous(), and an out that does not overlap it"
            )
            raise ConfigError(msg)
        call = self._call(order)
        return Request(
            self._engine_for(order), call, self.numbers, self._describer.call_site, order.returned
        )

    def empty(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Tensor in memory that all members can read; collectives on it make no copies. Not a collective.

        Args:
            shape: Sizes.
            dtype: Of the elements.

        Raises:
            CommError: The memory is not to be had.
        """
        self._check_open()
        if not (isinstance(shape, list | tuple) and all(is_number(n) and n >= 0 for n in shape)):
            msg = f"expected a shape, such as (3, 4), found {shape!r}"
            raise ConfigError(msg)
        if not isinstance(dtype, torch.dtype):
            msg = f"expected a torch.dtype, found {dtype!r}"  # type: ignore[unreachable]  # without a type checker
            raise ConfigError(msg)
        return self._engine.empty(shape, dtype)

    def adopt(self, x: torch.Tensor) -> None:
        """Move the storage of `x` into such memory, in place; every tensor on it follows. Not a collective.

        Does nothing where there is no such memory (`engine.capabilities.adopts`).

        Args:
            x: On the CPU.

        Raises:
            CommError: There is too little space in /dev/shm, where torch keeps shared storages.
            ConfigError: It is no such tensor.
        """
        self._check_open()
        check_movable(x)
        self._engine.adopt(x)

    def split(self, color: int | None, key: int = 0) -> Group | None:
        """Divide the group; members that pass the same color form a new one, ordered by (key, rank).

        Args:
            color: Not negative; None to be in no new group.
            key: Order among equals.

        Returns:
            The new group, or None for color None. Cost: one all_gather of 24 bytes a member.
        """
        whole = all(is_number(number) for number in (color or 0, key))
        if not whole or (color is not None and color < 0):
            msg = (
                f"expected a color of at least 0 or None and a whole number as key, found {color!r} and {key!r} on rank "
                f"{self.context.rank}"
            )
            raise ConfigError(msg)
        self._check_open()
        engines = self._engines()
        tokens = [engine.token() for engine in engines]
        mine = torch.tensor([[-1 if color is None else color, key, *tokens]], device="cpu")
        if "cpu" not in self._device_types(mine):
            mine = mine.to(next(iter(self._engine.device_types)))
        answers = self.all_gather(mine).tolist()
        if color is None:
            for engine, token in zip(engines, tokens, strict=True):
                engine.forget(token)
            return None
        members = sorted((answer[1], r) for r, answer in enumerate(answers) if answer[0] == color)
        order = [r for _, r in members]
        return self._subset(order, [answers[r][2:] for r in order])

    def select(self, ranks: Sequence[int], store: Store, *, name: str) -> Group:
        """A new group of some members; only they call this, and they meet through `store`.

        Args:
            ranks: Global ranks, this one among them, in the order of the new group; the same on all.
            store: Where they meet.
            name: Of the meeting: new for every group.

        Raises:
            ConfigError: Ranks that are no members, or not this one.
            CommTimeout: Some did not come; they are named.
        """
        self._check_open()
        strangers = [rank for rank in ranks if rank not in self.ranks]
        if strangers or self.context.rank not in ranks or len(set(ranks)) < len(ranks):
            msg = (
                f"expected different ranks out of {list(self.ranks)} with {self.context.rank} among them, found "
                f"{list(ranks)}"
            )
            raise ConfigError(msg)
        columns = [
            _meet(store, f"select/{name}/{i}", self.context.rank, tuple(ranks), engine.token())
            for i, engine in enumerate(self._engines())
        ]
        tokens = [list(row) for row in zip(*columns, strict=True)]
        return self._subset([self.ranks.index(rank) for rank in ranks], tokens)

    def rebuild(
        self, survivors: Sequence[int] | None = None, *, timeout_s: float = REBUILD_S
    ) -> Group:
        """Go on with those that are left after a loss; every survivor calls it, and this process is not started anew.

        What is under way in this group ends with StaleError, and so does whatever is asked of it later, its requests included; what was
        sent but not received is gone. Groups that were made of it must each be rebuilt, too. Some survivors may have finished a step that
        ended with an error on others: agree on the last complete one before going on.

        Args:
            survivors: Their global ranks, the same on all of them; agreed upon through the store when None.
            timeout_s: Seconds to wait for the others.

        Returns:
            The group of the survivors, in their old order, with the next epoch.

        Raises:
            CommTimeout: Some rank neither came nor died.
            PeerLostError: One of `survivors` is gone.
            StaleError: The others have gone on without this rank, or the group has been rebuilt before.

        Cost: one meeting in the store; nothing is measured again.
        """
        if self._given_back and self._successor is not None:
            msg = f"expected a group that was not rebuilt, found that epoch {self.epoch + 1} of it exists: use that one"
            raise StaleError(msg)
        name = f"{self._lineage}/{self.epoch}"
        self.abort(f"it is rebuilt, as epoch {self.epoch + 1}")
        # kept for another attempt: others may go on with what this rank has said in the first one
        self._word = self._word or ",".join(str(engine.token()) for engine in self._engines())
        words = meet_survivors(
            self.context, self.ranks, survivors, name=name, word=self._word, timeout_s=timeout_s
        )
        tokens = [[int(token) for token in word.split(",")] for word in words.values()]
        order = [self.ranks.index(rank) for rank in words]
        group = self._subset(order, tokens, epoch=self.epoch + 1, lineage=self._lineage)
        for old, new in zip(self._engines(), group._engines(), strict=True):  # noqa: SLF001 - one of its own
            old.bequeath(new)
        self._successor = group
        self.close()
        return group

    @property
    def latest(self) -> Group:
        """This group, or what it was rebuilt as."""
        return self if self._successor is None else self._successor.latest

    def advance(self) -> bool:
        """Take the steps that are possible now of what this rank has started and nobody waits for; never blocks.

        Returns:
            Whether any could be taken.
        """
        moved = [engine.advance() for engine in self._engines()]
        return any(moved)

    def abort(self, reason: str) -> None:
        """Leave every operation of this group for good; the members' waits end with CommError and `reason`."""
        if not self._closed:
            self._closed = f"was aborted here: {reason}"
            for engine in self._engines():
                engine.stop(reason)

    def close(self) -> None:
        """Give the group's memory back, but for 4 KiB; not a collective.

        Members that still need this rank raise PeerLostError; what is under way here fails with StaleError.
        """
        if not self._given_back:
            self._given_back = True
            self._closed = self._closed or "has been closed"
            for engine in self._engines():
                engine.close()

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

    # What the operations above share.

    def _submit(self, order: Order) -> Any:
        self._check_open()
        call = self._call(order)
        engine = self._engine if not self._by_device else self._engine_for(order)
        if order.async_op:
            return engine.start(call).returns(order.returned, order.source)
        engine.run(call)
        self._deadline_s = DEADLINE_S
        return order.returned

    def _launch(self, orders: Sequence[Order], *, lazily: bool) -> list[Work]:
        self._check_open()
        works = []
        for engine, run in groupby(orders, key=self._engine_for):
            of_engine = list(run)
            started = engine.launch([self._call(order) for order in of_engine], lazily=lazily)
            works += [
                work.returns(order.returned, order.source)
                for work, order in zip(started, of_engine, strict=True)
            ]
        return works

    def _call(self, order: Order) -> Call:
        key = order.key
        text, digest = self._describer.describe(key)
        if key.algorithm is not None:
            self._check_algorithm(key.algorithm, self._engine_for(order))
            if key.algorithm in PROGRAMS:
                check_equal_parts(key.kind, key.algorithm, order.widths)
        if key.wire is not None and not self._engine_for(order).capabilities.wires:
            msg = f"expected wire=None for tensors that a backend of torch moves, found {key.wire!r}: convert the tensor first"
            raise ConfigError(msg)
        copies = order.copies
        return Call(
            key.kind,
            text,
            digest,
            order.ins,
            order.outs,
            order.widths,
            key.op,
            key.peer,
            order.tag,
            order.exclusive,
            key.algorithm,
            order.nbytes,
            self._describer.call_site(),
            check_seconds(order.timeout_s) or self._deadline_s,
            copies if copies is not None and copies.needed else None,
            order.source,
            key.wire,
        )

    def _check_algorithm(self, name: str, engine: Engine) -> None:
        possible = engine.capabilities.algorithms
        if name not in possible:
            msg = (
                f"expected an algorithm that this group's engine can use here ({', '.join(possible) or 'it chooses itself'}), "
                f"found {name!r}: leave algorithm out, or see braid doctor for what the host does not permit"
            )
            raise ConfigError(msg)

    def _device_types(self, x: torch.Tensor) -> frozenset[str]:
        return self._by_device.get(x.device.type, self._engine).device_types

    def _engine_for(self, order: Order) -> Engine:
        kind = order.outs[0].device.type if order.outs else ""
        return self._by_device.get(kind, self._engine)

    def _engines(self) -> list[Engine]:
        return list(dict.fromkeys([self._engine, *self._by_device.values()]))

    def _subset(
        self,
        order: Sequence[int],
        tokens: Sequence[Sequence[int]],
        *,
        epoch: int | None = None,
        lineage: str = "",
    ) -> Group:
        """A group of some members, each of whom brought one token for each engine."""
        ranks = tuple(self.ranks[r] for r in order)
        first, *others = (
            engine.subset(order, [row[i] for row in tokens])
            for i, engine in enumerate(self._engines())
        )
        group = Group(
            self.context,
            first,
            ranks,
            self._names,
            epoch=self.epoch if epoch is None else epoch,
            lineage=lineage or f"{self._lineage}/{self.ranks[order[0]]}-{tokens[0][0]}",
        )
        for engine in others:
            group.attach(engine)
        return group

    def _check_open(self) -> None:
        if self._closed or self._engine.forked:
            state = self._closed or "belongs to the parent of this forked process"
            msg = f"expected a group in use, found that this one (ranks {list(self.ranks)}) {state}"
            raise StaleError(msg)


def _meet(store: Store, topic: str, rank: int, ranks: tuple[int, ...], word: int) -> list[int]:
    """Tell the ranks a word and hear theirs, in their order."""
    store.set(f"{topic}/{rank}", str(word).encode())
    keys = [f"{topic}/{other}" for other in ranks]
    store.wait(keys, FIRST_DEADLINE_S)
    return [int(value) for value in store.multi_get(keys)]
