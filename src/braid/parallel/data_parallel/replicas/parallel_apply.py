"""Parallel calls of replicas, one thread per replica.

Threads, because kernels of torch release the interpreter's lock, and because on GPUs a single
thread would queue the work of one device after the work of another. Grad mode, autocast and context
variables are the caller's; streams are the current ones of the caller.

Source: `torch/nn/parallel/parallel_apply.py`. Differences: works on the CPU; threads use the
autocast dtypes of all devices.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from braid.comm.autograd.nested import tensors_in
from braid.comm.autograd.rng_and_autocast import RngAndAutocast
from braid.comm.autograd.streams import current_stream, use_stream
from braid.errors import ConfigError
from braid.parallel.data_parallel.devices import DeviceLike, as_device

__all__ = ["parallel_apply"]


def parallel_apply(
    replicas: Sequence[Callable[..., Any]],
    inputs: Sequence[Any],
    kwargs: Sequence[Mapping[str, Any]] | None = None,
    devices: Sequence[DeviceLike] | None = None,
) -> list[Any]:
    """Call every replica with its inputs, all in parallel.

    Args:
        replicas: Modules or other callables.
        inputs: Positional arguments for each replica; a value that is not a tuple or list is the
            only argument.
        kwargs: Keyword arguments for each replica.
        devices: Devices on which replicas run; by default where their first tensor is.

    Returns:
        Results of the replicas, in the order of replicas.

    Raises:
        ConfigError: The numbers of replicas, inputs, kwargs and devices differ.
        Exception: The exception of the first replica (by number) that failed, of the same type if
            this type can be created from a message; the message names replica and device, and the
            cause is the original. A single replica runs on the calling thread, and its exceptions
            are raised unchanged.

    Random numbers:
        Replicas on the same device share its generator, and their order may change between runs.
    """
    kwargs = [{}] * len(replicas) if kwargs is None else kwargs
    if devices is None:
        places = [_device_of(inputs[i : i + 1], kwargs[i : i + 1]) for i in range(len(replicas))]
    else:
        places = [as_device(device) for device in devices]
    counts = [len(replicas), len(inputs), len(kwargs), len(places)]
    if len(set(counts)) > 1:
        msg = (
            f"got {counts[1]} inputs, {counts[2]} keyword arguments and {counts[3]} devices "
            f"for {counts[0]} replicas: pass one of each per replica"
        )
        raise ConfigError(msg)
    state = _ThreadState()
    calls = [
        _ReplicaCall(replica, args if isinstance(args, list | tuple) else (args,), named)
        for replica, args, named in zip(replicas, inputs, kwargs, strict=True)
    ]
    if len(calls) == 1:
        with use_stream(current_stream(places[0])):
            return [calls[0].run()]
    outcomes = _run_all(calls, places, state)
    failed = [index for index, outcome in enumerate(outcomes) if outcome.error is not None]
    if failed:
        _raise_named(outcomes, failed, places)
    return [outcome.result for outcome in outcomes]


class _ReplicaCall(NamedTuple):
    """One replica and the arguments of its call."""

    replica: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def run(self) -> Any:
        return self.replica(*self.args, **self.kwargs)


class _Outcome(NamedTuple):
    """Result or exception of one replica."""

    result: Any = None
    error: BaseException | None = None


class _ThreadState:
    """Modes that torch keeps per thread, read from the thread that creates this object."""

    def __init__(self) -> None:
        self._autocast = RngAndAutocast([])
        self._inference = torch.is_inference_mode_enabled()
        self._grad = torch.is_grad_enabled()

    def run(self, call: _ReplicaCall, stream: Any) -> _Outcome:
        try:
            with (
                self._autocast.again(),
                torch.inference_mode(self._inference),  # also sets the grad mode
                torch.set_grad_enabled(self._grad),
                use_stream(stream),
            ):
                return _Outcome(call.run())
        except BaseException as exc:  # noqa: BLE001 - raised by the calling thread
            return _Outcome(error=exc)


def _run_all(
    calls: Sequence[_ReplicaCall], places: Sequence[torch.device], state: _ThreadState
) -> list[_Outcome]:
    outcomes = [_Outcome()] * len(calls)
    streams = [current_stream(place) for place in places]

    def run(index: int) -> None:
        outcomes[index] = state.run(calls[index], streams[index])

    threads = [
        threading.Thread(
            target=contextvars.copy_context().run,
            args=(run, index),
            name=f"braid-data_parallel-{index}",
        )
        for index in range(len(calls))
    ]
    started: list[threading.Thread] = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
        for thread in started:
            thread.join()
    finally:
        for thread in started:  # also when the caller is interrupted while it waits
            thread.join()
    completed = outcomes.copy()
    # the frames of an error's traceback refer to this list: with the error in it, a cycle
    outcomes.clear()
    return completed


def _device_of(inputs: Sequence[Any], kwargs: Sequence[Any]) -> torch.device:
    first = next(tensors_in([list(inputs), list(kwargs)]), None)
    return torch.device("cpu") if first is None else first.device


def _raise_named(
    outcomes: Sequence[_Outcome], failed: Sequence[int], places: Sequence[torch.device]
) -> NoReturn:
    first = failed[0]
    error = outcomes[first].error
    assert error is not None
    if not isinstance(error, Exception):
        raise error
    more = ", ".join(map(str, failed[1:]))
    others = f" (replica{'s' * (len(failed) > 2)} {more} failed, too)" if more else ""
    msg = f"replica {first} of {len(outcomes)} on {places[first]}: {error}{others}"
    try:
        named = type(error)(msg)
    # exceptions with other arguments, such as UnicodeDecodeError
    except Exception:  # noqa: BLE001
        named = RuntimeError(f"{type(error).__name__} in {msg}")
    try:
        raise named from error
    finally:
        # avoid a cycle: the traceback holds this frame, and the frame the exception; it would keep
        # the replicas' tensors alive until garbage collection
        del named, error, outcomes
