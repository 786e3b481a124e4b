"""The buckets of all parameters that require a gradient: memory, operations and hooks.

Buckets ── of[position] ── Bucket 0 │ FlatBuffer  p6 p5      │ operation
        │                  Bucket 1 │ FlatBuffer  p4 p3 p2   │ operation
        └─ sparse ──────── p1       (gathered row by row, in no bucket)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from braid.comm import Group
from braid.errors import ConfigError
from braid.parallel.gradients.bucket import Bucket, dropped_text
from braid.parallel.gradients.bucket_layout import BucketLayout, plan_buckets
from braid.parallel.gradients.flat import FlatBuffer
from braid.parallel.gradients.hook_schedule import HookSchedule, StateHook
from braid.parallel.gradients.reducer_options import ReducerOptions
from braid.parallel.gradients.table import ParamRecord

__all__ = ["Buckets"]


class Buckets:
    """Buckets of the parameters that require a gradient.

    Args:
        group: Ranks that reduce together.
        records: All parameters.
        requires_grad: Whether each parameter requires a gradient.
        options: Sizes, wire format and delayed parameters.
        order: Positions in the order in which their gradients become ready.

    Attributes:
        requires_grad: Whether each parameter requires a gradient.
        layouts: Layouts of the buckets.
        of: Buckets by position; sparse parameters have none.
        sparse: Positions of parameters with sparse gradients.
        trigger: Position of the gradient that launches delayed buckets; -1 for the end of backward.
        is_learnt: Whether a complete backward has shown which gradients to expect.
        arrivals: Positions in the order of their gradients in the first complete backward.
    """

    def __init__(
        self,
        group: Group,
        records: Sequence[ParamRecord],
        requires_grad: tuple[bool, ...],
        options: ReducerOptions,
        order: Sequence[int] = (),
    ) -> None:
        self.requires_grad = requires_grad
        required = {p: r for p, r in enumerate(records) if requires_grad[p]}
        dense = {p: r for p, r in required.items() if not r.sparse}
        self.sparse = [p for p, r in required.items() if r.sparse]
        self.trigger = next(
            (p for p, r in required.items() if options.delayed_after in r.names), -1
        )
        self.is_learnt = False
        self.arrivals: dict[int, None] = {}
        self.specs = {p: r.spec for p, r in dense.items()}
        self._group = group
        self._records = records
        self._devices = {p: str(r.param.device) for p, r in dense.items()}
        self._delayed = frozenset(p for p, r in dense.items() if options.delayed & set(r.names))
        self._options = options
        self._residuals: dict[str, torch.Tensor] = {}
        self._schedule: HookSchedule | None = None
        self.layouts = self.plan(order)
        self._all = tuple(map(self._make, range(len(self.layouts)), self.layouts))
        self.of = {p: bucket for bucket in self._all for p in bucket.layout.members}

    def _make(self, index: int, layout: BucketLayout) -> Bucket:
        params = [self._records[p].param for p in layout.members]
        buffer = FlatBuffer.for_params(params, self._group, getattr(torch, layout.dtype))
        wire = self._options.wire if layout.dtype == "float32" else None
        return Bucket(
            index,
            layout,
            self._records,
            buffer,
            self._group.persistent("all_reduce", buffer.tensor, op="avg", wire=wire),
            events=self._group.context.events,
            title=f"bucket {index + 1} of {len(self.layouts)}",
            residuals=self._residuals,
        )

    def plan(self, order: Sequence[int]) -> tuple[BucketLayout, ...]:
        """Assign these parameters to buckets for gradients that become ready in `order`."""
        return plan_buckets(
            self.specs,
            self._options.caps,
            order=order,
            delayed=self._delayed,
            devices=self._devices,
        )

    @property
    def positions(self) -> list[int]:
        """Positions of all parameters that require a gradient."""
        return [position for position, required in enumerate(self.requires_grad) if required]

    @property
    def sizes_bytes(self) -> list[int]:
        """Sizes of the buckets' memory."""
        return [bucket.buffer.tensor.nbytes for bucket in self._all]

    @property
    def has_delayed(self) -> bool:
        """Whether some buckets wait for the gradient `trigger`."""
        return bool(self._delayed)

    def use_hook(self, hook: StateHook) -> None:
        """Run a communication hook instead of the all-reduce of each bucket from now on."""
        self._schedule = HookSchedule(self._group, hook, len(self._all))
        for bucket in self._all:
            bucket.hook = self._schedule.launch

    def wait(self, on_averaged: Callable[[Bucket], object] | None = None) -> None:
        """Wait for all launched buckets, in order.

        Args:
            on_averaged: Called with each bucket as soon as its averages are complete, while other
                buckets may still be in flight.
        """
        try:
            for bucket in self._all:
                if bucket.wait() and on_averaged is not None:
                    on_averaged(bucket)
        except BaseException:
            for bucket in self._all:
                bucket.drop()
            raise
        finally:
            if self._schedule is not None:
                self._schedule.reset()

    def check_gradients(self) -> None:
        """Check that the gradients of this backward can be averaged.

        Raises:
            ConfigError: A hook has dropped a gradient, or a sparse gradient has a graph.
        """
        dropped = []
        for bucket in self._all:  # no comprehension, and no call: this is in every backward
            for position in bucket.counts:
                if self._records[position].param.grad is None:
                    dropped.append(self._records[position].name)  # noqa: PERF401
        if dropped:
            raise ConfigError(dropped_text(dropped))
        for position in self.sparse:
            record = self._records[position]
            if record.param.grad is not None and record.param.grad.requires_grad:
                msg = (
                    f"gradient of {record.name!r} is sparse and has a graph "
                    "(create_graph=True), which cannot be averaged: use sparse=False"
                )
                raise ConfigError(msg)

    def reset(self) -> None:
        """Reset all buckets for a new backward."""
        self.arrivals.clear()
        for bucket in self._all:
            bucket.reset()

    def learn(self) -> None:
        """Expect the same gradients in every later backward as in this one; for static graphs."""
        self.is_learnt = True
        for bucket in self._all:
            bucket.learn()

    def zero(self) -> None:
        """Set all gradients in buckets to zero."""
        for bucket in self._all:
            bucket.zero()

    def residuals(self) -> dict[str, torch.Tensor]:
        """Return the errors of lossy formats on this rank, by parameter name."""
        total = {name: residual.clone() for name, residual in self._residuals.items()}
        for bucket in self._all:
            for name, residual in bucket.residuals().items():
                total[name] = total[name] + residual if name in total else residual
        return total

    def add_residuals(self, residuals: Mapping[str, torch.Tensor]) -> None:
        """Replace the compression errors; `residuals` are added to the next gradients.

        No error is lost if buckets or hosts were different when the residuals were saved.

        Args:
            residuals: Residuals by parameter name. Residuals of other parameters, such as frozen
                ones, are kept for later buckets.

        Raises:
            ConfigError: A residual has another shape than its parameter.
        """
        params = {self._records[p].name: self._records[p].param for p in self.of}
        wrong = [
            f"{name!r}: {tuple(residual.shape)} for a parameter of {tuple(params[name].shape)}"
            for name, residual in residuals.items()
            if name in params and residual.shape != params[name].shape
        ]
        if wrong:
            msg = (
                f"residuals and parameters have different shapes ({'; '.join(wrong)}): load the "
                "hook state of the same model"
            )
            raise ConfigError(msg)
        for bucket in self._all:
            bucket.operation.reset_residual()
        self._residuals.clear()
        self._residuals.update(residuals)

    def retire(self) -> None:
        """Release the buckets' channels for reuse; all ranks must call this at the same point."""
        for bucket in self._all:
            bucket.operation.retire()

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __repr__(self) -> str:
        return f"Buckets({len(self._all)} buckets, {sum(self.sizes_bytes)} bytes)"
