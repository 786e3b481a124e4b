"""A bucket as communication hooks see it, and what a hook may answer.

A hook takes the place of the all-reduce of a bucket. It is called when the bucket is full, while backward goes on, and says in one of three
ways when the average will be there:

    a future of torch     what hooks for torch's DistributedDataParallel return: its value is the average
    a Work of braid       the average is in the bucket's buffer when it is done
    a generator           yields Works, which are waited for at the end of backward, buckets in turns; the average is in the
                          buffer when it ends. For what needs several messages one after the other (PowerSGD)
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from braid.comm import Work
from braid.errors import ConfigError

__all__ = ["Answer", "GradBucket", "Hook", "Steps", "settle", "steps_of"]

Steps = Generator[Work, None, None]
Answer = (
    Any  # a torch.futures.Future, a Work or Steps: told apart when it comes, since it is the user's
)
Hook = Callable[[Any, "GradBucket"], Answer]


class GradBucket:
    """Gradients that are reduced together; the methods are those of torch's.

    Args:
        index: Number of the bucket in the plan.
        buffer: Flat tensor of all gradients.
        gradients: Views into it, one per parameter.
        parameters: The parameters.
        names: Their names.
        last: Whether it is the last one of the plan.
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
    ) -> None:
        self._index = index
        self._buffer = buffer
        self._gradients = gradients
        self._parameters = parameters
        self._last = last
        self.names = tuple(names)

    def index(self) -> int:
        """Number of the bucket; it may hold other parameters after buckets have been planned anew, so key state by `names`."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """All gradients as one flat tensor, which is not yet divided by anything."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """One view of the buffer per parameter."""
        return list(self._gradients)

    def parameters(self) -> list[torch.Tensor]:
        """The parameters, in the order of the gradients."""
        return list(self._parameters)

    def is_last(self) -> bool:
        """Whether it is the last one of the plan."""
        return self._last

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Replace all gradients at once.

        Raises:
            ConfigError: It has another number of elements.
        """
        settle(self, tensor)

    def __repr__(self) -> str:
        return f"GradBucket({self._index}: {', '.join(self.names)})"


def steps_of(answer: Answer, bucket: GradBucket) -> Steps:
    """What is left to do after a hook has answered.

    Raises:
        ConfigError: It is nothing that a hook may answer.
    """
    if isinstance(answer, Work):
        return _one(answer)
    if isinstance(answer, Generator):
        return answer
    if isinstance(answer, torch.futures.Future):
        return _wait_for(answer, bucket)
    msg = (
        f"expected a communication hook that returns a torch.futures.Future, a Work or a generator of Works for {bucket!r}, found "
        f"{type(answer).__name__}"
    )
    raise ConfigError(msg)


def settle(bucket: GradBucket, found: Any) -> None:
    """Bring what a hook has found into the bucket.

    Raises:
        ConfigError: It has another shape, or is no tensor.
    """
    if isinstance(found, list | tuple) and len(found) == 1:
        found = found[0]
    buffer = bucket.buffer()
    if not isinstance(found, torch.Tensor) or found.numel() != buffer.numel():
        what = f"{tuple(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
        msg = (
            f"expected {buffer.numel()} numbers from the communication hook for {bucket!r}, found {what}: return the average of "
            "bucket.buffer(), in its shape"
        )
        raise ConfigError(msg)
    if found.data_ptr() != buffer.data_ptr():
        buffer.copy_(found.view(-1))


def _one(work: Work) -> Steps:
    yield work


def _wait_for(future: torch.futures.Future[Any], bucket: GradBucket) -> Steps:
    yield from ()
    settle(bucket, future.wait())
