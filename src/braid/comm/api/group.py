"""A group of ranks that communicate: the class that users call.

The group checks and describes collectives; its engine moves data. All members call the same
operations in the same order, with the same shapes and dtypes. If they do not, every member raises
the same MismatchError with a table of every member's call. When a synchronous call returns, the
tensor holds the result.

On failure of any call: when a member dies, every surviving member raises PeerLostError immediately.
When the deadline passes (300 s, 600 s for the first call), members raise CommTimeout, which names
the missing members. The tensors of the failed call are undefined.

The operations themselves are in `reductions`, `movements` and `point_to_point`.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from braid.comm.api.batch import Batch, Starter
from braid.comm.api.handle import Handle
from braid.comm.api.movements import Movements
from braid.comm.api.objects import Objects
from braid.comm.api.point_to_point import PointToPoint
from braid.comm.api.rebuild import meet_survivors
from braid.comm.api.reductions import Reductions
from braid.comm.api.request import Numbers, Request, describe_persistent
from braid.comm.engines.collective import Collective, Describer
from braid.comm.engines.engine import Engine
from braid.comm.engines.shared_memory import SharedMemoryEngine
from braid.comm.engines.work import StepsBy, Work
from braid.comm.tensors.arguments import Parts, check_movable, check_seconds, is_number
from braid.errors import ConfigError, StaleError
from braid.runtime.events import NameTable
from braid.runtime.store import Store, exchange_numbers
from braid.runtime.transport import MemoryTransport, RankContext

__all__ = ["Group"]

DEADLINE_S = 300.0
FIRST_DEADLINE_S = 600.0
REBUILD_S = 60.0
# groups to close in a forked child; a check for a fork at every call would cost more
_GROUPS: weakref.WeakSet[Group] = weakref.WeakSet()


class Group(Handle, Reductions, Movements, PointToPoint):
    """Ranks that communicate: the object on which collectives are called.

    Attributes:
        rank: Index of this rank in the group.
        size: Number of members.
        ranks: Global ranks of the members.
        epoch: Number of times that the group has been rebuilt after losses.
        context: Context of this rank.
        numbers: Allocator of the numbers of the group's persistent requests.

    Args:
        context: Context of this rank.
        engine: Engine that moves data.
        ranks: Global ranks of the members, in group order.
        names: Name table through which peers read descriptions.
        epoch: Number of rebuilds so far.
        name_prefix: Prefix of the names under which members meet in the store.
    """

    def __init__(
        self,
        context: RankContext,
        engine: Engine,
        ranks: tuple[int, ...],
        names: NameTable,
        *,
        epoch: int = 0,
        name_prefix: str = "world",
    ) -> None:
        self.context = context
        self.ranks = ranks
        self.rank = ranks.index(context.rank)
        self.size = len(ranks)
        self.epoch = epoch
        self.devices = engine.device_types
        self._engine = engine
        self._by_device: dict[str, Engine] = {}
        self._names = names
        self._describer = Describer(names, context.events, ranks)
        if isinstance(engine, SharedMemoryEngine):
            self._repeat = partial(engine.eager.repeat, self._describer.call_site)
        self._deadline_s, self._later_deadline_s = FIRST_DEADLINE_S, DEADLINE_S
        self._name_prefix = name_prefix
        self._successor: Group | None = None
        self._tokens = ""  # this rank's engine tokens for a rebuilt group
        self.numbers = Numbers()
        self._closed, self._given_back = "", False
        _GROUPS.add(self)

    @classmethod
    def world(
        cls, context: RankContext, transport: MemoryTransport, *, sum_order: str = "any"
    ) -> Group:
        """Return the group of all ranks. A collective: every rank calls it once.

        Args:
            context: Context of this rank.
            transport: Transport that reaches all ranks.
            sum_order: Order of sums over several hosts: `rank`, so that results do not depend on
                which ranks share a host, or `any`, which sums inside each host first and sends
                less.

        Raises:
            PeerLostError: A rank was lost before the group existed.
        """
        if sum_order not in {"rank", "any"}:
            msg = f"sum_order must be 'rank' or 'any', got {sum_order!r}"
            raise ConfigError(msg)
        engine = SharedMemoryEngine.world(
            context, transport, in_order=sum_order == "rank", timeout_s=FIRST_DEADLINE_S
        )
        return cls(context, engine, engine.pages.ranks, transport.names)

    @property
    def objects(self) -> Objects:
        """Collectives of Python objects."""
        return Objects(self)

    @property
    def engine(self) -> Engine:
        """Engine that carries out this group's collectives."""
        return self._engine

    def attach(self, engine: Engine) -> None:
        """Use `engine` for tensors on its devices, such as NCCL for tensors on GPUs.

        Args:
            engine: Engine of the same ranks; all members attach theirs. Groups that are later made
                from this group get a new engine of the same kind.
        """
        self._by_device.update(dict.fromkeys(engine.device_types, engine))
        self.devices |= engine.device_types
        if "cpu" in engine.device_types and isinstance(self._engine, SharedMemoryEngine):
            self._engine.eager.disable()

    def set_deadline(self, timeout_s: float) -> None:
        """Set the deadline of operations that do not pass `timeout_s`.

        Args:
            timeout_s: Seconds until CommTimeout, for operations and requests from now on.

        Raises:
            ConfigError: `timeout_s` is not a number of seconds.
        """
        self._deadline_s = self._later_deadline_s = check_seconds(timeout_s) or DEADLINE_S

    def coalesce(self, *, steps_by: StepsBy = StepsBy.CALLER) -> Batch:
        """Return a context manager that records operations and starts them together at its end.

        See `braid.comm.api.batch`.

        Args:
            steps_by: Thread for the operations' steps. `StepsBy.WAITER` is for operations that are
                waited for soon, where a background thread would only take time from other work.
        """
        self._check_open()
        return Batch(self, partial(self._launch, steps_by=steps_by))

    def starting(self, *, steps_by: StepsBy = StepsBy.CALLER) -> Starter:
        """Return an object whose operations start and return a Work without blocking.

        No thread is involved; see `StepsBy`.

        Args:
            steps_by: Thread that takes the operations' steps; see `coalesce`.
        """
        return Starter(self, self._start, steps_by)

    def persistent(
        self,
        kind: str,
        x: Parts,
        *,
        out: Parts | None = None,
        op: str = "sum",
        root: int = 0,
        wire: str | None = None,
    ) -> Request:
        """Register `x` for an operation that will be started many times, on a separate channel.

        All members create their requests in the same order; after that they may start them in any
        order. Tensors from `empty` are not copied. CUDA tensors that no engine takes are copied to
        the CPU and back at every start.

        Args:
            kind: all_reduce, broadcast, all_gather, reduce_scatter or all_to_all.
            x: Contiguous tensor; kept alive by the request. For a reduce_scatter also one tensor
                per member, adjacent in memory.
            out: Contiguous tensor for the result of the last three kinds; for an all_gather also
                one tensor per member.
            op: Reduction.
            root: Group rank of the root of a broadcast.
            wire: Wire format of an all_reduce. The error of a lossy format at one start is added
                at the next (error feedback).

        Cost: none; the first start compares the members' arguments.
        """
        collective = describe_persistent(self, kind, x, out=out, op=op, root=root, wire=wire)
        engine = self._prepare(collective)
        return Request(engine, collective, self.numbers, self._describer)

    def empty(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a tensor in memory that all members can read. Not a collective.

        Collectives on such tensors make no copies.

        Args:
            shape: Sizes of the dims.
            dtype: Dtype of the elements.

        Raises:
            CommError: There is not enough memory.
        """
        self._check_open()
        if not (isinstance(shape, list | tuple) and all(is_number(n) and n >= 0 for n in shape)):
            msg = f"{shape!r} is not a shape: pass sizes that are not negative, such as (3, 4)"
            raise ConfigError(msg)
        if not isinstance(dtype, torch.dtype):
            msg = f"{dtype!r} is not a torch.dtype: pass one such as torch.float32"  # type: ignore[unreachable]
            raise ConfigError(msg)
        return self._engine.empty(shape, dtype)

    def adopt(self, x: torch.Tensor) -> None:
        """Move the storage of `x` into memory that all members can read, in place.

        Not a collective. All tensors on that storage move with it. Does nothing if the group has no
        such memory.

        Args:
            x: Tensor on the CPU.

        Raises:
            CommError: There is too little space in /dev/shm, where torch keeps shared storages.
            ConfigError: `x` is not a tensor on the CPU.
        """
        self._check_open()
        check_movable(x)
        self._engine.adopt(x)

    def split(self, color: int | None, key: int = 0) -> Group | None:
        """Divide the group: members that pass the same color form a new group.

        Members of the new group are ordered by (key, rank).

        Args:
            color: Nonnegative number; None to join no new group and get None.
            key: Order among members of the same color.

        Cost: one all_gather of 24 bytes a member.
        """
        whole = all(is_number(number) for number in (color or 0, key))
        if not whole or (color is not None and color < 0):
            msg = (
                f"rank {self.context.rank} called split(color={color!r}, key={key!r}): pass a "
                "whole number of at least 0 or None as color, and a whole number as key"
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

    def select(
        self,
        ranks: Sequence[int],
        store: Store,
        *,
        name: str,
        previous: str = "",
        timeout_s: float = FIRST_DEADLINE_S,
    ) -> Group:
        """Return a new group of some members; only they call this, and they meet through `store`.

        Args:
            ranks: Global ranks of the new group, in group order.
            store: Store through which the members meet.
            name: Name of the meeting, new for every group.
            previous: Name of the last meeting of the same ranks; its entries are deleted.
            timeout_s: Seconds to wait for the members.

        Raises:
            ConfigError: Some of `ranks` are not members, or this rank is not among them.
            RanksMissingError: Some members did not call this in time; the message names them.
            PeerLostError: A member was lost before the group existed.
        """
        self._check_open()
        strangers = [rank for rank in ranks if rank not in self.ranks]
        if strangers or self.context.rank not in ranks or len(set(ranks)) < len(ranks):
            msg = (
                f"rank {self.context.rank} called select({list(ranks)}) on the group of ranks "
                f"{list(self.ranks)}: name each member once, and include this rank"
            )
            raise ConfigError(msg)
        check = partial(self.context.health.check_now, ranks)
        meet = partial(exchange_numbers, store, timeout_s=timeout_s, check=check)
        mine = enumerate(engine.token() for engine in self._engines())
        columns = [meet(f"select/{name}/{i}", self.context.rank, ranks, n) for i, n in mine]
        for i in range(len(columns)) if previous else ():
            store.delete_key(f"select/{previous}/{i}/{self.context.rank}")
        tokens = [list(row) for row in zip(*columns, strict=True)]
        return self._subset([self.ranks.index(rank) for rank in ranks], tokens)

    def rebuild(
        self, survivors: Sequence[int] | None = None, *, timeout_s: float = REBUILD_S
    ) -> Group:
        """Return a group of the ranks that survive a loss; every survivor calls this.

        No process is restarted. Operations of this group in progress end with StaleError, as do
        later calls and its requests. Messages that were sent but not received are lost. Groups that
        were made from this group must each be rebuilt as well. Some survivors may have finished a
        step that failed on others: agree on the last complete step before continuing.

        Args:
            survivors: Global ranks of the survivors, the same on all of them; None to agree on them
                through the store.
            timeout_s: Seconds to wait for the other survivors.

        Returns:
            The group of the survivors, in their previous order, with the next epoch.

        Raises:
            CommTimeout: Some rank neither called this nor died.
            PeerLostError: One of `survivors` is lost.
            StaleError: The other ranks rebuilt without this rank, or this group was rebuilt before.

        Cost: one meeting in the store; nothing is measured again.
        """
        if self._engine.forked:
            self._check_open()
        if self._given_back and self._successor is not None:
            msg = (
                f"this group (epoch {self.epoch}) was replaced by rebuild(): use the group that "
                "rebuild() returned, or group.current"
            )
            raise StaleError(msg)
        name = f"{self._name_prefix}/{self.epoch}"
        self.abort(f"rebuild() replaces it by the group of epoch {self.epoch + 1}")
        # kept for another attempt: other ranks may use the tokens of the first attempt
        self._tokens = self._tokens or ",".join(str(engine.token()) for engine in self._engines())
        values = meet_survivors(
            self.context, self.ranks, survivors, name=name, value=self._tokens, timeout_s=timeout_s
        )
        tokens = [[int(token) for token in value.split(",")] for value in values.values()]
        order = [self.ranks.index(rank) for rank in values]
        group = self._subset(order, tokens, is_rebuilt=True)
        for old, new in zip(self._engines(), group._engines(), strict=True):  # noqa: SLF001
            old.hand_over_to(new)
        self._successor = group
        self.close()
        return group

    @property
    def current(self) -> Group:
        """This group, or the group that replaced it in the last rebuild."""
        return self if self._successor is None else self._successor.current

    def advance(self) -> bool:
        """Take all steps of started operations that are possible now, without blocking.

        Returns:
            Whether any step was taken.
        """
        moved = [engine.advance() for engine in self._engines()]
        return any(moved)

    def abort(self, reason: str) -> None:
        """Fail all operations of this group, now and later.

        Waits of other members end with CommError, which contains `reason`.
        """
        if not self._closed:
            self._closed = f"was aborted here: {reason}"
            for engine in self._engines():
                engine.stop(reason)

    def close(self) -> None:
        """Free the group's memory. Not a collective.

        If a group is garbage-collected without `close`, this rank closes it when it makes its next
        group. 4 KiB are reused by a later group once all members have closed this one; over several
        hosts, and in the portable mode, they are never freed.

        Members that still need this rank raise PeerLostError; operations of this rank in progress
        fail with StaleError.
        """
        if not self._given_back:
            self._given_back = True
            self._closed = self._closed or "has been closed"
            if self._engine.forked:  # a child must not free them, and may never get the locks
                return
            for engine in self._engines():
                engine.close()

    def statistics(self) -> dict[str, int]:
        """Return numbers of operations and bytes, and nanoseconds in operations and in waits."""
        return vars(self._engine.statistics).copy()

    def __repr__(self) -> str:
        state = self._closed or f"{self._engine.statistics.num_operations} operations"
        return f"Group(rank {self.rank} of {self.size}, ranks {list(self.ranks)}, {state})"

    def _submit(self, collective: Collective) -> Any:
        engine = self._prepare(collective)
        if collective.async_op:
            return engine.start(collective, StepsBy.THREAD)
        engine.run(collective)
        self._deadline_s = self._later_deadline_s
        return collective.result

    def _start(self, collective: Collective, steps_by: StepsBy) -> Work:
        return self._prepare(collective).start(collective, steps_by)

    def _launch(self, collectives: Sequence[Collective], *, steps_by: StepsBy) -> list[Work]:
        engines = [self._prepare(c) for c in collectives]  # checked before any is started
        return [engine.start(c, steps_by) for engine, c in zip(engines, collectives, strict=True)]

    def _prepare(self, collective: Collective) -> Engine:
        """Describe a collective, check it, and return the engine that takes it."""
        engine = self._engine
        if self._closed:
            self._check_open()
        if self._by_device and collective.outs:
            engine = self._by_device.get(collective.outs[0].device.type, engine)
        self._describer.describe(collective)
        timeout_s = collective.timeout_s
        if timeout_s is None:
            collective.timeout_s = self._deadline_s
        elif type(timeout_s) is not float or not timeout_s > 0:
            collective.timeout_s = check_seconds(timeout_s)
        if collective.algorithm is not None or collective.wire is not None:
            engine.capabilities.check(collective)
        return engine

    def _device_types(self, x: torch.Tensor) -> frozenset[str]:
        return self._by_device.get(x.device.type, self._engine).device_types

    def _engines(self) -> list[Engine]:
        return list(dict.fromkeys([self._engine, *self._by_device.values()]))

    def _subset(
        self, order: Sequence[int], tokens: Sequence[Sequence[int]], *, is_rebuilt: bool = False
    ) -> Group:
        """Return a group of some members, with one token per engine from each of them."""
        ranks = tuple(self.ranks[r] for r in order)
        branch = "" if is_rebuilt else f"/{ranks[0]}-{tokens[0][0]}"
        first, *others = (
            engine.subset(order, [row[i] for row in tokens])
            for i, engine in enumerate(self._engines())
        )
        group = Group(
            self.context,
            first,
            ranks,
            self._names,
            epoch=self.epoch + is_rebuilt,
            name_prefix=f"{self._name_prefix}{branch}",
        )
        for engine in others:
            group.attach(engine)
        return group

    def _check_open(self) -> None:
        if self._closed:
            numbers = list(map(self.context.health.number, self.ranks))
            msg = f"group of ranks {numbers} cannot be used: it {self._closed}"
            raise StaleError(msg)


def _note_fork() -> None:
    """Mark the parent's groups as closed in a forked child, before it can use them."""
    for group in _GROUPS:
        if group.engine.forked:
            group._closed = group._closed or "belongs to the parent of this forked process"  # noqa: SLF001


os.register_at_fork(after_in_child=_note_fork)  # after the hooks of the transports
