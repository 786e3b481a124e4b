"""A bucket as communication hooks see it, and what a hook may answer.

A hook takes the place of the all-reduce of a bucket. It is called when the bucket is full, while backward goes on, and says in one of three
ways when the average will be there:

    a future of torch     what hooks for torch's DistributedDataParallel return: its value is the average
    a Work of braid       the average is in the bucket's buffer when it is done
    a generator           yields Works, which are waited for at the end of backward, buckets in turns; the average is in the
                          buffer when it ends. For what needs several messages one after the other (PowerSGD)

Buckets are full in another order on every rank, but hooks share the channels of their group: so they are called in the order of the plan, and the
steps of generators are taken in that order, too. A hook may start collectives without a thought for the other ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

import torch

from braid.comm import Group, Work
from braid.errors import CommTimeout, ConfigError
from braid.params.flat import shaped

__all__ = ["Answer", "Awaited", "GradBucket", "Hook", "Steps", "steps_of"]

FUTURE_S = 300.0  # as long as a collective may take


class Awaited(Protocol):
    """What a step may wait for: a Work, or the Works of a coalesced block."""

    def wait(self) -> None:
        """Return when it has ended."""
        ...


Steps = Generator[Awaited, None, None]
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
        self._home = buffer
        self._buffer = buffer
        self._gradients = list(gradients)
        self._parameters = parameters
        self._last = last
        self.names = tuple(names)
        self.group = group

    def index(self) -> int:
        """Number of the bucket; it may hold other parameters after buckets have been planned anew, so key state by `names`."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """All gradients as one flat tensor, which is not yet divided by anything."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """One view of the buffer per parameter, with its strides, as in channels_last."""
        return list(self._gradients)

    def parameters(self) -> list[torch.Tensor]:
        """The parameters, in the order of the gradients."""
        return list(self._parameters)

    def is_last(self) -> bool:
        """Whether it is the last one of the plan."""
        return self._last

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Show another tensor as the buffer from now on, such as a copy in another dtype.

        What it holds when the hook has ended comes back, unless a future brings something else.

        Raises:
            ConfigError: It has another number of elements, or is not contiguous.
        """
        if not _checked(self, tensor).is_contiguous():
            msg = f"expected a contiguous tensor as the buffer of {self!r}, found strides {tensor.stride()}: call .contiguous() before"
            raise ConfigError(msg)
        flat = tensor.view(-1)
        parts = torch.split(flat, [gradient.numel() for gradient in self._gradients])
        pairs = zip(parts, self._gradients, strict=True)
        self._gradients = [shaped(part, gradient) for part, gradient in pairs]
        self._buffer = flat

    def settle(self, found: Any) -> None:
        """Bring what a hook has found to where gradients lie.

        Args:
            found: A tensor, or a list with one, as futures of collectives have it.

        Raises:
            ConfigError: It has another number of elements, or is no tensor.
        """
        if isinstance(found, list | tuple) and len(found) == 1:
            found = found[0]
        tensor = _checked(self, found)
        flat = tensor.reshape(-1)
        if flat.data_ptr() != self._home.data_ptr():
            self._home.copy_(flat)

    def __repr__(self) -> str:
        return f"GradBucket({self._index}: {', '.join(self.names)})"


def steps_of(answer: Answer, bucket: GradBucket) -> Steps:
    """What is left to do after a hook has answered.

    Raises:
        ConfigError: It is nothing that a hook may answer.
    """
    if isinstance(answer, Work):
        return _stepwise(_one(answer), bucket)
    if isinstance(answer, Generator):
        return _stepwise(answer, bucket)
    if isinstance(answer, torch.futures.Future):
        return _wait_for(answer, bucket)
    msg = (
        f"expected a communication hook that returns a torch.futures.Future, a Work or a generator of Works for {bucket!r}, found "
        f"{type(answer).__name__}"
    )
    raise ConfigError(msg)


def _checked(bucket: GradBucket, found: Any) -> torch.Tensor:
    numel = bucket.buffer().numel()
    if not isinstance(found, torch.Tensor) or found.numel() != numel:
        what = f"{tuple(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
        msg = (
            f"expected {numel} numbers from the communication hook for {bucket!r}, found {what}: return the average of "
            "bucket.buffer(), in its shape"
        )
        raise ConfigError(msg)
    return found


def _one(work: Work) -> Steps:
    yield work


def _stepwise(steps: Steps, bucket: GradBucket) -> Steps:
    yield from steps
    bucket.settle(bucket.buffer())


def _wait_for(future: torch.futures.Future[Any], bucket: GradBucket) -> Steps:
    yield from ()
    if (
        type(future).wait is torch.futures.Future.wait
    ):  # others bring their value about, by collectives with deadlines
        ended = threading.Event()
        future.add_done_callback(lambda _: ended.set())
        if not ended.wait(FUTURE_S):
            msg = f"expected the future of the communication hook for {bucket!r} within {FUTURE_S:g} s, found it without a value: set its result"
            raise CommTimeout(msg)
    bucket.settle(future.wait())
