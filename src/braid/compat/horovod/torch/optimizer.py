"""DistributedOptimizer: gradients are reduced by name while backward goes on, and `step` waits for them.

The optimizer that is handed in is changed in place, so that schedulers and scalers that know it go on.

    backward    hook of p: submit "gradient.p"          (any order, any thread)
    step        submit what no hook has submitted, wait for all, then the optimizer's own step
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from braid.compat.horovod.process_sets import ProcessSet, global_process_set
from braid.compat.horovod.torch.adasum_optimizer import AdasumSteps
from braid.compat.horovod.torch.compression import Compression, Compressor, NoneCompressor
from braid.compat.horovod.torch.handles import Pending, synchronize
from braid.compat.horovod.torch.homes import Homes
from braid.compat.horovod.torch.named import named_groups, named_of
from braid.compat.horovod.torch.operations import request, sparse_allreduce_async
from braid.compat.horovod.torch.reductions import Adasum, Average, ReduceOp, engine_op
from braid.errors import ConfigError
from braid.fusion import Request

__all__ = ["DistributedOptimizer"]

COLLECTED_BYTES = 1 << 20  # of gradients that are submitted at once
Named = Iterable[tuple[str, nn.Parameter]]


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
        self._ready: set[nn.Parameter] = set()
        self.under_way: dict[nn.Parameter, tuple[Pending, int, Any]] = {}
        self.synchronized = False
        self.synchronizes = True
        self.warned = False
        self._homes: Homes | None = None
        self._requests: dict[nn.Parameter, Request] = {}
        self._collected: list[nn.Parameter] = []
        self._nbytes = 0
        if process_set.included():
            trained = [param for param in names if param.requires_grad]
            if compression is NoneCompressor:
                self._homes = Homes(process_set.member.engine.group, trained)
            for param in trained:
                param.register_post_accumulate_grad_hook(_hook_of(self))  # type: ignore[no-untyped-call]

    def set_passes(self, passes: int) -> None:
        """Reduce in every so many backwards."""
        if passes < 1:
            msg = f"expected backward_passes_per_step of at least 1, found {passes}"
            raise ConfigError(msg)
        self._passes = passes
        self._left = dict.fromkeys(self._names, passes)

    def on_gradient(self, param: nn.Parameter) -> None:
        """It is there, or a part of it that this backward adds."""
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
        self._ready.add(param)
        trained = [member for member in group if member.requires_grad]  # others are frozen now
        if all(member in self._ready for member in trained):
            self._ready.difference_update(group)
            self._submit_group(trained, f"gradients.{self._names[group[0]]}")

    def _submit(self, param: nn.Parameter) -> None:
        grad = self._gradient(param)
        if grad.is_sparse:
            name = f"gradient.{self._names[param]}"
            handle = sparse_allreduce_async(grad, name, self._op, self._set)
            self.under_way[param] = handle, -1, None
            return
        self._collected.append(param)
        self._nbytes += grad.numel() * grad.element_size()
        if self._nbytes >= COLLECTED_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Submit what has been collected: once for many small ones wakes the engine's thread once."""
        params, self._collected, self._nbytes = self._collected, [], 0
        if params:
            self._send(params)

    def _submit_group(self, group: Sequence[nn.Parameter], name: str) -> None:
        for param in group:
            self._gradient(param)
        self._send(group, name)

    def _send(self, params: Sequence[nn.Parameter], group: str = "") -> None:
        tensors, contexts, places = self._packed(params)
        wanted = [
            (self._request(param, tensor, place, group, len(params)), tensor, tensor)
            for param, tensor, place in zip(params, tensors, places, strict=True)
        ]
        pending = Pending(self._set.member.engine.submit_all(wanted), lambda _: tensors, tensors)
        for number, (param, ctx) in enumerate(zip(params, contexts, strict=True)):
            self.under_way[param] = pending, number, ctx

    def _request(
        self, param: nn.Parameter, tensor: torch.Tensor, place: int, group: str, size: int
    ) -> Request:
        """What ranks hear of a gradient: the same in every step."""
        known = self._requests.get(param)
        group_size = size if group else 0
        if known is None or (known.place, known.group_size) != (place, group_size):
            known = self._requests[param] = request(
                f"gradient.{self._names[param]}",
                "all_reduce",
                tensor,
                op=engine_op(self._op, tensor),
                prescale=self._factors[0],
                postscale=self._factors[1],
                place=place,
                group=group,
                group_size=group_size,
            )
        return known

    def _packed(
        self, params: Sequence[nn.Parameter]
    ) -> tuple[list[torch.Tensor], list[Any], list[int]]:
        """What travels, what its decompression needs, and where it lies."""
        if self._homes is not None:
            places = [self._homes.take_in(param) for param in params]
            return [_grad(param) for param in params], [None] * len(params), places
        pairs = [self._compression.compress(_grad(param)) for param in params]
        return [x for x, _ in pairs], [ctx for _, ctx in pairs], [-1] * len(params)

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
        return bool(self.under_way or self._collected)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for all gradients; `.grad` then holds the results."""
        if not self._set.included():
            return
        results: dict[int, Any] = {}
        try:
            collected = set(self._collected)
            for param in self._names:
                known = param in self.under_way or param in self._ready or param in collected
                if param.requires_grad and not known:
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


def _grad(param: nn.Parameter) -> torch.Tensor:
    assert param.grad is not None  # the caller has seen to it
    return param.grad


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
            msg = (
                "expected zero_grad() after step() or synchronize(), found it between backward and step, while gradients are under way: call it "
                "before backward"
            )
            raise AssertionError(msg)
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
