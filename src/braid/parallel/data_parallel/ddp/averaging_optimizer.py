"""AveragingOptimizer: averages the gradients of an optimizer's parameters during backward.

For programs that keep their model unwrapped, as with Horovod. The optimizer is changed in place, so
that schedulers and other objects that refer to it keep working. Hooks on the parameters average
during backward, exactly as `DistributedDataParallel` does (`gradients.GradientReducer`).

A wrapper sees the outputs of its module, and so the begin of a backward. Here the first event is a
gradient about to be accumulated. It may belong to a backward inside of another backward (re-entrant
checkpointing), and the inner one ends before the whole backward does:

    loss.backward()   |--head--|  checkpoint: [... p5 p4]  checkpoint: [... p3 p2]  |--p1 p0--|
                         ^ seen first: averages at the end of the whole
                      without head:          ^ local               ^ local             ^ averages
                      without p1 p0 either: averages in step()
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from braid.comm import Group
from braid.errors import ConfigError
from braid.parallel.data_parallel.ddp.arguments import arguments_in_common, caps_of, finite_check_of
from braid.parallel.data_parallel.ddp.param_snapshot import ParamSnapshot
from braid.parallel.data_parallel.finite import (
    NonfiniteHandler,
    handle_nonfinite,
    nonfinite_handler,
)
from braid.parallel.gradients import (
    AveragingOutcome,
    GradientReducer,
    ParamRecord,
    ParamTable,
    ReducerListener,
    ReducerOptions,
)
from braid.parallel.gradients.hashing import compare_optimizers
from braid.parallel.gradients.lost_requests import reclaim_lost_requests
from braid.parallel.gradients.optimizer_in_place import ChangedOptimizer, change_in_place
from braid.parallel.gradients.process_groups import group_of
from braid.parallel.gradients.step_settings import StepSettings

__all__ = ["AveragingOptimizer"]


class AveragingOptimizer:
    """Change an optimizer so that gradients are averaged over ranks during every backward.

    The optimizer stays the same object; its class becomes a subclass of its class.

    Args:
        optimizer: Any `torch.optim.Optimizer`.
        named_parameters: Names for messages, such as `model.named_parameters()`; None uses numbers.
        process_group: See `DistributedDataParallel`.
        gradient_accumulation_steps: Number of backwards with gradients to add before they are
            averaged. An optimizer step before that averages the gradients so far, on all ranks;
            zeroing gradients before that restarts the count. Call `synchronize()` if gradients are
            read before such a step, for example by clipping or a `torch.amp.GradScaler`: a scaler
            that skips the step on one rank only would leave other ranks waiting.
        bucket_cap_mb: See `DistributedDataParallel`.
        init_sync: Whether to compare parameters and copy rank 0's values first.
        nonfinite: Reaction to NaN and infinity in gradients, see `DistributedDataParallel`.
        check_all: Whether to check every number for NaN and infinity, not one per gradient.
        sparse_parameters: Parameters with sparse gradients, such as the weight of
            `nn.Embedding(sparse=True)`; they are averaged row by row.

    Raises:
        ConfigError: Parameters without a name, or names of other parameters; no group; an optimizer
            that averages already.
        MismatchError: Parameters, or settings or states of the optimizer, differ between ranks.

    The optimizer gets `synchronize()`, `no_sync()` and `close()`. Gradients are averaged when
    backward ends. Only if all parameters are in re-entrant checkpoints, call `synchronize()` before
    gradients are read or clipped, or pass use_reentrant=False.

    `torch.autograd.grad` of these parameters raises an error, because it would return the gradients
    of this rank alone; inside of `no_sync()` it is allowed.
    """

    def __new__(
        cls,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
        *,
        process_group: Any = None,
        gradient_accumulation_steps: int = 1,
        bucket_cap_mb: float | None = None,
        init_sync: bool = True,
        nonfinite: str | NonfiniteHandler = "warn",
        check_all: bool = False,
        sparse_parameters: Collection[torch.Tensor] = (),
    ) -> Any:
        """Change `optimizer` in place and return the same object."""
        if isinstance(optimizer, _Averaging):
            msg = f"this {type(optimizer).__name__} already averages gradients: wrap it only once"
            raise ConfigError(msg)
        group = group_of(process_group)
        table = ParamTable.named(_named(optimizer, named_parameters), frozenset(sparse_parameters))
        handler = nonfinite_handler(nonfinite, [record.param for record in table])
        options = ReducerOptions(
            gradient_accumulation_steps=gradient_accumulation_steps,
            caps=caps_of(bucket_cap_mb, None),
            finite_check=finite_check_of(nonfinite, check_all=check_all),
        )
        if init_sync:
            table.make_equal(group, arguments_in_common(options, nonfinite))
            compare_optimizers(group, optimizer)
            reclaim_lost_requests(group)
        listener = _Listener(group, table, handler)
        # a hook: schedulers created earlier would bypass a method `step`
        before_step = partial(_before_step, weakref.ref(optimizer))
        change_in_place(
            optimizer,
            _Averaging,
            _reducer=GradientReducer(group, table, options, listener, registers_outputs=False),
            _records=table.records,
            _snapshot=ParamSnapshot(record.param for record in table),
            _warned=False,
            _step_handle=optimizer.register_step_pre_hook(before_step),
        )
        return optimizer


class _Listener(ReducerListener):
    def __init__(self, group: Group, table: ParamTable, handler: NonfiniteHandler) -> None:
        self._group = group
        self._settings = StepSettings(record.param for record in table)
        self._handler = handler

    def on_averaged(self, outcome: AveragingOutcome) -> None:
        handle_nonfinite(outcome, self._group.ranks, self._handler)
        self._settings.averaged([self._group])


class _Averaging(ChangedOptimizer):
    """Mixin with the methods that are added to the class of an optimizer."""

    _reducer: GradientReducer
    _records: tuple[ParamRecord, ...]
    _snapshot: ParamSnapshot
    _warned: bool
    _step_handle: RemovableHandle

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero gradients; if the last backward raised, notify the other ranks."""
        self._refresh()
        super().zero_grad(set_to_none)  # type: ignore[misc]  # of the optimizer
        self._reducer.restart()

    def synchronize(self) -> None:
        """Average pending gradients; if the last backward raised, notify the other ranks."""
        self._refresh()
        if self._reducer.accumulates and self._reducer.synchronizes:
            self._reducer.finish()

    def _refresh(self) -> None:
        """Average gradients of checkpoints, report an exception, and update frozen parameters."""
        named = ((record.name, record.param) for record in self._records)
        self._snapshot.check((record.param for record in self._records), named)
        self._reducer.refresh()
        if self._reducer.needs_average:
            self._reducer.finish()

    def _average_before_step(self) -> None:
        if self._reducer.needs_average and not self._warned:
            self._warned = True
            warnings.warn(
                "gradients were averaged in step(), not in backward, because all parameters are "
                "in re-entrant checkpoints: call synchronize() before you read or clip "
                "gradients, or pass use_reentrant=False. Shown once",
                UserWarning,
                stacklevel=2,
            )
        self.synchronize()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which gradients stay local; the next backward outside averages."""
        return self._reducer.no_sync()

    def close(self) -> None:
        """Stop averaging, and restore the class of the optimizer."""
        self._step_handle.remove()
        self._reducer.close()
        self.__class__ = type(self).__bases__[1]
        for name in _Averaging.__annotations__:
            del self.__dict__[name]


def _before_step(
    reference: weakref.ref[Any], _inner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Average gradients before a step of the optimizer, and after its closure."""
    optimizer = reference()
    if optimizer is None:
        return args, kwargs
    optimizer._average_before_step()  # noqa: SLF001 - its continuation
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return args, kwargs

    def averaged() -> Any:
        loss = closure()
        optimizer._average_before_step()  # noqa: SLF001 - its continuation
        return loss

    if len(args) > 1:
        return (args[0], averaged, *args[2:]), kwargs
    return args, {**kwargs, "closure": averaged}


def _named(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, nn.Parameter]] | None
) -> list[tuple[str, nn.Parameter]]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if named is None:
        return [(f"parameter {number}", param) for number, param in enumerate(params)]
    names: dict[int, list[tuple[str, nn.Parameter]]] = {}
    for name, param in named:
        names.setdefault(id(param), []).append((name, param))
    unnamed = sum(id(param) not in names for param in params)
    if unnamed:
        msg = (
            f"{unnamed} of the optimizer's {len(params)} parameters have no name: pass "
            "model.named_parameters() of all models with parameters in the optimizer"
        )
        raise ConfigError(msg)
    return [pair for param in params for pair in names[id(param)]]
