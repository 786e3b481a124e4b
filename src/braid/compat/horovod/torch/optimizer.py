"""DistributedOptimizer: gradients are reduced by name during backward; `step` waits for them.

The optimizer is changed in place, so that schedulers and scalers with a reference to it still work.
`gradient_reduction` reduces its gradients.
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
from braid.compat.horovod.torch.same_settings import SameSettings
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
    """Wrap an optimizer so that gradients are reduced over the ranks before each step.

    Args:
        optimizer: Optimizer that is changed in place, and returned.
        named_parameters: Names of the parameters of all models, such as `model.named_parameters()`;
            numbers when None.
        compression: Format in which gradients are sent.
        backward_passes_per_step: Number of backwards that accumulate before gradients are reduced.
        op: Average, Sum, or Adasum, which combines the parameter changes of local steps.
        gradient_predivide_factor: With Average, the divisor of gradients before the sum; the
            remaining division follows the sum.
        num_groups: Older name of `groups`.
        groups: Gradients that are reduced together: a number of groups, or lists of parameters.
        sparse_as_dense: Whether to reduce sparse gradients as dense ones, and return sparse ones.
        process_set: Ranks that take part; on other ranks the optimizer is not changed.

    The optimizer gets `synchronize()`, `skip_synchronize()` and `set_backward_passes_per_step(n)`.

    Raises:
        ConfigError: Names repeat or are missing, groups overlap, or the factor is used without
            Average.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        msg = (
            f"gradient_predivide_factor={gradient_predivide_factor} works with op=Average only, "
            f"got op={ReduceOp(op).name}: leave one of the two out"
        )
        raise ConfigError(msg)
    if num_groups and groups is None:
        groups = num_groups
    names = named_of(optimizer, named_parameters)
    # a scheduler that counts steps may have replaced the method
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
        settings=SameSettings(optimizer, f"settings.{next(iter(names.values()))}", process_set),
    )
    reduction.set_passes(backward_passes_per_step)
    change_in_place(optimizer, _Methods, _reduction=reduction, **attributes)
    return optimizer


def _kept(optimizer: torch.optim.Optimizer, inner: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step method for an optimizer with a step that was replaced by `inner` before."""
    reference = weakref.ref(optimizer)

    @functools.wraps(inner)  # keeps the attribute that schedulers check
    def step(*args: Any, **kwargs: Any) -> Any:
        owner = reference()
        assert owner is not None  # this function is an attribute of the optimizer
        return type(owner).step(owner, *args, **kwargs)

    return step


class _CommonMethods(ChangedOptimizer):
    """Methods that are added to the class of an optimizer, with any op."""

    _reduction: GradientReduction | AdasumSteps
    _inner: Callable[..., Any] | None = None  # replaces the step of the optimizer's class

    @property
    def _parameter_names(self) -> dict[nn.Parameter, str]:
        """Name of each parameter; programs written for Horovod read it."""
        return dict(self._reduction.names)

    def step_alone(self) -> None:
        """Take the optimizer's step without other ranks."""
        (self._inner or super().step)()  # type: ignore[misc]  # of the optimizer

    @property
    def op(self) -> ReduceOp:
        """Reduction of the gradients; with Adasum, of the parameter changes."""
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
        """Wait for gradients, then take the optimizer's step.

        If a closure is passed, each call of it reduces its gradients and waits for them.
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
        """Wait for gradients, such as to clip them; then `step` inside of `skip_synchronize()`."""
        self._reduction.finish()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Skip waiting for gradients in a `step` inside the context, after `synchronize`."""
        self._reduction.synchronizes = False
        try:
            yield
        finally:
            self._reduction.synchronizes = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Reduce gradients in every `passes`-th backward from now on."""
        self._reduction.set_passes(passes)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Zero the gradients with the optimizer's method.

        Raises:
            AssertionError: Gradients are in flight.
        """
        if self._reduction.has_begun:
            raise AssertionError(TOO_EARLY)
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]  # of the optimizer


class _AdasumMethods(_CommonMethods):
    """Methods that are added to the class of an optimizer with op=Adasum."""

    _reduction: AdasumSteps

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Take the optimizer's local step, and combine its changes over the ranks."""
        loss = None if closure is None else closure()
        self._reduction.run(self._inner or super().step)  # type: ignore[misc]  # of the optimizer
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # see above

    def synchronize(self) -> None:
        """Do nothing: changes are combined inside of `step`."""

    def skip_synchronize(self) -> NoReturn:
        """Raise AssertionError: with Adasum, gradients are not reduced before `step`.

        Raises:
            AssertionError: Always.
        """
        msg = (
            "skip_synchronize() cannot be used with op=Adasum, which reduces changes of "
            "parameters, not gradients: call step() alone"
        )
        raise AssertionError(msg)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Do nothing: gradients stay local until `step`."""
