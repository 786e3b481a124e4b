"""Buckets as communication hooks see them, and the results that hooks may return.

A hook takes the place of the all-reduce of a bucket. It is called when the bucket is full, while
backward goes on, and says in one of three ways when the average will be there:

    a future of torch     as hooks of torch's DistributedDataParallel; its value is the average
    a Work of braid       the average is in the bucket's buffer when it is done
    a generator           yields Works, which are waited for at the end of backward, one of each
                          bucket at a time; the average is in the buffer when it ends. For hooks
                          that send several messages one after the other (PowerSGD)

`hook_schedule` says in which order hooks are called.
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

FUTURE_S = 300.0  # as long as a collective may take

Steps = Generator[Awaited, None, None]
Answer = Any  # a torch.futures.Future, a Work or Steps: the user's, so told apart when it comes
Hook = Callable[[Any, "GradBucket"], Answer]


class GradBucket:
    """Gradients that are reduced together; the methods are those of torch's class.

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
        """Return the index of the bucket, whose parameters may change: key state by `names`."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """Return all gradients as one flat tensor, which is not yet divided by anything."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return one view of the buffer per parameter, with its strides, as in channels_last."""
        return list(self._gradients)

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters, in the order of the gradients."""
        return list(self._parameters)

    def is_last(self) -> bool:
        """Return whether the bucket is the last one."""
        return self._last

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Show another tensor as the buffer from now on, such as a copy in another dtype.

        Its values when the hook has ended are the result, unless a future brings something else.

        Raises:
            ConfigError: The tensor has another number of elements, or is not contiguous.
        """
        if not _checked(self, tensor).is_contiguous():
            msg = (
                f"the buffer of {self!r} must be contiguous, got strides {tensor.stride()}: call "
                ".contiguous() before"
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
            ConfigError: The result has another number of elements, or is no tensor.
        """
        if isinstance(result, list | tuple) and len(result) == 1:
            result = result[0]
        flat = _checked(self, result).reshape(-1)
        if flat.data_ptr() != self._memory.data_ptr():
            self._memory.copy_(flat)

    def __repr__(self) -> str:
        return f"GradBucket({self._index}: {', '.join(self.names)})"


def steps_of(answer: Answer, bucket: GradBucket) -> Steps:
    """Return the steps that are left to do after a hook has returned `answer`.

    Raises:
        ConfigError: A hook may not return that.
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
    # subclasses bring their value about themselves, by collectives with deadlines
    if type(future).wait is torch.futures.Future.wait:
        ended = threading.Event()
        future.add_done_callback(lambda _: ended.set())
        if not ended.wait(FUTURE_S):
            msg = (
                f"the future of the communication hook for {bucket!r} had no value after "
                f"{FUTURE_S:g} s: set its result"
            )
            raise CommTimeout(msg)
    bucket.write_result(future.wait())
