"""Gradients of an optimizer, reduced by name through the engine during backward.

    backward    hook of p: submit "gradient.p"          (any order, any thread)
    finish      submit the remaining gradients, wait for all

The engine agrees on names instead of buckets. So this module uses only a part of
`braid.parallel.gradients`: `GradientHooks`, and gradients in memory that all ranks can read
(`shared_grads`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from braid.compat.horovod.common.exceptions import HorovodInternalError, translated
from braid.compat.horovod.common.process_sets import ProcessSet
from braid.compat.horovod.fusion import Fusion, Request
from braid.compat.horovod.fusion.entry import mark, wait_for_points
from braid.compat.horovod.session import session
from braid.compat.horovod.torch.compression import Compressor, NoneCompressor
from braid.compat.horovod.torch.handles import Pending, synchronize
from braid.compat.horovod.torch.operations import request, sparse_allreduce_async
from braid.compat.horovod.torch.reductions import ReduceOp, engine_op
from braid.compat.horovod.torch.same_settings import SameSettings
from braid.compat.horovod.torch.shared_grads import SharedGrad, SharedGrads
from braid.errors import CommError, StaleError, below, raise_all
from braid.parallel.gradients import GradientHooks, ParamTable
from braid.parallel.gradients.gradient_hooks import GradientListener
from braid.parallel.gradients.incomplete import Use, note_incomplete

__all__ = ["TOO_EARLY", "GradientReduction"]

COLLECTED_BYTES = 1 << 20  # gradients that are submitted together
TOO_EARLY = (
    "zero_grad() was called between backward and step, while gradients are in flight: call it "
    "before backward, or after step() or synchronize()"
)
IN_FLIGHT = (
    "torch's {} was called between backward and step, while gradients are added over the ranks: "
    "call optimizer.synchronize() before it, and then optimizer.step() inside of `with "
    "optimizer.skip_synchronize():`"
)
IS_SPARSE = "the gradient is sparse on this rank"
Points = dict[nn.Parameter, torch.cuda.Event | None]  # see `mark`


class GradientReduction(GradientListener):
    """Reduces the gradients of one optimizer.

    Args:
        names: Names of the parameters.
        compression: Format in which gradients are sent.
        op: Average or Sum.
        predivide: For averages, divisor before the sum; the remaining division follows the sum.
        groups: Groups of parameters with gradients that are reduced together.
        sparse_as_dense: Whether to reduce sparse gradients as dense ones, and return sparse ones.
        process_set: Ranks that take part.
        only_sparse: Whether the optimizer accepts only sparse gradients.
        settings: Comparison of the optimizer's settings over ranks.

    The first gradient of a parameter shows whether its gradients are sparse. A rank without a
    gradient assumes that they are dense. If another rank has a sparse one, it refuses that, and the
    rank also starts a sparse reduction.

    Attributes:
        names: Names of the parameters.
        passes: Number of backwards before gradients are reduced.
        op: Average or Sum.
        process_set: Ranks that take part.
        under_way: For each parameter in flight: handle, index in it, and compression's context.
        is_synchronized: Whether `finish` was called since the last step.
        synchronizes: False inside of `skip_synchronize()`.
    """

    def __init__(
        self,
        names: dict[nn.Parameter, str],
        *,
        compression: type[Compressor],
        op: ReduceOp,
        predivide: float,
        groups: Sequence[Sequence[nn.Parameter]],
        sparse_as_dense: bool,
        process_set: ProcessSet,
        settings: SameSettings,
        only_sparse: bool = False,
    ) -> None:
        self.names = names
        self._sparse = set(names if only_sparse and not sparse_as_dense else ())  # on all ranks
        self._dense: set[nn.Parameter] = set()  # by a gradient of this rank
        self._compression = compression
        self.op = op
        self._factors = (1.0 / predivide, predivide)
        self._sparse_as_dense = sparse_as_dense
        # parameters with results that are converted back to sparse
        self._restored = set(names if only_sparse and sparse_as_dense else ())
        self.process_set = process_set
        self._settings = settings
        self._groups = {param: tuple(group) for group in groups for param in group}
        self.passes = 1
        self._left: dict[nn.Parameter, int] = {}
        self._guessed: set[nn.Parameter] = set()  # in flight, assumed to be dense
        self._ready: Points = {}  # gradients of incomplete groups
        self.under_way: dict[nn.Parameter, tuple[Pending, int, Any]] = {}
        self.is_synchronized = False
        self.synchronizes = True
        self._shared: SharedGrads | None = None
        self._engine: Fusion | None = None  # engine of the gradients in flight
        self._requests: dict[nn.Parameter, tuple[object, Request]] = {}
        self._lock = threading.RLock()  # a compression may submit operations and wait for them
        self._collected: Points = {}
        self._nbytes = 0
        self._records = ParamTable.named((name, param) for param, name in names.items()).records
        self._hooks = GradientHooks(self._records, self)
        note_incomplete(self, lambda reduction: reduction.names, _refusal)
        if process_set.included():
            self._use_engine(process_set.member.engine)
            self._hooks.attach(p for p, r in enumerate(self._records) if r.param.requires_grad)

    def _name(self, param: nn.Parameter) -> str:
        return f"gradient.{self.names[param]}"

    def _required(self) -> list[nn.Parameter]:
        return [param for param in self.names if param.requires_grad]

    def _use_engine(self, engine: Fusion) -> None:
        """Allocate gradients for this engine; hvd.init() after hvd.shutdown() creates a new one."""
        if engine is not self._engine:
            self._settings.forget()
        self._engine = engine
        if self._compression is NoneCompressor and (
            self._shared is None or self._shared.engine is not engine
        ):
            try:
                self._shared = SharedGrads(engine, self._required())
            except StaleError as error:  # the engine has ended meanwhile
                raise HorovodInternalError(str(error)) from error

    def _drop_lost(self) -> None:
        """Drop gradients of an engine that has ended: a backward may have been interrupted."""
        if self._engine is not None and not self._engine.running:
            self._engine = None
            self._forget()

    def _forget(self) -> None:
        """Forget all gradients in flight."""
        self.under_way.clear()
        self._collected.clear()
        self._ready.clear()
        self._guessed.clear()
        self._left = dict.fromkeys(self.names, self.passes)

    def set_passes(self, passes: int) -> None:
        """Reduce gradients in every `passes`-th backward."""
        raise_all(below(1, backward_passes_per_step=passes))
        self.passes = passes
        self._left = dict.fromkeys(self.names, passes)

    def on_gradient(self, position: int, /) -> None:
        """Record that a gradient was accumulated; called in any of autograd's threads."""
        param = self._records[position].param
        with self._lock:
            self._drop_lost()
            if self._left[param] <= 0:
                msg = (
                    f"{self.names[param]!r} got a gradient in more than {self.passes} backward "
                    "passes before step(): raise backward_passes_per_step, or call step() or "
                    "synchronize() in between"
                )
                raise AssertionError(msg)
            self._left[param] -= 1
            if param.grad is not None and not param.grad.is_sparse:
                self._dense.add(param)
            if self._left[param] == 0:
                self._mark_ready(param)

    def _mark_ready(self, param: nn.Parameter) -> None:
        group = self._groups.get(param)
        if group is None:
            self._submit(param)
            return
        self._ready[param] = mark(param.grad)
        required = [member for member in group if member.requires_grad]  # others are frozen now
        if all(member in self._ready for member in required):
            ready = {member: self._ready.pop(member, None) for member in group}
            for member in required:
                self._gradient(member)
            points = {member: ready[member] for member in required}
            self._send(points, f"gradients.{self.names[group[0]]}")

    def _submit(self, param: nn.Parameter) -> None:
        is_missing = param.grad is None
        grad = self._gradient(param)
        if grad.is_sparse:
            if param not in self._sparse:
                self._refuse_dense(param)
            self._submit_sparse(param, grad)
            return
        if is_missing and not (self._sparse_as_dense or param in self._dense):
            self._send({param: mark(grad)})  # separately, since other ranks may refuse it
            self._guessed.add(param)
            return
        if not self._collected:
            session().collected.add(self.flush)
        self._collected[param] = mark(grad)
        self._nbytes += grad.nbytes
        if self._nbytes >= COLLECTED_BYTES:
            self.flush()

    def _submit_sparse(self, param: nn.Parameter, grad: torch.Tensor) -> None:
        handle = sparse_allreduce_async(grad, self._name(param), self.op, self.process_set)
        self.under_way[param] = handle, -1, None
        self._sparse.add(param)

    def _refuse_dense(self, param: nn.Parameter) -> None:
        """Refuse a dense reduction on ranks that have no gradient of a sparse parameter yet."""
        refused = Request(self._name(param), "all_reduce", refusal=IS_SPARSE)
        with translated():
            self.process_set.member.engine.refuse(refused)

    def _finish_guesses(self) -> None:
        """Start sparse reductions of parameters that other ranks have sparse gradients for."""
        guessed, self._guessed = self._guessed, set()
        for param in guessed:
            handle, _, _ = self.under_way[param]
            try:
                handle.parts[0].wait()
            except CommError as error:
                if IS_SPARSE not in str(error):
                    raise
                param.grad = _empty_sparse(param)
                self._submit_sparse(param, param.grad)

    def flush(self) -> None:
        """Submit all collected gradients together; this wakes the engine's thread only once."""
        with self._lock:
            points, self._collected, self._nbytes = self._collected, {}, 0
            if points:
                session().collected.discard(self.flush)
                self._send(points)

    @torch.no_grad()
    def _send(self, points: Points, group: str = "") -> None:
        """Submit gradients, each with the CUDA event after its computation.

        Hooks of one backward may run on several streams.
        """
        wait_for_points(points.values(), [param.grad for param in points])
        engine = self.process_set.member.engine
        self._use_engine(engine)
        packed = [self._packed(param) for param in points]
        tensors = [shared.tensor for shared, _ in packed]
        group_size = len(packed) if group else 0
        requests = [
            self._request(param, shared, group, group_size)
            for param, (shared, _) in zip(points, packed, strict=True)
        ]
        with translated():
            handles = engine.submit_all(list(zip(requests, tensors, tensors, strict=True)))
        pending = Pending(handles, lambda _: tensors, tensors)
        for index, (param, (_, ctx)) in enumerate(zip(points, packed, strict=True)):
            self.under_way[param] = pending, index, ctx

    def _request(
        self, param: nn.Parameter, shared: SharedGrad, group: str, group_size: int
    ) -> Request:
        """Return the request of a gradient, cached while its tensor's properties do not change."""
        x = shared.tensor
        key = x.shape, x.dtype, x.device, shared.place, shared.strides, group_size
        known = self._requests.get(param)
        if known is None or known[0] != key:
            new = request(
                self._name(param),
                "all_reduce",
                x,
                op=engine_op(self.op, x),
                prescale=self._factors[0],
                postscale=self._factors[1],
                place=shared.place,
                strides=shared.strides,
                group=group,
                group_size=group_size,
            )
            known = self._requests[param] = key, new
        return known[1]

    def _packed(self, param: nn.Parameter) -> tuple[SharedGrad, Any]:
        """Return the tensor to send, and the context for its decompression."""
        if self._shared is not None:
            return self._shared.move_in(param), None
        assert param.grad is not None  # as above
        tensor, ctx = self._compression.compress(param.grad)
        return SharedGrad(tensor), ctx

    def _gradient(self, param: nn.Parameter) -> torch.Tensor:
        grad = param.grad
        if grad is None:  # other ranks may have one
            is_sparse = param in self._sparse
            grad = param.grad = _empty_sparse(param) if is_sparse else torch.zeros_like(param)
        if grad.is_sparse and (self._sparse_as_dense or param in self._groups):
            self._restored.add(param)
            grad = param.grad = grad.to_dense()
        return grad

    @property
    def has_begun(self) -> bool:
        """Whether gradients are in flight, or collected to be submitted."""
        self._drop_lost()
        return bool(self.under_way or self._collected or self._ready)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for all gradients, and store the results in `.grad`."""
        if not self.process_set.included():
            return
        try:
            with self._lock:
                # a model's zero_grad() is not checked
                pending = (*self.under_way, *self._collected, *self._ready)
                if any(param.grad is None for param in pending):
                    raise AssertionError(TOO_EARLY)
                for param in self._required():
                    if param not in self.under_way and param not in self._collected:
                        self._mark_ready(param)
                self.flush()
            if self.process_set.size() > 1:
                self._settings.start()
            self._wait()
            self._settings.finish()
        finally:
            self._forget()
        self.is_synchronized = True

    def _wait(self) -> None:
        with translated():
            self._finish_guesses()
        results: dict[int, Any] = {}
        for param, (handle, index, ctx) in self.under_way.items():
            if id(handle) not in results:
                results[id(handle)] = synchronize(handle)
            result = results[id(handle)]
            result = result if index < 0 else result[index]
            grad = param.grad
            if result is grad:
                continue
            result = self._compression.decompress(result, ctx)
            if grad is None or grad.is_sparse or result.is_sparse:
                param.grad = result
            elif result.data_ptr() != grad.data_ptr():
                grad.copy_(result)
        for param in self._restored:
            if param.grad is not None and not param.grad.is_sparse:
                param.grad = param.grad.to_sparse(1)

    def around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that calls `closure`, then reduces the gradients over all ranks."""
        if not self.synchronizes:
            return closure

        def reduced() -> Any:
            loss = closure()
            self.finish()
            return loss

        return reduced


def _refusal(reduction: GradientReduction, _: object, use: Use) -> str:
    """Return why torch's functions cannot be used while gradients are in flight."""
    is_alone = not reduction.process_set.included() or reduction.process_set.size() == 1
    return IN_FLIGHT.format(use) if reduction.has_begun and not is_alone else ""


def _empty_sparse(param: nn.Parameter) -> torch.Tensor:
    """Return a sparse gradient without rows."""
    indices = torch.empty(1, 0, dtype=torch.int64, device=param.device)
    return torch.sparse_coo_tensor(
        indices, param.new_empty(0, *param.shape[1:]), param.shape, check_invariants=False
    )
