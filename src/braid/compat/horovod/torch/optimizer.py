"""DistributedOptimizer: gradients are reduced by name during backward; `step` waits for them.

The optimizer that is handed in is changed in place, so that schedulers and scalers that know it go
on. `gradient_reduction` reduces its gradients.
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

from braid.compat.horovod.common.process_sets import ProcessSet, global_process_set
from braid.compat.horovod.torch.adasum_optimizer import AdasumSteps
from braid.compat.horovod.torch.compression import Compression, Compressor
from braid.compat.horovod.torch.gradient_reduction import TOO_EARLY, GradientReduction
from braid.compat.horovod.torch.named import named_groups, named_of
from braid.compat.horovod.torch.reductions import Adasum, Average, ReduceOp
from braid.errors import ConfigError
from braid.parallel.gradients.optimizer_in_place import ChangedOptimizer, change_in_place

__all__ = ["DistributedOptimizer"]

# Horovod's words, by which programs filter warnings
SYNCHRONIZED_TWICE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after "
    "optimizer.synchronize(): gradients are reduced once more. Call it inside of `with "
    "optimizer.skip_synchronize():`"
)
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
        optimizer: Optimizer that is changed in place, and returned.
        named_parameters: Names of the parameters of all models, such as `model.named_parameters()`;
            numbers when None.
        compression: Format in which gradients travel.
        backward_passes_per_step: Backwards that accumulate before gradients are reduced.
        op: Average, Sum, or Adasum, which combines what the optimizer's own steps change.
        gradient_predivide_factor: With Average: part of the division that happens before the sum.
        num_groups: Older name of `groups`.
        groups: Parameters whose gradients are reduced together: a number of groups, or lists of
            parameters.
        sparse_as_dense: Reduce sparse gradients as dense ones, and make the results sparse.
        process_set: Ranks that take part; on others the optimizer stays as it was.

    The optimizer gets `synchronize()`, `skip_synchronize()` and `set_backward_passes_per_step(n)`.

    Raises:
        ConfigError: Names that repeat or are missing; a factor without Average; groups that
            overlap.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        msg = (
            f"gradient_predivide_factor={gradient_predivide_factor} works with op=Average only, "
            f"got op={ReduceOp(op).name}"
        )
        raise ConfigError(msg)
    if num_groups and groups is None:
        groups = num_groups
    names = named_of(optimizer, named_parameters)
    # somebody, such as a scheduler that counts, may have replaced the step
    inner = optimizer.__dict__.pop("step", None)
    attributes = {} if inner is None else {"_inner": inner, "step": _kept(optimizer, inner)}
    if op == Adasum:
        steps = AdasumSteps(names, compression, backward_passes_per_step, process_set)
        change_in_place(optimizer, _AdasumMethods, _reduction=steps, **attributes)
        return optimizer
    reduction = GradientReduction(
        names,
        compression=compression,
        op=ReduceOp(op),
        predivide=gradient_predivide_factor,
        groups=named_groups(names, groups),
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
        only_sparse=isinstance(optimizer, torch.optim.SparseAdam),
    )
    reduction.set_passes(backward_passes_per_step)
    change_in_place(optimizer, _Methods, _reduction=reduction, **attributes)
    return optimizer


def _kept(optimizer: torch.optim.Optimizer, inner: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step for an optimizer whose step somebody has replaced by `inner` before."""
    reference = weakref.ref(optimizer)

    @functools.wraps(inner)  # with the mark by which schedulers know theirs
    def step(*args: Any, **kwargs: Any) -> Any:
        owner = reference()
        assert owner is not None  # it is an attribute of it
        return type(owner).step(owner, *args, **kwargs)

    return step


class _CommonMethods(ChangedOptimizer):
    """Methods that are added to the class of an optimizer, with any op."""

    _reduction: GradientReduction | AdasumSteps
    _inner: Callable[..., Any] | None = None  # in place of the step of the optimizer's class

    @property
    def _parameter_names(self) -> dict[nn.Parameter, str]:
        """Name of each parameter; programs written for Horovod read it."""
        return dict(self._reduction.names)

    @property
    def op(self) -> ReduceOp:
        """Reduction of the gradients, or with Adasum of what steps change."""
        return self._reduction.op

    @property
    def process_set(self) -> ProcessSet:
        """Ranks that take part."""
        return self._reduction.process_set


class _Methods(_CommonMethods):
    """Methods that are added to the class of an optimizer with op=Average or op=Sum."""

    _reduction: GradientReduction
    _warned = False

    @property
    def backward_passes_per_step(self) -> int:
        """Number of backwards before gradients are reduced."""
        return self._reduction.passes

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Wait for gradients, then take the optimizer's own step.

        Gradients of a closure are waited for each time that it is called.
        """
        reduction = self._reduction
        step = self._inner or super().step  # type: ignore[misc]  # of the optimizer
        if reduction.synchronizes and (closure is None or reduction.has_begun):
            if reduction.is_synchronized and not self._warned:
                self._warned = True
                warnings.warn(
                    SYNCHRONIZED_TWICE,
                    UserWarning,
                    stacklevel=2,
                )
            reduction.finish()
        loss = step() if closure is None else step(reduction.around(closure))
        reduction.is_synchronized = False
        return loss

    # torch's mark: the optimizer's own step calls the hooks
    step.hooked = True  # type: ignore[attr-defined]

    def synchronize(self) -> None:
        """Wait for gradients, to clip them for example; then `step` inside `skip_synchronize()`."""
        self._reduction.finish()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let a `step` inside not wait for gradients: `synchronize` has."""
        self._reduction.synchronizes = False
        try:
            yield
        finally:
            self._reduction.synchronizes = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Reduce in every so many backwards from now on."""
        self._reduction.set_passes(passes)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Zero gradients as the optimizer does.

        Raises:
            AssertionError: Gradients are under way.
        """
        if self._reduction.has_begun:
            raise AssertionError(TOO_EARLY)
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]  # of the optimizer


class _AdasumMethods(_CommonMethods):
    """Methods that are added to the class of an optimizer with op=Adasum."""

    _reduction: AdasumSteps

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Take the optimizer's own step, and combine its changes over the ranks."""
        loss = None if closure is None else closure()
        self._reduction.run(self._inner or super().step)  # type: ignore[misc]  # of the optimizer
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # see above

    def synchronize(self) -> None:
        """Do nothing: changes are combined inside of `step`."""

    def skip_synchronize(self) -> NoReturn:
        """Refuse: there are no reduced gradients to skip.

        Raises:
            AssertionError: Always.
        """
        msg = (
            "skip_synchronize() makes no sense with op=Adasum: there are no reduced gradients to "
            "look at, call step() alone"
        )
        raise AssertionError(msg)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Do nothing: gradients stay local until `step`."""
