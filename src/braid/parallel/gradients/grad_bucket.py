"""Buckets as communication hooks see them, and the results that hooks may return.

A hook replaces the all-reduce of a bucket. It is called during backward when the bucket is full,
and returns one of three things:

    a future of torch     as hooks of torch's DistributedDataParallel; its value is the average
    a Work of braid       the average is in the bucket's buffer when the Work is complete
    a generator           yields Works, which are waited for at the end of backward, one of each
                          bucket at a time; the average is in the buffer when the generator ends.
                          For hooks that send several messages in sequence (PowerSGD)

`hook_schedule` defines the order in which hooks are called.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import torch

from braid.comm import Group, Work
from braid.errors import CommTimeout, ConfigError
from braid.parallel.gradients.bucket import Awaited
from braid.parallel.gradients.flat import shaped

__all__ = ["Answer", "GradBucket", "Hook", "Steps", "steps_of"]

FUTURE_S = 300.0  # equal to the deadline of a collective

Steps = Generator[Awaited, None, None]
Answer = Any  # a torch.futures.Future, a Work or Steps: from the user, so checked at run time
Hook = Callable[[Any, "GradBucket"], Answer]


class GradBucket:
    """Gradients that are reduced together, with the methods of torch's class.

    Args:
        index: Index of the bucket.
        buffer: Flat tensor of all gradients.
        gradients: Views of the buffer, one per parameter.
        parameters: Parameters of the gradients.
        names: Names of the parameters.
        last: Whether it is the last bucket.
        group: Ranks that reduce it.
    """

    def __init__(
        self,
        index: int,
        buffer: torch.Tensor,
        *,
        gradients: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
        last: bool,
        group: Group,
    ) -> None:
        self._index = index
        self._memory = buffer
        self._buffer = buffer
        self._gradients = list(gradients)
        self._parameters = parameters
        self._last = last
        self.names = tuple(names)
        self.group = group

    def index(self) -> int:
        """Return the index of the bucket; its parameters may change, so key state by `names`."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """Return all gradients as one flat tensor, not yet divided by the number of ranks."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return one view of the buffer per parameter, with the parameter's strides."""
        return list(self._gradients)

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters, in the order of the gradients."""
        return list(self._parameters)

    def is_last(self) -> bool:
        """Return whether the bucket is the last one."""
        return self._last

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Replace the buffer by another tensor, such as a copy in another dtype.

        The tensor's values at the end of the hook are the result, unless the hook's future has
        another value.

        Raises:
            ConfigError: The tensor has another number of elements, or is not contiguous.
        """
        if not _checked(self, tensor).is_contiguous():
            msg = (
                f"the buffer of {self!r} must be contiguous, got strides {tensor.stride()}: pass "
                "tensor.contiguous()"
            )
            raise ConfigError(msg)
        flat = tensor.view(-1)
        parts = torch.split(flat, [gradient.numel() for gradient in self._gradients])
        self._gradients = list(map(shaped, parts, self._gradients))
        self._buffer = flat

    def write_result(self, result: Any) -> None:
        """Copy the result of a hook to the memory of the gradients.

        Args:
            result: A tensor, or a list with one, as futures of collectives have it.

        Raises:
            ConfigError: The result has another number of elements, or is not a tensor.
        """
        if isinstance(result, list | tuple) and len(result) == 1:
            result = result[0]
        flat = _checked(self, result).reshape(-1)
        if flat.data_ptr() != self._memory.data_ptr():
            self._memory.copy_(flat)

    def __repr__(self) -> str:
        return f"GradBucket({self._index}: {', '.join(self.names)})"


def steps_of(answer: Answer, bucket: GradBucket) -> Steps:
    """Convert `answer`, which a hook has returned, to a generator of Works that completes it.

    Raises:
        ConfigError: The type of `answer` is not supported.
    """
    if isinstance(answer, Work):
        return _stepwise((answer,), bucket)
    if isinstance(answer, Generator):
        return _stepwise(answer, bucket)
    if isinstance(answer, torch.futures.Future):
        return _wait_for(answer, bucket)
    msg = (
        f"the communication hook for {bucket!r} returned {type(answer).__name__}: return a "
        "torch.futures.Future, a Work or a generator of Works"
    )
    raise ConfigError(msg)


def _checked(bucket: GradBucket, result: Any) -> torch.Tensor:
    numel = bucket.buffer().numel()
    if not isinstance(result, torch.Tensor) or result.numel() != numel:
        is_tensor = isinstance(result, torch.Tensor)
        got = f"shape {tuple(result.shape)}" if is_tensor else type(result).__name__
        msg = (
            f"the communication hook for {bucket!r} must return {numel} numbers, got {got}: return "
            "the average of bucket.buffer(), in its shape"
        )
        raise ConfigError(msg)
    return result


def _stepwise(steps: Iterable[Awaited], bucket: GradBucket) -> Steps:
    yield from steps
    bucket.write_result(bucket.buffer())


def _wait_for(future: torch.futures.Future[Any], bucket: GradBucket) -> Steps:
    yield from ()
    # wait() of a subclass may run collectives, which have deadlines
    if type(future).wait is torch.futures.Future.wait:
        ended = threading.Event()
        future.add_done_callback(lambda _: ended.set())
        if not ended.wait(FUTURE_S):
            msg = (
                f"the future of the communication hook for {bucket!r} had no value after "
                f"{FUTURE_S:g} s: call its set_result()"
            )
            raise CommTimeout(msg)
    bucket.write_result(future.wait())
