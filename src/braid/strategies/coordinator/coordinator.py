"""ClusterCoordinator: one process hands out closures, and workers run them.

    coordinator = ClusterCoordinator(strategy)
    batches = coordinator.create_per_worker_dataset(make_batches)
    for _ in range(1000):
        loss = coordinator.schedule(train_step, args=(batches,))     does not wait
    coordinator.join()                                               all have run
    print(loss.fetch())

A closure that was under way on a lost worker runs again on another one. Servers know which pushes
they have added by the closure's number, so each update is added once.

    queue_state.py     who gets which closure, as a state machine
    dispatcher.py      closures and their ends as messages
    closures.py        what a worker does
    remote_value.py    the result of a closure

Source: TensorFlow 2.21, `tf.distribute.coordinator.ClusterCoordinator` (promises at least once).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from braid.errors import CommTimeout, ConfigError, PeerLostError
from braid.ps.messages import NoMoreTasks, TakesTasks, TasksDone
from braid.ps.snapshots import write_tables
from braid.runtime.closing import Closing
from braid.runtime.message import Delivery
from braid.strategies.coordinator import questions
from braid.strategies.coordinator.closures import (
    VARIABLES,
    ClosureCodec,
    ClosureMode,
    WorkerResource,
    map_tree,
)
from braid.strategies.coordinator.dispatcher import Closure, Dispatcher
from braid.strategies.coordinator.remote_value import ClosureCancelledError, RemoteValue
from braid.strategies.parameter_server.strategy import ParameterServerStrategy
from braid.strategies.parameter_server.variables import ServerVariables

__all__ = ["ClosureCancelledError", "ClusterCoordinator", "RemoteValue"]

TIMEOUT_S = 300.0  # without any closure that ends


class ClusterCoordinator(Closing):
    """Hands out closures (calls of functions) to the workers of a parameter server strategy.

    Args:
        strategy: The strategy; it has one coordinator.

    Raises:
        ConfigError: This process is not the chief, or the strategy has a coordinator already.

    On failure: workers may be lost and come back at any time; their unfinished closures run
    again. With `Options(journal=path)` the coordinator may be started again; see `resume`.
    """

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        if not strategy.is_chief:
            msg = (
                f"{strategy.node.name} cannot be the coordinator: call strategy.serve() unless "
                "strategy.is_chief (the chief of TF_CONFIG, or rank 0 of braid run)"
            )
            raise ConfigError(msg)
        if strategy.has_coordinator:
            msg = "the strategy already has a coordinator: use one coordinator for each strategy"
            raise ConfigError(msg)
        if strategy.needs_all:
            msg = (
                f"{strategy.needs_all} cannot have a coordinator, because a coordinator sends "
                "closures to any free worker: use consistency=ps.BSP, or run a loop in each worker"
            )
            raise ConfigError(msg)
        strategy.has_coordinator = True
        self.strategy = strategy
        self._variables = strategy.variables
        self._office = strategy.node.postoffice
        self._codec = ClosureCodec()
        names = [f"worker:{number}" for number in range(strategy.node.num_workers)]
        in_turns = names if strategy.is_synchronous else []
        self._dispatcher = Dispatcher(self._office, self._codec, in_turns)
        self._queue = self._dispatcher.queue
        self._waiters: list[tuple[Callable[[], object], threading.Event]] = []
        self._progress_ns = 0
        self._failure: BaseException | None = None
        self._is_closed = False
        self._must_resume = self._office.directory is not None  # of a journal
        self._office.register(
            {TakesTasks: self._dispatcher.ready, TasksDone: self._ended}, on_lost=self._lost
        )
        self._server = threading.Thread(target=self._serve, name="coordinator", daemon=True)
        self._server.start()

    # -- closures

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> RemoteValue:
        """Add a closure to the queue, which some worker will run; wait while the queue is full.

        Args:
            fn: Function at the top of a module, or a class or a method of one, which the worker
                finds by its name.
            args: Arguments that can be sent: plain data, tensors, dataclasses, results of other
                closures (the closure waits for them), and per-worker datasets and resources.
            kwargs: Keyword arguments, with the same rule.

        Returns:
            The future result.

        Raises:
            ConfigError: Workers cannot find the function by name, or an argument cannot be sent.
            Exception: The exception of an earlier closure, raised once; later calls work again.
            PeerLostError: The run cannot go on.
        """
        closure = self._closure(fn, args, kwargs, mode="closure")
        self._wait(lambda: not self._queue.is_full or self._has_failed, "room in the queue")
        self._raise_failure()
        if self._must_resume:
            msg = (
                "this coordinator was started again: call coordinator.resume(), which returns the "
                "number of the closure to begin with"
            )
            raise ConfigError(msg)
        with self._office.lock:
            self._dispatcher.schedule(closure)
        return closure.value

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until all closures have run.

        Raises:
            Exception: The exception of a closure, raised once.
            ConfigError: The strategy is synchronous, and the number of closures is not a multiple
                of the number of workers.
            CommTimeout: No closure has ended for `timeout_s` (300 s when None); the error names the
                running closures and their workers.
            PeerLostError: The run cannot go on.
        """
        self._wait(
            lambda: self._queue.is_done or self._has_failed or self._queue.is_short,
            "all closures",
            timeout_s,
        )
        self._raise_failure(timeout_s)
        if num_short := self._queue.num_incomplete:
            msg = (
                f"the last {num_short} closures that call step() do not complete a step of "
                f"{self.strategy.node.num_workers} workers: before join, schedule a multiple of "
                "the number of workers, also after a failed closure"
            )
            raise ConfigError(msg)

    def done(self) -> bool:
        """Return whether all closures have run; never waits.

        Raises:
            Exception: The exception of a closure, raised once.
        """
        with self._office.lock:
            if self._queue.has_doomed:
                return False  # closures that ran beside the failed one are not over
            is_done, failed = self._queue.is_done, self._queue.failed
        if failed is not None or self._failure is not None:
            self._raise_failure()
        return is_done

    def fetch(self, value: Any) -> Any:
        """Return a copy of nested tuples, lists and dicts with the value of each RemoteValue."""
        return map_tree(value, lambda part: part.fetch() if isinstance(part, RemoteValue) else part)

    def create_per_worker_resource(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> WorkerResource:
        """Call a function in each worker, even one that joins later; the worker keeps the result.

        Args:
            fn: The function; see `schedule`.
            args: Its arguments.
            kwargs: Its keyword arguments.

        Returns:
            A placeholder to pass to closures; each worker replaces it by the worker's object.

        Raises:
            ConfigError: Workers cannot find the function by name, or an argument cannot be sent.
        """
        closure = self._closure(fn, args, kwargs, mode="resource")
        with self._office.lock:
            return WorkerResource(self._dispatcher.add_resource(closure))

    def create_per_worker_dataset(self, dataset_fn: Callable[..., Iterable[Any]]) -> WorkerResource:
        """Make an iterator over a data set in each worker; see `create_per_worker_resource`.

        Args:
            dataset_fn: Function without arguments that returns batches.
        """
        return self.create_per_worker_resource(questions.iterator_of, (dataset_fn,))

    def resume(self) -> int:
        """Continue after an earlier coordinator has ended, with servers that are still running.

        Closures are numbered in the order of `schedule`. Schedule the closures from the returned
        number on again; servers skip the updates that they have already applied.

        Returns:
            Number of the first closure that is not known to have ended.

        Raises:
            CommTimeout: No worker connects in time.
        """
        number: int = self._ask(questions.oldest_task)
        self._dispatcher.next_number = number
        self._must_resume = False
        return number

    def pull(self) -> None:
        """Copy the servers' values into this process's modules; a worker sends them.

        Raises:
            CommTimeout: No worker connects in time.
        """
        self._variables.set_values(self._ask(questions.values))

    def save(
        self,
        directory: str | os.PathLike[str],
        step: int,
        *,
        state: Mapping[str, Any] | None = None,
        keep: int | None = None,
    ) -> None:
        """Write a snapshot of all variables, once all closures have run; see the strategy's `save`.

        Raises:
            CheckpointError: The snapshot cannot be written; earlier ones are untouched.
            Exception: The exception of a closure, raised once.
        """
        self.join()
        states = self._ask(questions.export)
        extra = self._variables.model_tensors(states)
        write_tables(directory, states, step, extra=extra, state=state, keep=keep)

    def close(self) -> None:
        """End the run: workers and servers leave. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        with self._office.lock:
            for worker in self._queue.workers:
                self._office.send(worker, NoMoreTasks())
            scheduler = self.strategy.node.scheduler
            assert scheduler is not None, "the chief schedules"
            scheduler.release_lost()
        self._server.join()
        self.strategy.close()

    # -- inside

    def _ask(self, fn: Callable[[ServerVariables], Any]) -> Any:
        """Return what a function of a worker's variables returns; no update, and in no turn."""
        closure = self._closure(fn, (WorkerResource(VARIABLES),), {}, mode="question")
        with self._office.lock:
            self._dispatcher.ask(closure)
        return closure.value.fetch()

    def _closure(
        self,
        fn: Any,
        args: Any,
        kwargs: Mapping[str, Any] | None,
        *,
        mode: ClosureMode,
    ) -> Closure:
        """Return a closure with copies of its arguments, which the program may change then."""
        if self._is_closed:
            msg = "the coordinator is closed and its workers have left: make a new strategy"
            raise ConfigError(msg)
        if not callable(fn) or not isinstance(args or (), Sequence):
            msg = f"schedule needs a function and a tuple of arguments, got {fn!r} and {args!r}"
            raise ConfigError(msg)
        name = getattr(fn, "__qualname__", repr(fn))
        arguments = self.fetch([tuple(args or ()), dict(kwargs or {})])
        packed, buffers = self._codec.pack((fn, *arguments, mode), f"the closure {name}")
        return Closure(packed, [bytes(view) for view in buffers], RemoteValue(self, name))

    def unpack(self, packed: bytes, buffers: Sequence[memoryview], worker: str) -> Any:
        """Return the result of a closure, from bytes and buffers that `worker` has sent."""
        return self._codec.unpack(packed, buffers, worker)

    def wait_for(self, value: RemoteValue, timeout_s: float | None) -> None:
        """Wait until a closure has ended, at most `timeout_s` seconds (300 when None)."""
        self._wait(lambda: value.is_over, f"the result of {value.name}", timeout_s)

    def _wait(
        self, is_over: Callable[[], object], missing: str, timeout_s: float | None = None
    ) -> None:
        """Wait for a condition that the ends of closures change."""
        seconds = TIMEOUT_S if timeout_s is None else timeout_s
        with self._office.lock:
            if is_over() or self._failure is not None:
                return
            wakeup = threading.Event()
            self._waiters.append((is_over, wakeup))
            self._progress_ns = time.monotonic_ns()
        try:
            while not wakeup.wait(self._left_s(seconds)):
                if self._left_s(seconds) <= 0:
                    raise CommTimeout(self._late(missing, seconds))
        finally:
            with self._office.lock:
                self._waiters.remove((is_over, wakeup))
        if not is_over():
            self._raise_failure()

    def _left_s(self, seconds: float) -> float:
        return seconds - (time.monotonic_ns() - self._progress_ns) / 1e9

    def _late(self, missing: str, seconds: float) -> str:
        with self._office.lock:
            lines = self._dispatcher.running()
            here = self._queue.workers
        where = "; ".join(lines) or f"the workers {', '.join(here) or '(none)'} are idle"
        return (
            f"no closure has ended for {seconds:g} s, and the coordinator still waits for "
            f"{missing}: {where}. Check whether workers are stuck or lost"
        )

    @property
    def _has_failed(self) -> bool:
        return self._queue.failed is not None or self._failure is not None

    def _raise_failure(self, timeout_s: float | None = None) -> None:
        """Raise the error of the run if there is one; else a closure's error, only one time.

        Args:
            timeout_s: Seconds to wait for the closures that ran beside the failed one.
        """
        if self._failure is not None:
            raise self._failure
        if self._queue.failed is None:
            return
        failures: list[BaseException] = []

        def take() -> bool:
            failure = self._dispatcher.take_failure()
            failures.extend([] if failure is None else [failure])
            return bool(failures)

        self._wait(take, "the closures that ran beside the failed one", timeout_s)
        raise failures[0]

    def _serve(self) -> None:
        """Run the scheduler, and the handlers below; in a thread."""
        try:
            self.strategy.node.serve()
        except BaseException as exc:  # noqa: BLE001 - raised where the program waits
            self._failure = exc
        else:
            if not self._is_closed:
                self._failure = PeerLostError("all workers have left the run: start it again")
        with self._office.lock:
            self._wake()

    def _wake(self) -> None:
        for is_over, wakeup in self._waiters:
            if self._failure is not None or is_over():
                wakeup.set()

    # with the office's lock

    def _ended(self, delivery: Delivery) -> None:
        self._progress_ns = time.monotonic_ns()
        self._dispatcher.finished(delivery)
        self._wake()

    def _lost(self, node: str) -> None:
        self._dispatcher.lost(node)
        self._wake()
