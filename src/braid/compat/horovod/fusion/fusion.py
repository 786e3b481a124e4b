"""Operations by name, from any thread and in any order, carried out by a background thread.

Problem: collectives must be started in the same order on all ranks. Autograd hooks, several threads
and data-dependent models start them in different orders.

Idea: `submit` only adds a request to a table. A thread agrees with the other ranks on the requests
that all have submitted (`fusion_state`), and carries them out in that order, many small tensors
together. It sleeps while there are no requests: a rank enters an exchange when it has a new one,
and periodically while requests are pending. Threads that wait for an exchange also sleep.

    caller      submit a   submit b                         wait
    thread      ......>| agree | carry out [a b] | .....     ^ woken
    other rank  ..........>|  agree | carry out [a b] |

Source: Sergeev & Del Balso 2018. There, threads exchange every millisecond, busy or idle.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from braid.comm import Group
from braid.compat.horovod.fusion.autotune import Autotuner, Settings
from braid.compat.horovod.fusion.batching import FusedBatch
from braid.compat.horovod.fusion.entry import (
    FusionHandle,
    TensorTableEntry,
    Waiters,
    wait_for_points,
)
from braid.compat.horovod.fusion.fusion_buffer import ALIGNMENT, FusionBuffer
from braid.compat.horovod.fusion.fusion_state import CycleOutcome, FusionState
from braid.compat.horovod.fusion.operations import (
    Operations,
    default_operations,
    missing_memory,
    needed_bytes,
)
from braid.compat.horovod.fusion.options import FusionOptions
from braid.compat.horovod.fusion.request import Request
from braid.compat.horovod.fusion.stall import Stall
from braid.compat.horovod.fusion.timeline import Timeline
from braid.errors import CommError, ConfigError, PeerLostError
from braid.runtime.closing import Closing

__all__ = ["Fusion"]

# between exchanges of a rank with pending but without new requests; grows
MIN_PAUSE_S = 0.001
MAX_PAUSE_S = 0.008
STOP_TIMELINE = "stop timeline"
HEARTBEAT_S = 1.0  # between exchanges of a rank without pending requests
# from this size on, ranks first check that all have the memory, at a small relative cost
LARGE_BYTES = 64 << 20
BROKEN_LIMIT_S = 2.0  # for all ranks to report that an operation has failed on them


class Fusion(Closing):
    """Engine that runs Horovod's operations on one rank; a context manager, or call `close`.

    Args:
        group: Group of the ranks, for the engine's exclusive use, such as `group.split(0)`.
        options: Options of the engine.
        on_stall: Called on each rank with a stall: a name that some ranks have not submitted.
        on_choice: Called once for each kind of request and each implementation that carries it
            out, with both names.
        on_tuned: Called on the first rank when a search is over.
        on_wait: Called in a thread before it waits for an operation; can submit collected requests.
        on_joined: Called when all ranks have joined, before they can submit requests again.

    Cost: an exchange is one all_reduce of a quarter KiB; with new requests also a gather and a
        broadcast of objects.

    On failure: operations in flight and later ones fail with the error.
    """

    def __init__(
        self,
        group: Group,
        options: FusionOptions | None = None,
        *,
        on_stall: Callable[[Stall], None] | None = None,
        on_choice: Callable[[str, str], None] | None = None,
        on_tuned: Callable[[Autotuner], None] | None = None,
        on_wait: Callable[[], None] | None = None,
        on_joined: Callable[[], None] | None = None,
    ) -> None:
        self._on_joined = on_joined or (lambda: None)
        self._on_wait = on_wait or (lambda: None)
        self._on_tuned = on_tuned or (lambda _tuner: None)
        self.options = options or FusionOptions()
        self.group = group
        self.buffer = FusionBuffer(group)
        self._clock = group.context.clock
        self.timeline = Timeline(group)
        self.operations: Operations = default_operations(
            group,
            self.buffer,
            self.timeline,
            algorithm=self.options.algorithm,
            on_choice=on_choice,
        )
        self._on_stall = on_stall or (lambda _stall: None)
        self._state = FusionState(group.rank, group.ranks, self.options.state)
        self._entries: dict[str, TensorTableEntry] = {}
        self._in_flight: list[TensorTableEntry] = []  # being carried out
        self._lock = threading.Condition()
        self._waiters = Waiters(self._hurry)
        self._is_asleep = False
        self._num_places = 0
        self._joining: FusionHandle | None = None
        self._joined_on = 0  # number of a device
        self._urgent = False
        self._pause_s = MIN_PAUSE_S
        self._cycle_time_s = self.options.cycle_time_s
        self.tuner: Autotuner | None = None
        if self.options.autotune is not None and group.rank == 0:  # the rank that decides
            start = Settings(self.options.state.threshold_bytes, self._cycle_time_s)
            self.tuner = Autotuner(start, self.options.autotune)
        self._stop_path: Path | None = None
        self._ended = ""
        self._error: BaseException | None = None
        bitmask = self._state.open(0.0)
        self._bitmask = torch.zeros(len(bitmask) // 8, dtype=torch.int64)
        self._exchange = group.persistent("all_reduce", self._bitmask, op="band")
        self.num_cycles = 0
        self._thread = threading.Thread(
            target=self._run, name=f"braid-fusion-{group.context.rank}", daemon=True
        )
        self._thread.start()

    # From any thread.

    def submit(
        self, request: Request, tensor: torch.Tensor | None, out: torch.Tensor | None = None
    ) -> FusionHandle:
        """Submit an operation, which is carried out once all ranks have submitted it.

        Args:
            request: Request that describes the operation.
            tensor: Input; do not change it until the operation is done.
            out: Memory for the result, if the result has the shape of `tensor`.

        Raises:
            ConfigError: The name is in flight on this rank, this rank has joined, or the request
                cannot be sent.
            CommError: The engine has ended.
        """
        return self.submit_all([(request, tensor, out)])[0]

    def submit_all(
        self, wanted: Iterable[tuple[Request, torch.Tensor | None, torch.Tensor | None]]
    ) -> list[FusionHandle]:
        """Submit several operations, all or none; see `submit`."""
        now_ns = self._clock.now_ns()
        made = [
            TensorTableEntry.of(request, tensor, out, self._waiters, now_ns)
            for request, tensor, out in wanted
        ]
        with self._lock:
            self._check_running()
            self._state.submit_all([entry.request for entry in made], now_ns * 1e-9)
            self._entries |= {entry.request.name: entry for entry in made}
            if self._is_asleep:
                self._lock.notify()
        return [entry.handle for entry in made]

    def refuse(self, request: Request) -> None:
        """Make the operations of a name fail on all ranks, with `request.refusal` as the error.

        This rank has no handle, since its caller has already received the error.

        Raises:
            CommError: The engine has ended.
        """
        with self._lock:
            self._check_running()
            self._state.refuse(request, self._now_s())
            self._lock.notify()

    def reserve(self, numel: int) -> int:
        """Return the offset of a new flat tensor with `numel` elements among all flat tensors.

        Requests name a part of a flat tensor by its offset (`Request.place`). There is a gap
        between two flat tensors, so that their parts are never taken for neighbours.
        """
        with self._lock:
            first = self._num_places
            self._num_places += numel + ALIGNMENT
        return first

    def join(self, device: int | None = None) -> FusionHandle:
        """Take part in other ranks' operations with neutral values until all ranks have joined.

        The values are zeros for sums and averages, ones for products, and the extremes for minima
        and maxima. Averages are over all ranks.

        Args:
            device: Number of the device for tensors on devices; this thread's current device when
                None.

        Returns:
            A handle with the rank that joined last as its result.

        Raises:
            ConfigError: This rank has joined already, and other ranks have not.
            CommError: The engine has ended.
        """
        handle = FusionHandle("join", self._waiters)
        if device is None:  # the engine's thread has a different current device
            known = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            device = torch.cuda.current_device() if known else 0
        with self._lock:
            self._check_running()
            if self._joining is not None:
                msg = (
                    f"rank {self.group.context.rank} has called join() again while its first "
                    "join still waits for other ranks: wait for the first one"
                )
                raise ConfigError(msg)
            self._joining, self._joined_on = handle, device
            self._state.join()
            self._lock.notify()
        return handle

    def stop_timeline(self, path: Path | None) -> FusionHandle:
        """Stop recording, and write the timelines of all ranks; all ranks call this.

        Args:
            path: Path on the first rank; nothing is written when None.

        Returns:
            A handle that is done once the file is written.
        """
        self._stop_path = path
        return self.submit(Request(STOP_TIMELINE, STOP_TIMELINE), None)

    def close(self, reason: str = "") -> None:
        """End the engine on all ranks and wait for its thread; operations in flight fail."""
        with self._lock:
            if not self._ended:
                self._state.stop(reason or f"rank {self.group.context.rank} has shut down")
                self._urgent = True
                self._lock.notify()
        self._thread.join()

    @property
    def running(self) -> bool:
        """Whether the engine accepts operations."""
        return not self._ended

    def _check_running(self) -> None:
        if self._ended:
            msg = (
                "Horovod operations cannot run any more, because the engine has ended: "
                f"{self._ended}"
            )
            raise _failure(msg, self._error) from self._error

    def _hurry(self) -> None:
        """Start the next exchange immediately, since a thread waits."""
        self._on_wait()
        with self._lock:
            self._urgent = True
            self._lock.notify()

    # In the thread.

    def _run(self) -> None:
        reason, error = "", None
        try:
            while not reason:
                self._sleep()
                reason = self._cycle()
            if self.timeline.path_at_end is not None:
                self.timeline.write(self.timeline.path_at_end)  # all ranks end in the same cycle
        except BaseException as exc:  # noqa: BLE001 - every waiting thread must receive it
            reason, error = str(exc) or type(exc).__name__, exc
        self._end(reason, error)

    def _sleep(self) -> None:
        """Block until the next exchange is due."""
        state, pause_s = self._state, self._pause_s
        with self._lock:
            if not (state.num_pending or self._joining):
                pause_s = HEARTBEAT_S
            if not state.has_new:
                self._is_asleep = True
                self._lock.wait_for(lambda: state.has_new, pause_s)
                self._is_asleep = False
            if state.has_new and not (self._urgent or self._waiters.number):
                self._lock.wait_for(lambda: self._urgent, self._cycle_time_s)
            self._urgent = False
            self._pause_s = MIN_PAUSE_S if state.has_new else min(2 * pause_s, MAX_PAUSE_S)

    def _cycle(self) -> str:
        """Do one exchange and carry out its batches; return the reason to end, empty for none."""
        state = self._state
        start_ns = self._clock.now_ns()
        with self._lock:
            bitmask = state.open(self._now_s())
        bitmask = self._combine(bitmask)
        with self._lock:
            lists = state.combined(bitmask)
        answer = self._ask() if lists else None
        with self._lock:
            outcome = state.conclude(answer)
            agreed = [(batch, self._own_entries(batch, outcome)) for batch in outcome.batches]
            self._in_flight = [entry for _, entries in agreed for entry in entries if entry]
            if outcome.last_joined >= 0:
                self._on_joined()
        self.num_cycles += 1
        agreed_ns = self._clock.now_ns()
        self.timeline.cycle(start_ns, agreed_ns)
        for batch, entries in agreed:
            self._pause_s = MIN_PAUSE_S
            self._try(batch, entries, agreed_ns)
        self._in_flight = []
        for stall in outcome.stalls:
            self._on_stall(stall)
        self._tune(outcome)
        if outcome.last_joined >= 0 and self._joining is not None:
            joining, self._joining = self._joining, None
            joining.finish(self.group.ranks[outcome.last_joined])
            self._waiters.wake()
        return outcome.stop

    def _combine(self, bitmask: bytes, timeout_s: float | None = None) -> bytes:
        """Return the bitwise "and" of the bitmasks of all ranks."""
        self._bitmask.copy_(torch.frombuffer(bytearray(bitmask), dtype=torch.int64))
        self._exchange.start().wait(timeout_s)
        return self._bitmask.numpy().tobytes()

    def _ask(self) -> bytes:
        """Send this rank's new requests to the first rank; return its answer."""
        with self._lock:
            own_list = self._state.own_list(self._now_s())
        lists = self.group.objects.gather(own_list)
        answer = None if lists is None else self._state.answer(lists, self._now_s())
        decided: bytes = self.group.objects.broadcast(answer)
        return decided

    def _own_entries(
        self, batch: FusedBatch, outcome: CycleOutcome
    ) -> list[TensorTableEntry | None]:
        """Return this rank's entries of a batch; None for names that it has not submitted."""
        refused, entries = outcome.refused_here, self._entries
        names = [response.name for response in batch.responses]
        return [None if name in refused else entries.pop(name, None) for name in names]

    def _try(
        self, batch: FusedBatch, known: Sequence[TensorTableEntry | None], agreed_ns: int
    ) -> None:
        """Carry out a batch, or fail its entries on all ranks."""
        error = batch.responses[0].error or self._missing_memory(batch)
        if error:
            self._refuse(known, error)
            return
        try:
            entries = [
                entry or TensorTableEntry.stand_in(response, self._waiters, self._joined_on)
                for entry, response in zip(known, batch.responses, strict=True)
            ]
            self._carry_out(batch, entries, agreed_ns)
        except CommError:  # an error of the group, which all ranks raise
            raise
        except Exception as exc:
            what = f"{batch.request.kind} of {batch.request.name!r}"
            error = f"{what} failed: {type(exc).__name__}: {exc}"
            if not self._all_broken():
                raise CommError(error) from exc
            self._refuse(known, error, exc)

    def _missing_memory(self, batch: FusedBatch) -> str:
        """Return the ranks without memory for a large batch as text; the same on all ranks."""
        if needed_bytes(batch) < LARGE_BYTES:
            return ""
        missing = self.group.objects.all_gather(missing_memory(batch, self.group.rank))
        named = [f"rank {r} has {m}" for r, m in zip(self.group.ranks, missing, strict=True) if m]
        return "; ".join(named)

    def _all_broken(self) -> bool:
        """Return whether the operation has failed on all ranks."""
        try:
            bitmask = self._combine(self._state.broken(), BROKEN_LIMIT_S)
        except CommError:  # other ranks wait for this rank, or have ended
            return False
        return self._state.all_broken(bitmask)

    def _carry_out(
        self, batch: FusedBatch, entries: Sequence[TensorTableEntry], agreed_ns: int
    ) -> None:
        if batch.request.kind == STOP_TIMELINE:
            self.timeline.path_at_end = None
            error = self.group.objects.broadcast(self.timeline.write(self._stop_path))
            if error:
                self._refuse(entries, error)
            entries[0].handle.finish(None)
            self._waiters.wake()
            return
        try:
            operation = self.operations.choose(batch)
        except CommError as refused:  # the same on all ranks
            self._refuse(entries, str(refused))
            return
        with self.timeline.batch(entries, agreed_ns):
            points = [entry.point for entry in entries]
            wait_for_points(points, [entry.tensor for entry in entries])
            wait_for_points(points, [entry.out for entry in entries])
            results = operation.carry_out(batch, entries)
            for entry, result in zip(entries, results, strict=True):
                entry.handle.finish(result)
            self._waiters.wake()

    def _refuse(
        self, entries: Sequence[TensorTableEntry | None], error: str, cause: Exception | None = None
    ) -> None:
        for entry in entries:
            if entry is not None:
                failed = CommError(error)
                failed.__cause__ = cause
                entry.handle.fail(failed)
        self._waiters.wake()

    def _tune(self, outcome: CycleOutcome) -> None:
        """Apply new settings, and record the cycle for the search."""
        if outcome.cycle_time_s is not None:
            self._cycle_time_s = outcome.cycle_time_s
        if self.tuner is not None and outcome.batches:
            nbytes = sum(batch.nbytes for batch in outcome.batches)
            names = [response.name for batch in outcome.batches for response in batch.responses]
            settings = self.tuner.note(names, nbytes, self._now_s())
            if settings is not None:
                with self._lock:
                    self._state.propose(settings)
            if self.tuner.done:
                self._on_tuned(self.tuner)
                self.tuner = None

    def _end(self, reason: str, error: BaseException | None) -> None:
        """End the engine, and fail all pending operations."""
        if error is not None:
            with contextlib.suppress(Exception):  # its memory may have been released
                rank = self.group.context.health.number(self.group.context.rank)
                self.group.abort(f"rank {rank}: {reason}")
        with self._lock:
            self._ended, self._error = reason, error
            waiting = [entry.handle for entry in (*self._in_flight, *self._entries.values())]
            waiting += [self._joining] if self._joining is not None else []
            self._entries.clear()
            self._in_flight, self._joining = [], None
        for handle in waiting:
            failed = _failure(f"{handle.name!r} was not carried out: {reason}", error)
            failed.__cause__ = error
            handle.fail(failed)
        self._waiters.wake()

    def _now_s(self) -> float:
        return self._clock.now_ns() * 1e-9

    def __repr__(self) -> str:
        state = f"ended: {self._ended}" if self._ended else f"{self.num_cycles} cycles"
        return f"Fusion(rank {self.group.rank} of {self.group.size}, {state})"


def _failure(msg: str, error: BaseException | None) -> CommError:
    """Return the error for callers of an ended engine; PeerLostError if a rank was lost."""
    return (
        PeerLostError(msg, rank=error.rank) if isinstance(error, PeerLostError) else CommError(msg)
    )
