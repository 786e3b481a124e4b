"""The buckets of a plan as memory and requests: gradients come in, averages come out.

Each bucket is one flat buffer in memory that all ranks can read, with a view per parameter, and one persistent request. When a gradient
comes it is copied into its view, which becomes the parameter's `.grad`: from then on there is one copy of it, and what later
backwards add to it goes into the bucket by itself.
"""

from __future__ import annotations

import cmath
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from braid.comm import Group, Request, Work
from braid.errors import ConfigError
from braid.events import Span
from braid.params.bucket_state import Bucket
from braid.params.flat import FlatBuffer, allocator, alone, shaped
from braid.params.grad_bucket import GradBucket, Hook, Steps, steps_of
from braid.params.table import ParamRecord

__all__ = ["Buckets", "StateHook"]

StateHook = tuple[object, Hook]


class Buckets:
    """Buffers and requests of a plan.

    Args:
        group: Ranks that reduce together.
        plan: Equal on all of them.
        records: Parameters by position.
        wire: Format in which gradients cross a network.
        check_all: Whether all numbers are looked at for NaN and Inf, or one of each gradient.
    """

    def __init__(
        self,
        group: Group,
        plan: Sequence[Bucket],
        records: Mapping[int, ParamRecord],
        *,
        wire: str | None = None,
        check_all: bool = False,
    ) -> None:
        self.plan = tuple(plan)
        self._group = group
        self._records = records
        self._check_all = check_all
        self._buffers: list[FlatBuffer] = []
        self._requests: list[Request] = []
        self._firsts: list[torch.Tensor] = []
        self.views: dict[int, torch.Tensor] = {}
        for bucket in plan:
            shapes = [records[p].param.shape for p in bucket.members]
            dtype: torch.dtype = getattr(torch, bucket.dtype)
            like = [records[p].param for p in bucket.members]
            buffer = FlatBuffer(shapes, dtype, allocator(group, bucket.device), like=like)
            self._buffers.append(buffer)
            numbers = None if dtype != torch.float32 else wire
            self._requests.append(
                group.persistent("all_reduce", buffer.tensor, op="avg", wire=numbers)
            )
            self._firsts.append(buffer.firsts())
            self.views.update(zip(bucket.members, map(alone, buffer.views), strict=True))
        self._under_way: dict[int, tuple[Steps, Span]] = {}
        self._full: dict[int, tuple[StateHook, Span]] = {}  # hooks that are not called yet
        self._next = 0  # bucket whose hook is called next
        self._owed: dict[str, torch.Tensor] = {}

    @property
    def sizes_bytes(self) -> list[int]:
        """Of each buffer."""
        return [b.tensor.numel() * b.tensor.element_size() for b in self._buffers]

    def collect(self, position: int) -> bool:
        """Bring a gradient into its bucket; False if there is none."""
        param, view = self._records[position].param, self.views[position]
        grad = param.grad
        if grad is None:
            return False
        if grad.layout != torch.strided or grad.requires_grad:
            self._refuse(position, grad)
        if grad.data_ptr() != view.data_ptr() or grad.stride() != view.stride():
            view.copy_(grad)
            param.grad = (
                view.detach()
            )  # a conversion of the module puts other memory into this very object
        return True

    def _refuse(self, position: int, grad: torch.Tensor) -> None:
        name = self._records[position].name
        if grad.requires_grad:
            msg = (
                f"expected a gradient of {name!r} that is a number, found one with a graph of its own (create_graph=True): averages have none; "
                "differentiate with respect to inputs by torch.autograd.grad, or call the module itself (.module)"
            )
        else:
            msg = (
                f"expected a dense gradient of {name!r}, found one of layout {grad.layout}: use nn.Embedding(sparse=True), which is known to be "
                "sparse, under DistributedDataParallel, or make it dense"
            )
        raise ConfigError(msg)

    def spoiled(self, number: int) -> list[int]:
        """Positions whose gradients are not finite, as far as they are looked at."""
        buffer, bucket = self._buffers[number], self.plan[number]
        if not buffer.tensor.numel():
            return []
        if self._check_all:
            if bool(buffer.tensor.abs().sum().isfinite()):
                return []
            good = torch.stack([view.isfinite().all() for view in buffer.views]).tolist()
        else:
            firsts = buffer.tensor.take(self._firsts[number]).tolist()
            good = [cmath.isfinite(value) for value in firsts]
        return [p for p, ok in zip(bucket.members, good, strict=True) if not ok]

    def start(self, number: int, hook: StateHook | None) -> None:
        """Let a bucket go, by its request or by a hook.

        Raises:
            ConfigError: The hook answers something else than it may.
        """
        buffer = self._buffers[number]
        nbytes = buffer.tensor.numel() * buffer.tensor.element_size()
        span = self._group.context.events.span(
            f"bucket {number + 1} of {len(self.plan)}", seq=number, nbytes=nbytes
        )
        self._pay(number)
        if hook is None:
            work: Work = self._requests[number].start(lazily=True)
            self._under_way[number] = (_one(work), span)
            return
        self._full[number] = hook, span
        while self._next in self._full:
            self._call_hook(self._next)

    def wait(self, done: Callable[[int], object] | None = None) -> None:
        """Wait for all buckets on their way; those that take several steps take them in turns.

        Args:
            done: Called with the number of each when it is there, while others are still on their way.
        """
        try:
            for number in sorted(self._full):  # behind one that nobody uses
                self._call_hook(number)
            self._take_steps(done)
        finally:
            for _, span in [*self._full.values(), *self._under_way.values()]:
                span.end()
            self._full.clear()
            self._under_way.clear()
            self._next = 0

    def _take_steps(self, done: Callable[[int], object] | None) -> None:
        left = dict(sorted(self._under_way.items()))
        works = {number: next(steps, None) for number, (steps, _) in left.items()}
        while left:
            for number, (steps, span) in list(left.items()):
                work = works[number]
                if work is None:
                    span.end()
                    del left[number], self._under_way[number]
                    if done is not None:
                        done(number)
                else:
                    work.wait()
                    works[number] = next(steps, None)

    def residuals(self) -> dict[str, torch.Tensor]:
        """What lossy formats have left out on this rank and is still to be sent, by the parameter's name."""
        found = {name: left.clone() for name, left in self._owed.items()}
        for bucket, buffer, request in zip(self.plan, self._buffers, self._requests, strict=True):
            residual = request.residual()
            if residual is None:
                continue
            parts = torch.split(residual, [view.numel() for view in buffer.views])
            for position, part in zip(bucket.members, parts, strict=True):
                record = self._records[position]
                part = shaped(part, record.param)  # noqa: PLW2901 - as the parameter
                found[record.name] = found[record.name] + part if record.name in found else part
        return found

    def owe(self, residuals: Mapping[str, torch.Tensor]) -> None:
        """Forget what has been left out, and add `residuals` to this rank's next gradients instead.

        Sums stay what they would have been, whatever the plan and the hosts that they were left out with.

        Args:
            residuals: As from `residuals`; those of parameters that are not here, such as frozen ones, are kept for a later plan.

        Raises:
            ConfigError: One has another shape than its parameter.
        """
        params = {r.name: r.param for r in self._records.values()}
        wrong = [
            f"{tuple(left.shape)} for {name!r} of shape {tuple(params[name].shape)}"
            for name, left in residuals.items()
            if name in params and left.shape != params[name].shape
        ]
        if wrong:
            msg = f"expected residuals in the shapes of their parameters, found {', '.join(wrong)}"
            raise ConfigError(msg)
        for request in self._requests:
            request.reset_residual()
        self._owed = dict(residuals)

    def retire(self) -> None:
        """Give up the requests, for other buckets; all ranks do so at the same point."""
        for request in self._requests:
            request.retire()

    def _pay(self, number: int) -> None:
        for position in self.plan[number].members if self._owed else ():
            left = self._owed.pop(self._records[position].name, None)
            if left is not None:
                self.views[position].add_(left.to(self.views[position]))

    def _call_hook(self, number: int) -> None:
        (state, call), span = self._full.pop(number)
        self._next = number + 1
        buffer, bucket = self._buffers[number], self.plan[number]
        shown = GradBucket(
            number,
            buffer.tensor,
            gradients=buffer.views,
            parameters=[self._records[p].param for p in bucket.members],
            names=[self._records[p].name for p in bucket.members],
            last=number == len(self.plan) - 1,
            group=self._group,
        )
        with self._telling_others(call, shown):
            self._under_way[number] = self._watched(call, state, shown), span

    def _watched(self, call: Hook, state: object, shown: GradBucket) -> Steps:
        """The steps of a hook, which is called at once."""
        steps = steps_of(call(state, shown), shown)

        def rest() -> Steps:
            with self._telling_others(call, shown):
                yield from steps

        return rest()

    @contextlib.contextmanager
    def _telling_others(self, call: Hook, shown: GradBucket) -> Iterator[None]:
        """A hook that raises leaves others waiting in the middle of its messages: end that, with the reason."""
        try:
            yield
        except Exception as error:
            name = getattr(call, "__qualname__", None) or repr(call)
            self._group.abort(
                f"rank {self._group.ranks[self._group.rank]}: the communication hook {name} for {shown!r} raised "
                f"{type(error).__name__}: {error}"
            )
            raise

    def owe_unused(self, positions: Sequence[int]) -> None:
        """What has been left out before and was sent with gradients that no rank has now comes with the next ones.

        Args:
            positions: Whose averages are not given to anybody.
        """
        for position in positions:
            view = self.views[position]
            if bool(view.any()):
                self._owed[self._records[position].name] = view.clone()

    def scale(self, number: int, factor: float) -> None:
        """Multiply the gradients of a bucket."""
        self._buffers[number].tensor.mul_(factor)

    def zero(self, positions: Sequence[int]) -> None:
        """Let these gradients be zeros."""
        for position in positions:
            self.views[position].zero_()

    def __repr__(self) -> str:
        return f"Buckets({len(self.plan)} buckets, {sum(self.sizes_bytes)} bytes)"


def _one(work: Work) -> Steps:
    yield work
