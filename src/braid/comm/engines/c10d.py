"""Collectives through a process group of torch: NCCL on GPUs, or Gloo and MPI.

Problem: c10d backends give poor error messages. If ranks call different operations, they hang or
abort; a death causes "Connection reset by peer" or no error.

Idea: the backend moves the data, and braid produces the errors. Descriptions of calls are exchanged
through the job's store. At the first use of a description, and at every call in `checked` mode, all
ranks compare it before the backend gets the call. When a call times out, all ranks read the last
calls of the other ranks. Deaths are reported through `Health`. `capabilities` lists the remaining
limits of the backend.

Collectives are generators here as well; they yield works of torch, which are waited for in turn.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.distributed import distributed_c10d

from braid.comm.engines.c10d_steps import TorchSteps, steps_of
from braid.comm.engines.collective import Collective
from braid.comm.engines.diagnostics import MemberOperation, mismatch_table, shared_gpu_error
from braid.comm.engines.engine import Capabilities, GroupStatistics
from braid.comm.engines.work import StepsBy, Work
from braid.comm.tensors.copies import Copies
from braid.errors import BraidError, CommError, CommTimeout, MismatchError, StaleError
from braid.runtime.events import Span
from braid.runtime.store import PrefixStore, RanksMissingError, Store, exchange
from braid.runtime.store.torch_store import as_torch_store
from braid.runtime.transport import RankContext

__all__ = ["C10dEngine", "MakeProcessGroup", "make_gloo", "make_nccl"]

c10d: Any = distributed_c10d  # torch's stubs are incomplete

# (store of the group's members, group rank, size, seconds) -> process group of torch
MakeProcessGroup = Callable[[Any, int, int, float], Any]

BACKEND_TIMEOUT_S = 600.0
TIMED_OUT = re.compile(r"[Tt]imed out|timing out|operation timeout")  # texts of Gloo and NCCL


def make_gloo(store: Any, rank: int, size: int, timeout_s: float) -> Any:
    """Return a Gloo process group, for CPU tensors."""
    return c10d.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))


def make_nccl(store: Any, rank: int, size: int, timeout_s: float) -> Any:
    """Return an NCCL process group, for CUDA tensors; one GPU per rank."""
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001 - torch has no other way
    return c10d.ProcessGroupNCCL(store, rank, size, options)


class C10dEngine:
    """Engine that runs collectives through a process group of torch.

    Args:
        context: Context of this rank.
        ranks: Global ranks of the members.
        make: Function that makes a process group of ranks that meet in a store.
        device_types: Types of the devices whose tensors the engine takes.
        store: Store where the members meet and compare; None for the job's store.
        name: Name of the group, unique.
        checked: Whether to compare descriptions at every call, not only at the first use.
    """

    capabilities = Capabilities(
        rank_order=False,
        requests_any_order=False,
        messages_checked=False,
        eager_messages=False,
        algorithms=(),
        adopts=False,
        wires=False,
        programs=False,
    )

    def __init__(
        self,
        context: RankContext,
        ranks: tuple[int, ...],
        make: MakeProcessGroup = make_gloo,
        *,
        device_types: frozenset[str] = frozenset({"cpu"}),
        store: Store | None = None,
        name: str = "world",
        checked: bool = False,
    ) -> None:
        self.device_types = device_types
        self.statistics = GroupStatistics()
        self.ranks = ranks
        self.rank = ranks.index(context.rank)
        self.size = len(ranks)
        self.checked = checked
        self._context = context
        self._make = make
        self._name = name
        self._root_store = context.store if store is None else store
        self._store = PrefixStore(f"delegate/{name}/", self._root_store)
        torch_store = as_torch_store(PrefixStore("c10d/", self._store))
        self._group = make(torch_store, self.rank, self.size, BACKEND_TIMEOUT_S)
        self._known: set[int] = set()
        self._sequence = 0
        self._num_subsets = 0
        self._end_reason = ""
        self.has_failed = False
        self._last: _Operation | None = None
        self._lock = threading.RLock()

    @property
    def forked(self) -> bool:
        """False: a fork is not detected; process groups of torch are undefined in a child."""
        return False

    def tune(self, timeout_s: float) -> None:
        """Do nothing: the backend chooses its algorithms."""

    costs = ""

    def use_costs(self, costs: str) -> None:
        """Do nothing: the backend chooses its algorithms."""

    def explain(self) -> str:
        """Return the text that the backend of torch chooses its algorithms itself."""
        return f"{self.size} ranks, {self._group.name()} chooses its algorithms itself"

    def record(self) -> dict[str, list[tuple[int, str]]]:
        """Return an empty record: the backend does not expose its choices."""
        return {}

    def run(self, c: Collective) -> None:
        """Run a collective in this thread."""
        self._operation(c).wait(None)

    def start(self, c: Collective, steps_by: StepsBy) -> Work:  # noqa: ARG002 - it has threads
        """Start a collective in the backend."""
        operation = self._operation(c)
        operation.advance()
        return Work(operation, _Operation.wait, _Operation.advance, c.result, c.source)

    def request(self, collective: Collective, number: int) -> C10dRequest:  # noqa: ARG002
        """Register a collective; all ranks must start their requests in the same order."""
        return C10dRequest(self)

    def advance(self) -> bool:
        """Advance started operations as far as possible, except send and recv."""
        return self._last is not None and not self._last.done and self._last.advance()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an ordinary tensor on this engine's device."""
        kind = "cuda" if "cuda" in self.device_types else "cpu"
        return torch.empty(tuple(shape), dtype=dtype, device=kind)

    def adopt(self, x: torch.Tensor) -> None:
        """Do nothing: the backend has no faster memory."""

    def token(self) -> int:
        """Return a number for a new group, counting the groups that this rank has joined."""
        self._num_subsets += 1
        return self._num_subsets << 20 | self._context.rank

    def forget(self, token: int) -> None:
        """Do nothing: tokens reserve no memory in this engine."""

    def subset(self, order: Sequence[int], tokens: Sequence[int]) -> C10dEngine:
        """Return the engine of a new group, with a new process group; see `Engine.subset`."""
        return C10dEngine(
            self._context,
            tuple(self.ranks[member] for member in order),
            self._make,
            device_types=self.device_types,
            store=self._root_store,
            name=f"{self._name}/{tokens[0]}",
            checked=self.checked,
        )

    def hand_over_to(self, engine: C10dEngine) -> None:
        """Do nothing: engines do not share process groups."""

    def stop(self, reason: str) -> None:
        """Abort the process group; other members' calls fail or time out, then raise `reason`."""
        self._end_reason = self._end_reason or reason
        self._publish("end_reason", reason)
        self._group.abort()

    def close(self) -> None:
        """Shut down the process group; abort it after a failure, since its work may not end."""
        self._end_reason = self._end_reason or "was closed"
        if self.has_failed:
            self._group.abort()
        else:
            self._group.shutdown()

    def _operation(self, c: Collective) -> _Operation:
        if self._end_reason:
            msg = f"{c.text} was called on a group that has ended: {self._end_reason}"
            raise StaleError(msg)
        with self._lock:
            if c.kind not in {"send", "recv"}:  # only two ranks take part: the others would wait
                self._sequence += 1
                self._publish(f"last/{self._sequence % 2}", f"{self._sequence} {c.text}")
                if self.checked or c.digest not in self._known:
                    self._compare(c)
                    self._known.add(c.digest)
            self.statistics.num_operations += 1
            self.statistics.nbytes += c.nbytes
            steps = steps_of(self._group, c)
            if c.copies is not None and c.copies.needed:
                steps = c.copies.around(steps)
            span = self._context.events.span(
                c.text, seq=self._sequence, nbytes=c.nbytes, site=c.site
            )
            operation = _Operation(self, c, steps, span)
            if c.kind not in {"send", "recv"}:
                # Gloo would run two collectives on one tensor at the same time
                operation.before, self._last = self._last, operation
        return operation

    def explain_failure(self, c: Collective, exc: BaseException) -> BaseException:
        """Return braid's error for an exception from the backend."""
        if isinstance(exc, BraidError):
            return exc
        shared_gpu = shared_gpu_error(str(exc), self.ranks)
        if shared_gpu is not None:
            return shared_gpu
        health = self._context.health
        health.collect()
        try:
            health.check(self.ranks, -1)
        except CommError as lost:
            return lost
        reason = self._published("end_reason")
        if reason:
            rank, text = next(iter(reason.items()))
            return CommError(
                f"stopped because rank {health.number(rank)} abandoned the group: {text}"
            )
        asked = [
            MemberOperation(health.number(r), text, "") for r, text in self._last_asked().items()
        ]
        if len({a.text for a in asked}) > 1:
            return MismatchError(mismatch_table(asked, step=self._sequence))
        text = str(exc).splitlines()[0] if str(exc) else type(exc).__name__
        here = health.number(self._context.rank)
        msg = f"{c.text} failed in {self._group.name()} on rank {here}: {text}"
        return CommTimeout(msg) if TIMED_OUT.search(text) else CommError(msg)

    def _compare(self, c: Collective) -> None:
        """Compare this call's description among all ranks."""
        topic = f"signature/{self._sequence}"

        def check() -> None:
            self._context.health.check_now(self.ranks)
            here = self._published(topic)
            self._check_ended([rank for rank in self.ranks if rank not in here])

        try:
            values = exchange(
                self._store,
                topic,
                self._context.rank,
                self.ranks,
                c.text.encode(),
                timeout_s=c.timeout_s or 0.0,
                clock=self._context.clock,
                check=check,
            )
        except RanksMissingError as exc:
            raise self._late(c, exc.ranks) from None
        texts = [value.decode() for value in values]
        if len(set(texts)) > 1:
            asked = [
                MemberOperation(self._context.health.number(rank), text, "")
                for rank, text in zip(self.ranks, texts, strict=True)
            ]
            error = MismatchError(mismatch_table(asked, step=self._sequence))
            self._end_reason = str(error)
            raise error

    def _check_ended(self, ranks: Sequence[int]) -> None:
        for rank, text in self._published("end_reason").items():
            if rank in ranks:
                number = self._context.health.number(rank)
                msg = f"stopped because rank {number} abandoned the group: {text}"
                raise CommError(msg)

    def _late(self, c: Collective, missing: Sequence[int]) -> CommTimeout:
        number, asked = self._context.health.number, sorted(self._last_asked().items())
        table = "\n".join(f"  rank {number(rank)}  last in {text}" for rank, text in asked)
        return CommTimeout(
            f"{c.text} did not end within {c.timeout_s:g} s: ranks {list(map(number, missing))} "
            f"did not call it\n{table}"
        )

    def _last_asked(self) -> dict[int, str]:
        """Return each rank's call in this step, or its last call before."""
        last: dict[int, tuple[int, str]] = {}
        for parity in (0, 1):
            for rank, text in self._published(f"last/{parity}").items():
                number, _, call = text.partition(" ")
                if int(number) <= self._sequence:
                    last[rank] = max(last.get(rank, (0, "")), (int(number), call))
        return {rank: call for rank, (_, call) in last.items()}

    def _publish(self, topic: str, text: str) -> None:
        self._store.set(f"{topic}/{self._context.rank}", text.encode())

    def _published(self, topic: str) -> dict[int, str]:
        keys = {rank: f"{topic}/{rank}" for rank in self.ranks}
        there = {rank: key for rank, key in keys.items() if self._store.check([key])}
        return {rank: self._store.get(key).decode() for rank, key in there.items()}


class C10dRequest:
    """Persistent request over a process group of torch: each start is a separate collective.

    Args:
        engine: Engine of the group.
    """

    def __init__(self, engine: C10dEngine) -> None:
        self._engine = engine

    def start(self, collective: Collective, scale: float | None, steps_by: StepsBy) -> Work:
        """Start the collective in the backend."""
        if scale is not None:
            copies = Copies(self._engine.device_types)
            copies.then(partial(collective.outs[0].mul_, scale))
            if collective.copies is not None:  # stored when scaled
                copies.include(collective.copies, position=0)
            collective = replace(collective, copies=copies)
        return self._engine.start(collective, steps_by)

    def residual(self) -> None:
        """Return None: the backend has no lossy formats."""

    def reset_residual(self) -> None:
        """Do nothing: there are no residuals."""


class _Operation:
    """One collective in progress in the backend."""

    def __init__(self, engine: C10dEngine, c: Collective, steps: TorchSteps, span: Span) -> None:
        self.text = c.text
        self.done = False
        self.error: BaseException | None = None
        self.before: _Operation | None = None  # must end before this one begins
        self._engine = engine
        self._collective = c
        self._steps = steps
        self._span = span
        self._work: Any = None
        self._ended: list[Callable[[], None]] = []

    def advance(self) -> bool:
        """Advance as far as possible without waiting; return whether it has ended."""
        if self.before is not None and not self.before.advance():
            return False
        self.before = None
        while not self.done and (self._work is None or self._work.is_completed()):
            self._step(None)
        return self.done

    def wait(self, timeout_s: float | None) -> None:
        """Wait until the collective has ended.

        Raises:
            CommError: The collective failed.
        """
        limit = self._collective.timeout_s if timeout_s is None else timeout_s
        if self.before is not None:
            with contextlib.suppress(BraidError):  # reported by its Work
                self.before.wait(timeout_s)
            self.before = None
        while not self.done:
            self._step(limit)
        if self.error is not None:
            raise self.error

    def on_done(self, call: Callable[[], None]) -> None:
        """Call `call` when the collective ends."""
        if self.done:
            call()
        else:
            self._ended.append(call)

    def _step(self, limit: float | None) -> None:
        try:
            if self._work is not None:
                wait_for(self._work, limit)
            self._work = next(self._steps, None)
            if self._work is None:
                self._finish(None)
        except BaseException as exc:  # noqa: BLE001 - raised in `wait`
            self._finish(self._engine.explain_failure(self._collective, exc))

    def _finish(self, error: BaseException | None) -> None:
        self.error = error
        self.done = True
        self._engine.has_failed |= error is not None
        self._span.end()
        for call in self._ended:
            call()


def wait_for(work: Any, limit: float | None) -> None:
    """Wait `limit` seconds for a work of torch; None and zero mean the work's default time-out."""
    if limit:
        work.wait(timedelta(seconds=limit))
    else:
        work.wait()
