"""A bucket of gradients: memory, the operation that reduces it, and the progress of a backward.

    mark_ready(p) ... mark_ready(q) -> True     launch()     wait()
    gradients move into the flat buffer         starts       ends the operation

The operation is a persistent all_reduce: after `wait`, the average is in `.grad` on all ranks.
"""

from __future__ import annotations

import cmath
from collections.abc import Callable, MutableMapping, Sequence
from typing import Literal, Protocol

import torch

from braid.comm import Request, StepsBy
from braid.errors import ConfigError
from braid.parallel.gradients.bucket_layout import BucketLayout
from braid.parallel.gradients.flat import FlatBuffer, alone, shaped
from braid.parallel.gradients.grad_view import move_grad
from braid.parallel.gradients.table import ParamRecord
from braid.runtime.events import Recorder, Span
from braid.types import first_few

__all__ = [
    "Awaited",
    "Bucket",
    "CheckedNumbers",
    "dropped_text",
]


class Awaited(Protocol):
    """Anything to wait for: a Work, or the Works of a coalesced block."""

    def wait(self) -> None:
        """Return when the operation has ended."""


CheckedNumbers = Literal["all", "first", "late"]


class LateNumbers:
    """Numbers from a GPU that are read one step late, so that no thread waits for the GPU.

        launch 1   numbers of step 1 ─── copied during training ───────┐
        launch 2   numbers of step 2 ...                               └── read here

    A program queues kernels long before the GPU runs them. To read a number immediately, it would
    wait for the GPU to catch up, and the GPU would then wait for the program.
    """

    def __init__(self) -> None:
        self._arriving: torch.Tensor | None = None
        self._event: torch.cuda.Event | None = None

    def exchange(self, numbers: torch.Tensor) -> list[float]:
        """Start to copy `numbers`; return the numbers of an earlier call, or [] if not available.

        Numbers are not copied while an earlier copy is running, or a CUDA graph is captured.

        Args:
            numbers: Tensor [n] on a GPU; the same n and dtype in all calls.
        """
        if torch.cuda.is_current_stream_capturing():
            return []
        arrived: list[float] = []
        if self._event is not None:
            if not self._event.query():  # type: ignore[no-untyped-call]
                return arrived
            assert self._arriving is not None
            arrived = self._arriving.tolist()
        if self._arriving is None:
            self._arriving = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        self._arriving.copy_(numbers, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(numbers.device))
        return arrived


class Bucket:
    """Gradients that are reduced together, and the flat buffer that they are copied into.

    Args:
        index: Index of the bucket; reports show `index + 1`.
        layout: Members of the bucket.
        records: All parameters of the model, by position.
        buffer: Memory of the gradients, with a view for each member.
        operation: Operation that a launch starts.
        events: Recorder of the span from the launch to the end of `wait`.
        title: Name of the span.
        residuals: Compression errors to add to gradients at the next launch, by parameter name. All
            buckets of a model share the mapping; each removes the residuals of its members.

    Attributes:
        index, layout, buffer, operation: Arguments.
        views: Gradient memory by position of the parameter.
        is_launched: Whether the bucket has been launched in this backward.
        counts: Number of gradients in this backward so far, by position.
        hook: Function that a launch calls instead of starting the operation; None for no hook.
    """

    def __init__(
        self,
        index: int,
        layout: BucketLayout,
        records: Sequence[ParamRecord],
        buffer: FlatBuffer,
        operation: Request,
        *,
        events: Recorder,
        title: str,
        residuals: MutableMapping[str, torch.Tensor],
    ) -> None:
        self.index = index
        self.layout = layout
        self.buffer = buffer
        self.operation = operation
        self.views = dict(zip(layout.members, map(alone, buffer.views), strict=True))
        self.is_launched = False
        self.hook: Callable[[Bucket], Awaited] | None = None
        self._records = {p: records[p] for p in layout.members}
        self._residuals = residuals
        self._events = events
        self._title = title
        self._nbytes = buffer.tensor.numel() * buffer.tensor.element_size()
        self._firsts = buffer.firsts()
        self._late = LateNumbers()
        self._span: Span | None = None
        self._work: Awaited | None = None
        self._expected: dict[int, int] = {}  # number of gradients per backward; 1 if not in it
        self.counts: dict[int, int] = {}
        self._num_missing = len(layout.members)
        self._is_learnt = False

    @property
    def records(self) -> list[ParamRecord]:
        """Parameters of the members, in the order of the flat buffer."""
        return list(self._records.values())

    @property
    def is_ready(self) -> bool:
        """Whether the gradients of all members are in the bucket."""
        return not self._num_missing

    def mark_ready(self, position: int) -> bool:
        """Move the gradient at `position` into the bucket; return whether the bucket is complete.

        Until the bucket is launched, a gradient may arrive in parts, from graphs that are
        differentiated separately.

        Raises:
            ConfigError: The bucket was launched earlier in this backward, or `.grad` is None.
        """
        if self.is_launched:
            count = self._expected.get(position, 1)
            raise ConfigError(_late_text(self._records[position].name, self._is_learnt, count))
        count = self.counts[position] = self.counts.get(position, 0) + 1
        if not move_grad(self._records[position].param, self.views[position]):
            _check_missing(self._records[position])
            raise ConfigError(dropped_text([self._records[position].name]))
        if count != self._expected.get(position, 1):
            return False
        self._num_missing -= 1
        return not self._num_missing

    def collect(self, position: int) -> bool:
        """Move the gradient at `position` into the bucket; return False if it is None.

        Raises:
            ConfigError: The gradient is sparse.
        """
        record = self._records[position]
        if move_grad(record.param, self.views[position]):
            return True
        _check_missing(record)
        return False

    def collect_all(self) -> bool:
        """Move all gradients into the bucket, zeros if missing; return False if all are missing."""
        missing = [p for p in self.views if not self.collect(p)]
        self.zero(missing)
        return len(missing) < len(self.views)

    def launch(self) -> None:
        """Start the operation; it uses the memory until `wait` returns."""
        self.is_launched = True
        self._span = self._events.span(self._title, seq=self.index, nbytes=self._nbytes)
        if self._residuals:
            self._apply_residuals()
        if self.hook is None:
            self._work = self.operation.start(steps_by=StepsBy.WAITER)
        else:
            self._work = self.hook(self)

    def wait(self) -> bool:
        """Wait until the operation has ended; return False if no operation is running."""
        if self._work is None or self._span is None:
            return False
        self._work.wait()
        self._work = None
        self._span.end()
        return True

    def drop(self) -> None:
        """Discard the running operation, if any."""
        if self._work is not None and self._span is not None:
            self._work = None
            self._span.end()

    def reset(self) -> None:
        """Reset the bucket for a new backward."""
        self.is_launched = False
        self.counts.clear()
        self._num_missing = len(self.views)

    def learn(self) -> None:
        """Expect as many gradients per parameter in later backwards as in this one."""
        self._expected = dict(self.counts)
        self._is_learnt = True

    def find_nonfinite(self, check: CheckedNumbers) -> list[int]:
        """Return the positions of gradients with NaN or infinity, a step late if `check` is `late`.

        Args:
            check: Numbers to check; see `ReducerOptions`.
        """
        if not self.buffer.tensor.numel():
            return []
        if check == "all":
            if bool(self.buffer.tensor.abs().sum().isfinite()):
                return []
            good = torch.stack([view.isfinite().all() for view in self.buffer.views]).tolist()
        else:
            firsts = self.buffer.tensor.take(self._firsts)
            is_late = check == "late" and firsts.is_cuda
            numbers = self._late.exchange(firsts) if is_late else firsts.tolist()
            good = list(map(cmath.isfinite, numbers))
            if all(good):
                return []
        return [p for p, ok in zip(self.views, good, strict=True) if not ok]

    def zero(self, positions: Sequence[int] | None = None) -> None:
        """Set the gradients at `positions` to zero; all gradients if None."""
        for position in self.views if positions is None else positions:
            self.views[position].zero_()

    def keep_residuals(self, positions: Sequence[int]) -> None:
        """Keep the averages of parameters that no rank has used, and add them in later steps.

        Such an average holds only compression errors (residuals) of earlier steps.
        """
        for position in positions:
            view = self.views[position]
            if bool(view.any()):
                self._residuals[self._records[position].name] = view.clone()

    def residuals(self) -> dict[str, torch.Tensor]:
        """Return the operation's compression error on this rank, by parameter name."""
        residual = self.operation.residual()
        if residual is None:
            return {}
        parts = torch.split(residual, [view.numel() for view in self.buffer.views])
        pairs = zip(self._records.values(), parts, strict=True)
        return {record.name: shaped(part, record.param) for record, part in pairs}

    def _apply_residuals(self) -> None:
        for position, view in self.views.items():
            residual = self._residuals.pop(self._records[position].name, None)
            if residual is not None:
                view.add_(residual.to(view))

    def __repr__(self) -> str:
        state = "launched" if self.is_launched else f"{self._num_missing} gradients missing"
        return f"Bucket({self.index}: {len(self.views)} gradients, {self._nbytes} bytes, {state})"


def _check_missing(record: ParamRecord) -> None:
    """Raise if a gradient exists but cannot be moved into a bucket."""
    grad = record.param.grad
    if grad is None:
        return
    msg = (
        f"gradient of {record.name!r} has layout {grad.layout}, which cannot be averaged in a "
        "bucket. Use nn.Embedding(sparse=True) under DistributedDataParallel, which recognizes its "
        "sparse gradients, or make the gradient dense"
    )
    raise ConfigError(msg)


def _late_text(name: str, is_static: bool, count: int) -> str:
    """Return the message about a gradient that was computed after its bucket had been sent."""
    if is_static:
        times = "once" if count == 1 else f"{count} times"
        return (
            f"{name!r} got a gradient more often than in the first step ({times}), but "
            "static_graph=True needs the same graph in every step. Leave static_graph=True out, "
            "and checkpoint with use_reentrant=False"
        )
    return (
        f"{name!r} got another gradient after its bucket was sent: the parameter is used in graphs "
        "that are differentiated separately, such as by re-entrant checkpointing. Pass "
        "static_graph=True, or checkpoint with use_reentrant=False"
    )


def dropped_text(names: Sequence[str]) -> str:
    """Return the message that gradients of the parameters `names` were dropped in backward."""
    one = len(names) == 1
    return (
        f"{'gradient' if one else 'gradients'} of {first_few(map(repr, names))} "
        f"{'was' if one else 'were'} set to None inside of backward, before the average over "
        "ranks was complete. A hook that runs the optimizer there uses gradients of one rank: "
        "remove the hook, wrap again and use model.step_in_backward(lambda params: "
        "torch.optim.SGD(params, lr=...))"
    )
