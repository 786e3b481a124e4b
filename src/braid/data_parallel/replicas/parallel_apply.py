"""Replicas run side by side, one thread each.

Threads, since kernels of torch let go of the interpreter, and since on GPUs one thread would queue
the work of one device after the other's. Grad mode, autocast and context variables are those of the
caller; streams are its current ones.

Source: `torch/nn/parallel/parallel_apply.py`. What differs: works on the CPU; autocast of all
devices is handed on with its dtype.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from braid.autograd.rng_and_autocast import RngAndAutocast
from braid.autograd.streams import current_stream, use_stream
from braid.data_parallel.devices import DeviceLike, as_device
from braid.data_parallel.outputs import tensors_in
from braid.errors import ConfigError

__all__ = ["parallel_apply"]


def parallel_apply(
    replicas: Sequence[Callable[..., Any]],
    inputs: Sequence[Any],
    kwargs: Sequence[Mapping[str, Any]] | None = None,
    devices: Sequence[DeviceLike] | None = None,
) -> list[Any]:
    """Call every replica with its inputs, all at once.

    Args:
        replicas: Modules, or anything that can be called.
        inputs: For each replica its positional arguments; what is not a tuple or list is the only
            one.
        kwargs: For each replica its keyword arguments.
        devices: Where they run; by default where their first tensor is.

    Returns:
        What they return, in their order.

    Raises:
        ConfigError: Not as many of each.
        Exception: Of the first replica (by number) that failed, of the same type where that can be
            made of a message; names replica and device, and its cause is the original. A single
            replica runs on the calling thread, and its exceptions are its own.

    Random numbers:
        Replicas on one device draw from its one generator, in an order that may change from run to
        run.
    """
    kwargs = [{}] * len(replicas) if kwargs is None else kwargs
    if devices is None:
        places = [_device_of(inputs[i : i + 1], kwargs[i : i + 1]) for i in range(len(replicas))]
    else:
        places = [as_device(device) for device in devices]
    counts = [len(replicas), len(inputs), len(kwargs), len(places)]
    if len(set(counts)) > 1:
        msg = (
            "expected as many inputs, keyword arguments and devices as replicas, found "
            f"{counts[1]}, {counts[2]} and {counts[3]} for {counts[0]}"
        )
        raise ConfigError(msg)
    state = _ThreadState()
    calls = [
        _Call(replica, given if isinstance(given, list | tuple) else (given,), named)
        for replica, given, named in zip(replicas, inputs, kwargs, strict=True)
    ]
    if len(calls) == 1:
        with use_stream(current_stream(places[0])):
            return [calls[0].run()]
    answers = _run_all(calls, places, state)
    failed = [index for index, answer in enumerate(answers) if answer.error is not None]
    if failed:
        _raise_named(answers, failed, places)
    return [answer.result for answer in answers]


class _Call(NamedTuple):
    """One replica and what it is called with."""

    replica: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def run(self) -> Any:
        return self.replica(*self.args, **self.kwargs)


class _Answer(NamedTuple):
    """What it returned or raised."""

    result: Any = None
    error: BaseException | None = None


class _ThreadState:
    """What torch keeps per thread, of the thread that made this."""

    def __init__(self) -> None:
        self._autocast = RngAndAutocast([])
        self._inference = torch.is_inference_mode_enabled()
        self._grad = torch.is_grad_enabled()

    def run(self, call: _Call, stream: Any) -> _Answer:
        try:
            with (
                self._autocast.again(),
                torch.inference_mode(self._inference),  # sets the grad mode, too
                torch.set_grad_enabled(self._grad),
                use_stream(stream),
            ):
                return _Answer(call.run())
        except BaseException as exc:  # noqa: BLE001 - raised by the calling thread
            return _Answer(error=exc)


def _run_all(
    calls: Sequence[_Call], places: Sequence[torch.device], state: _ThreadState
) -> list[_Answer]:
    answers = [_Answer()] * len(calls)
    streams = [current_stream(place) for place in places]

    def run(index: int) -> None:
        answers[index] = state.run(calls[index], streams[index])

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
    found = answers.copy()
    answers.clear()  # the frames in an error's traceback lead to this list: with the error in it, that were a cycle
    return found


def _device_of(inputs: Sequence[Any], kwargs: Sequence[Any]) -> torch.device:
    first = next(tensors_in([list(inputs), list(kwargs)]), None)
    return torch.device("cpu") if first is None else first.device


def _raise_named(
    answers: Sequence[_Answer], failed: Sequence[int], places: Sequence[torch.device]
) -> NoReturn:
    first = failed[0]
    error = answers[first].error
    assert error is not None
    if not isinstance(error, Exception):
        raise error
    others = f" (replicas {', '.join(map(str, failed[1:]))} failed, too)" if failed[1:] else ""
    msg = f"replica {first} of {len(answers)} on {places[first]}: {error}{others}"
    try:
        named = type(error)(msg)
    except Exception:  # noqa: BLE001 - exceptions that are made of something else, such as UnicodeDecodeError
        named = RuntimeError(f"{type(error).__name__} in {msg}")
    try:
        raise named from error
    finally:
        # or its traceback would hold this frame, which holds it: what replicas made would live
        # until the collector runs
        del named, error, answers
