"""DistributedOptimizer: gradients are reduced by name while backward goes on, and `step` waits for them.

The optimizer that is handed in is changed in place, so that schedulers and scalers that know it go on.

    backward    hook of p: submit "gradient.p"          (any order, any thread)
    step        submit what no hook has submitted, wait for all, then the optimizer's own step
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from braid.compat.horovod.failure import translated
from braid.compat.horovod.process_sets import ProcessSet, global_process_set
from braid.compat.horovod.session import session
from braid.compat.horovod.torch.adasum_optimizer import AdasumSteps
from braid.compat.horovod.torch.compression import Compression, Compressor, NoneCompressor
from braid.compat.horovod.torch.grad_homes import Home, Homes
from braid.compat.horovod.torch.handles import Pending, synchronize
from braid.compat.horovod.torch.named import named_groups, named_of
from braid.compat.horovod.torch.operations import request, sparse_allreduce_async
from braid.compat.horovod.torch.reductions import Adasum, Average, ReduceOp, engine_op
from braid.errors import ConfigError
from braid.fusion import Fusion, Request
from braid.fusion.streams import follow, mark

__all__ = ["DistributedOptimizer"]

COLLECTED_BYTES = 1 << 20  # of gradients that are submitted at once
TOO_EARLY = (
    "expected zero_grad() after step() or synchronize(), found it between backward and step, while gradients are under way: call it "
    "before backward"
)
Named = Iterable[tuple[str, nn.Parameter]]
Points = dict[nn.Parameter, torch.cuda.Event | None]  # see `mark`


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Named | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[nn.Parameter]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Let an optimizer reduce gradients over the ranks before each step.

    Args:
        optimizer: Changed in place, and returned.
        named_parameters: Of all models whose parameters it has, such as `model.named_parameters()`; numbers when None.
        compression: What gradients travel as.
        backward_passes_per_step: Backwards that accumulate before gradients are reduced.
        op: Average, Sum, or Adasum, which combines what the optimizer's own steps change.
        gradient_predivide_factor: With Average: part of the division that happens before the sum.
        num_groups: The older way of saying `groups`.
        groups: Parameters whose gradients are reduced together: a number of groups, or lists of parameters.
        sparse_as_dense: Make sparse gradients dense.
        process_set: Ranks that take part; on others it is the optimizer that it was.

    The optimizer gets `synchronize()`, `skip_synchronize()` and `set_backward_passes_per_step(n)`.

    Raises:
        ConfigError: Names that repeat or are missing; a factor without Average; groups that overlap.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        msg = f"expected gradient_predivide_factor with op=Average only, found {gradient_predivide_factor} with {ReduceOp(op).name}"
        raise ConfigError(msg)
    if num_groups and groups is None:
        groups = num_groups
    names = named_of(optimizer, named_parameters)
    if op == Adasum:
        steps = AdasumSteps(names, compression, backward_passes_per_step, process_set)
        return _changed(optimizer, _AdasumFace, _steps=steps)
    reduction = _Reduction(
        names,
        compression=compression,
        op=ReduceOp(op),
        predivide=gradient_predivide_factor,
        groups=named_groups(names, groups),
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    reduction.set_passes(backward_passes_per_step)
    return _changed(optimizer, _Face, _reduction=reduction)


def _changed(optimizer: torch.optim.Optimizer, face: type[_Wrapped], **fields: Any) -> Any:
    """The optimizer with another face."""
    kind = type(optimizer)
    inner = optimizer.__dict__.pop("step", None)
    optimizer.__class__ = type(kind.__name__, (face, kind), {})
    optimizer.__dict__.update(fields)
    if inner is not None:
        optimizer.__dict__.update(_inner=inner, step=_kept(optimizer, inner))
    return optimizer


class _Reduction:
    """Gradients on their way."""

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
    ) -> None:
        self._names = names
        self._compression = compression
        self._op = op
        self._factors = (1.0 / predivide, predivide)
        self._sparse_as_dense = sparse_as_dense
        self._set = process_set
        self._groups = {param: tuple(group) for group in groups for param in group}
        self._passes = 1
        self._left: dict[nn.Parameter, int] = {}
        self._nothing: dict[nn.Parameter, torch.Tensor] = {}  # of parameters with sparse gradients
        self._ready: Points = {}  # of groups that are not complete
        self.under_way: dict[nn.Parameter, tuple[Pending, int, Any]] = {}
        self.synchronized = False
        self.synchronizes = True
        self.warned = False
        self._homes: Homes | None = None
        self._requests: dict[nn.Parameter, tuple[object, Request]] = {}
        self._lock = threading.RLock()  # a compression may wait for operations of its own
        self._collected: Points = {}
        self._nbytes = 0
        if process_set.included():
            self._settle(process_set.member.engine)
            for param in self._trained():
                param.register_post_accumulate_grad_hook(_hook_of(self))  # type: ignore[no-untyped-call]

    def _trained(self) -> list[nn.Parameter]:
        return [param for param in self._names if param.requires_grad]

    def _settle(self, engine: Fusion) -> None:
        """Find homes for gradients, those of this engine: hvd.init() after hvd.shutdown() makes another one."""
        if self._compression is NoneCompressor and (
            self._homes is None or self._homes.engine is not engine
        ):
            self._homes = Homes(engine, self._trained())

    def set_passes(self, passes: int) -> None:
        """Reduce in every so many backwards."""
        if passes < 1:
            msg = f"expected backward_passes_per_step of at least 1, found {passes}"
            raise ConfigError(msg)
        self._passes = passes
        self._left = dict.fromkeys(self._names, passes)

    def on_gradient(self, param: nn.Parameter) -> None:
        """It is there, or a part of it that this backward adds. Called by as many threads as backward has."""
        with self._lock:
            if self._left[param] <= 0:
                msg = (
                    f"expected {self._passes} backward before each step, found one more for {self._names[param]!r}: raise backward_passes_per_step, "
                    "or call step() or synchronize() between"
                )
                raise AssertionError(msg)
            self._left[param] -= 1
            if self._left[param] == 0:
                self._is_ready(param)

    def _is_ready(self, param: nn.Parameter) -> None:
        group = self._groups.get(param)
        if group is None:
            self._submit(param)
            return
        self._ready[param] = mark(param.grad)
        trained = [member for member in group if member.requires_grad]  # others are frozen now
        if all(member in self._ready for member in trained):
            ready = {member: self._ready.pop(member, None) for member in group}
            for member in trained:
                self._gradient(member)
            points = {member: ready[member] for member in trained}
            self._send(points, f"gradients.{self._names[group[0]]}")

    def _submit(self, param: nn.Parameter) -> None:
        grad = self._gradient(param)
        if grad.is_sparse:
            name = f"gradient.{self._names[param]}"
            handle = sparse_allreduce_async(grad, name, self._op, self._set)
            self.under_way[param] = handle, -1, None
            return
        if not self._collected:
            session().collected.add(self.flush)
        self._collected[param] = mark(grad)
        self._nbytes += grad.numel() * grad.element_size()
        if self._nbytes >= COLLECTED_BYTES:
            self._flush()

    def flush(self) -> None:
        """Submit what has been collected: once for many small ones wakes the engine's thread once."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        points, self._collected, self._nbytes = self._collected, {}, 0
        if points:
            session().collected.discard(self.flush)
            self._send(points)

    @torch.no_grad()
    def _send(self, points: Points, group: str = "") -> None:
        """Submit gradients, each of which is there behind its point: hooks of one backward may run on several streams."""
        follow(points.values(), [param.grad for param in points])
        engine = self._set.member.engine
        self._settle(engine)
        packed = [self._packed(param) for param in points]
        tensors = [home.tensor for home, _ in packed]
        group_size = len(packed) if group else 0
        wanted = [
            (self._request(param, home, group, group_size), home.tensor, home.tensor)
            for param, (home, _) in zip(points, packed, strict=True)
        ]
        with translated():
            handles = engine.submit_all(wanted)
        pending = Pending(handles, lambda _: tensors, tensors)
        for number, (param, (_, ctx)) in enumerate(zip(points, packed, strict=True)):
            self.under_way[param] = pending, number, ctx

    def _request(self, param: nn.Parameter, home: Home, group: str, group_size: int) -> Request:
        """What ranks hear of a gradient: the same in every step, while it is the same."""
        x = home.tensor
        key = x.shape, x.dtype, x.device, home.place, home.strides, group_size
        known = self._requests.get(param)
        if known is None or known[0] != key:
            wanted = request(
                f"gradient.{self._names[param]}",
                "all_reduce",
                x,
                op=engine_op(self._op, x),
                prescale=self._factors[0],
                postscale=self._factors[1],
                place=home.place,
                strides=home.strides,
                group=group,
                group_size=group_size,
            )
            known = self._requests[param] = key, wanted
        return known[1]

    def _packed(self, param: nn.Parameter) -> tuple[Home, Any]:
        """What travels and where it lies; what its decompression needs."""
        if self._homes is not None:
            return self._homes.take_in(param), None
        assert param.grad is not None  # as above
        tensor, ctx = self._compression.compress(param.grad)
        return Home(tensor), ctx

    def _gradient(self, param: nn.Parameter) -> torch.Tensor:
        grad = param.grad
        if grad is None:  # others may have one
            nothing = self._nothing.get(param)
            grad = param.grad = torch.zeros_like(param if nothing is None else nothing)
        elif grad.is_sparse and param not in self._nothing:
            self._nothing[param] = torch.zeros_like(grad)
        if grad.is_sparse and (self._sparse_as_dense or param in self._groups):
            grad = param.grad = grad.to_dense()
        return grad

    @property
    def begun(self) -> bool:
        """Whether gradients are under way, or about to be."""
        return bool(self.under_way or self._collected or self._ready)

    def _check_kept(self) -> None:
        """Whether all gradients that have come are still there: a model's zero_grad() asks nobody."""
        for param in (*self.under_way, *self._collected, *self._ready):
            if param.grad is None:
                raise AssertionError(TOO_EARLY)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for all gradients; `.grad` then holds the results."""
        if not self._set.included():
            return
        results: dict[int, Any] = {}
        try:
            with self._lock:
                self._check_kept()
                for param in self._trained():
                    if param not in self.under_way and param not in self._collected:
                        self._is_ready(param)
                self._flush()
            for param, (handle, number, ctx) in self.under_way.items():
                if id(handle) not in results:
                    results[id(handle)] = synchronize(handle)
                found = results[id(handle)]
                found = found if number < 0 else found[number]
                grad = param.grad
                if found is grad:
                    continue
                found = self._compression.decompress(found, ctx)
                if grad is None or grad.is_sparse or found.is_sparse:
                    param.grad = found
                elif found.data_ptr() != grad.data_ptr():
                    grad.copy_(found)
        finally:
            self.under_way.clear()
            self._collected.clear()
            self._ready.clear()
            self._left = dict.fromkeys(self._names, self._passes)
        self.synchronized = True

    def around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure behind which gradients are those of all ranks."""
        if not self.synchronizes:
            return closure

        def reduced() -> Any:
            loss = closure()
            self.finish()
            return loss

        return reduced


def _hook_of(reduction: _Reduction) -> Callable[[nn.Parameter], None]:
    # A parameter keeps its hooks alive, through C++, where the garbage collector cannot see the cycle.
    reference = weakref.ref(reduction)

    def on_gradient(param: nn.Parameter) -> None:
        found = reference()
        if found is not None:
            found.on_gradient(param)

    return on_gradient


def _kept(optimizer: torch.optim.Optimizer, inner: Callable[..., Any]) -> Callable[..., Any]:
    """A step for an optimizer of which somebody, such as a scheduler that counts, has replaced the step before."""
    reference = weakref.ref(optimizer)

    @functools.wraps(inner)  # with the mark by which schedulers know theirs
    def step(*args: Any, **kwargs: Any) -> Any:
        found = reference()
        assert found is not None  # it is an attribute of it
        return type(found).step(found, *args, **kwargs)

    return step


class _Wrapped:
    """What the faces have in common."""

    _inner: Callable[..., Any] | None = None  # in place of the step of the optimizer's class

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refused: what is under way belongs to this process.

        Raises:
            ConfigError: Always.
        """
        msg = "expected state_dict() to be copied or saved, found a DistributedOptimizer itself: wrap a new optimizer, and load the state into it"
        raise ConfigError(msg)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: parameters that come later would not be reduced.

        Raises:
            ConfigError: Always.
        """
        del param_group
        msg = "expected all parameters when DistributedOptimizer was made, found a group that is added later: add it before"
        raise ConfigError(msg)


class _Face(_Wrapped):
    """What is added to the class of an optimizer."""

    _reduction: _Reduction

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Wait for gradients, then the optimizer's own step; those of a closure are waited for each time that it is called."""
        reduction = self._reduction
        step = self._inner or super().step  # type: ignore[misc]  # of the optimizer
        if reduction.synchronizes and (closure is None or reduction.begun):
            if reduction.synchronized and not reduction.warned:
                reduction.warned = True
                warnings.warn(
                    "step() after synchronize() reduces gradients once more: call it inside of `with optimizer.skip_synchronize():`",
                    UserWarning,
                    stacklevel=2,
                )
            reduction.finish()
        found = step() if closure is None else step(reduction.around(closure))
        reduction.synchronized = False
        return found

    step.hooked = True  # type: ignore[attr-defined]  # torch's mark: the optimizer's own step calls the hooks

    def synchronize(self) -> None:
        """Wait for gradients, to clip them for example; then `step` inside of `skip_synchronize()`."""
        self._reduction.finish()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """`step` inside does not wait for gradients: `synchronize` has."""
        self._reduction.synchronizes = False
        try:
            yield
        finally:
            self._reduction.synchronizes = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Reduce in every so many backwards from now on."""
        self._reduction.set_passes(passes)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the optimizer's own.

        Raises:
            AssertionError: Gradients are under way.
        """
        if self._reduction.begun:
            raise AssertionError(TOO_EARLY)
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]  # of the optimizer


class _AdasumFace(_Wrapped):
    """What is added to the class of an optimizer with op=Adasum."""

    _steps: AdasumSteps

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """The optimizer's own step, of which the changes are combined over the ranks."""
        loss = None if closure is None else closure()
        self._steps.take(self._inner or super().step)  # type: ignore[misc]  # of the optimizer
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # see above

    def synchronize(self) -> None:
        """Nothing to wait for: what `step` changes is combined inside of it."""

    def skip_synchronize(self) -> NoReturn:
        """Refused: there are no gradients to skip.

        Raises:
            AssertionError: Always.
        """
        msg = "expected step() alone with op=Adasum, found skip_synchronize(): there are no reduced gradients to look at"
        raise AssertionError(msg)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Of no consequence: gradients stay local until `step`."""
