"""DistributedOptimizer: the optimizer, not the model, sees to it that gradients are averaged.

For programs that keep their model unwrapped, as Horovod's do: the optimizer that is passed in is changed in place, so that schedulers and everything else that
knows it go on. Hooks on the parameters average during backward, exactly as `DistributedDataParallel` does (`params.GradientReducer`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from braid.data_parallel.groups import group_of
from braid.errors import ConfigError
from braid.params import Caps, GradientReducer, ParamTable, ReducerOptions

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer:
    """Makes an optimizer's parameters be averaged over ranks in every backward.

    Stays itself: what is returned is `optimizer`, of a class that derives from its own.

    Args:
        optimizer: Any of torch's, or of the same interface.
        named_parameters: Names for messages, such as `model.named_parameters()`; numbers when None.
        process_group: See `DistributedDataParallel`.
        backward_passes_per_step: Average in every k-th backward; the others accumulate.
        bucket_cap_mb: See `DistributedDataParallel`.
        init_sync: Copy rank 0's parameters to all first, and compare what there is.

    Raises:
        ConfigError: Parameters without a name, or names of others; no group.
        MismatchError: Ranks have other parameters.

    The optimizer gets `synchronize()` (which has nothing to wait for: gradients are averaged when backward has ended), `no_sync()` and `close()`.
    """

    def __new__(
        cls,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
        *,
        process_group: Any = None,
        backward_passes_per_step: int = 1,
        bucket_cap_mb: float | None = None,
        init_sync: bool = True,
    ) -> Any:
        """See the class."""
        group = group_of(process_group)
        table = ParamTable.named(_named(optimizer, named_parameters))
        if init_sync:
            table.make_equal(group)
        options = ReducerOptions(every=backward_passes_per_step, caps=Caps.of_mb(bucket_cap_mb))
        reducer = GradientReducer(group, table, options)
        kind = type(optimizer)
        optimizer.__class__ = type(kind.__name__, (_Averaging, kind), {})
        optimizer.__dict__["_reducer"] = reducer
        return optimizer


class _Averaging:
    """What is added to the class of an optimizer."""

    _reducer: GradientReducer

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """As the optimizer's own, if gradients have been averaged."""
        self.synchronize()
        return super().step() if closure is None else super().step(closure)  # type: ignore[misc]  # of the optimizer

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the optimizer's own; and if the last backward was left by an exception, the others are told."""
        self._reducer.begin()
        super().zero_grad(set_to_none)  # type: ignore[misc]  # of the optimizer

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: parameters that come later would not be averaged."""
        del param_group
        msg = "expected all parameters when the optimizer was made to average, found a group that is added later: add it before, frozen if need be"
        raise ConfigError(msg)

    def synchronize(self) -> None:
        """Gradients are averaged already; tell the others if the last backward was left by an exception, and see what is trained now."""
        self._reducer.begin()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside keep their gradients local; the next one outside averages the sum."""
        with self._reducer.no_sync():
            yield

    def close(self) -> None:
        """Average no more."""
        self._reducer.close()


def _named(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, nn.Parameter]] | None
) -> list[tuple[str, nn.Parameter]]:
    own = [param for group in optimizer.param_groups for param in group["params"]]
    if named is None:
        return [(f"parameter {number}", param) for number, param in enumerate(own)]
    names: dict[int, list[tuple[str, nn.Parameter]]] = {}
    for name, param in named:
        names.setdefault(id(param), []).append((name, param))
    unnamed = sum(id(param) not in names for param in own)
    if unnamed:
        msg = (
            f"expected a name for every parameter of the optimizer, found {unnamed} of {len(own)} without: pass model.named_parameters() of all "
            "models whose parameters it has"
        )
        raise ConfigError(msg)
    return [pair for param in own for pair in names[id(param)]]
