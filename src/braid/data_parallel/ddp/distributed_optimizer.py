"""DistributedOptimizer: the optimizer, not the model, sees to it that gradients are averaged.

For programs that keep their model unwrapped, as Horovod's do: the optimizer that is passed in is changed in place, so that schedulers and everything else that
knows it go on. Hooks on the parameters average during backward, exactly as `DistributedDataParallel` does (`params.GradientReducer`).

A wrapper sees the outputs of its module, and so the begin of a backward. Here the first thing that is seen is a gradient of a parameter, about to be
accumulated. It may belong to a backward inside of another one (re-entrant checkpointing), whose end is not that of the whole:

    loss.backward()    |--head--|  checkpoint: [backward  p5 p4]  checkpoint: [backward  p3 p2]  |--p1 p0--|
                           ^ seen first: averages at the end of the whole
                        without head:                    ^ local             ^ local                ^ averages at the end of the whole
                        without p1 p0 either: averages in step()
"""

from __future__ import annotations

import contextlib
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import RemovableHandle

from braid.data_parallel.ddp.arguments import arguments_in_common, caps_of
from braid.data_parallel.ddp.param_snapshot import KnownParams
from braid.data_parallel.finite import Reaction, react, reaction_of
from braid.data_parallel.groups import group_of
from braid.errors import ConfigError
from braid.params import GradientReducer, Outcome, ParamRecord, ParamTable, ReducerOptions
from braid.params.lost_requests import reclaim_lost_requests

__all__ = ["DistributedOptimizer"]

# through which autograd calls the backward of every autograd.Function of Python
_APPLY = BackwardCFunction.apply.__code__


class DistributedOptimizer:
    """Makes an optimizer's parameters be averaged over ranks in every backward.

    Stays itself: what is returned is `optimizer`, of a class that derives from its own.

    Args:
        optimizer: Any `torch.optim.Optimizer`.
        named_parameters: Names for messages, such as `model.named_parameters()`; numbers when None.
        process_group: See `DistributedDataParallel`.
        backward_passes_per_step: Average in every k-th backward; the others accumulate. A step that comes earlier averages what there is, on all ranks;
            gradients that are zeroed earlier restart the count. What looks at gradients before such a step, as clipping and a `torch.amp.GradScaler` do, needs
            `synchronize()` before it: a scaler that leaves the step out on one rank alone would leave others waiting.
        bucket_cap_mb: See `DistributedDataParallel`.
        init_sync: Copy rank 0's parameters to all first, and compare what there is.
        nonfinite: What to do about NaN and Inf in gradients, see `DistributedDataParallel`.
        check_all: Look at every number for that, rather than at one of each gradient.

    Raises:
        ConfigError: Parameters without a name, or names of others; no group; an optimizer that averages already.
        MismatchError: Ranks have other parameters.

    The optimizer gets `synchronize()`, `no_sync()` and `close()`. Gradients are averaged when backward has ended, so there is nothing to wait for; except
    where all parameters lie in re-entrant checkpoints: call `synchronize()` there before gradients are read or clipped, or say use_reentrant=False.

    `torch.autograd.grad` of these parameters is refused, as it would give gradients of this rank alone; inside of `no_sync()` that is what is asked for.
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
        nonfinite: str | Reaction = "warn",
        check_all: bool = False,
    ) -> Any:
        """See the class."""
        if isinstance(optimizer, _Averaging):
            msg = f"expected an optimizer that does not average yet, found that {type(optimizer).__name__} does: pass it once"
            raise ConfigError(msg)
        group = group_of(process_group)
        table = ParamTable.named(_named(optimizer, named_parameters))
        reaction = reaction_of(nonfinite, [record.param for record in table])
        options = ReducerOptions(
            every=backward_passes_per_step, caps=caps_of(bucket_cap_mb, None), check_all=check_all
        )
        if init_sync:
            table.make_equal(group, arguments_in_common(options, nonfinite))
            reclaim_lost_requests(group)
        reducer = GradientReducer(group, table, options)
        kind = type(optimizer)
        optimizer.__class__ = type(kind.__name__, (_Averaging, kind), {})
        optimizer.__dict__.update(
            _reducer=reducer,
            _records=table.records,
            _known=KnownParams(record.param for record in table),
            _reaction=reaction,
            _entrances={},
            _owes=False,
            _was_said=False,
        )
        optimizer._listen(group.ranks)  # type: ignore[attr-defined]  # noqa: SLF001 - of its new class
        return optimizer


class _Averaging:
    """What is added to the class of an optimizer."""

    _reducer: GradientReducer
    _records: tuple[ParamRecord, ...]
    _known: KnownParams
    _reaction: Reaction
    _entrances: dict[int, RemovableHandle]  # by parameter
    _owes: bool  # an average of what checkpoints have left
    _was_said: bool
    _step_handle: RemovableHandle

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the optimizer's own; and if the last backward was left by an exception, the others are told."""
        self._follow()
        super().zero_grad(set_to_none)  # type: ignore[misc]  # of the optimizer
        self._reducer.restart()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: parameters that come later would not be averaged."""
        del param_group
        msg = "expected all parameters when the optimizer was made to average, found a group that is added later: add it before, frozen if need be"
        raise ConfigError(msg)

    def synchronize(self) -> None:
        """See to it that what there is of gradients is averaged; tell the others if the last backward was left by an exception."""
        self._follow()
        if self._reducer.accumulates and self._reducer.synchronize:
            self._reducer.finish()

    def _follow(self) -> None:
        """Between steps: what checkpoints have left is averaged, an exception told, and what is trained now seen."""
        self._known.check(
            (r.param for r in self._records), ((r.name, r.param) for r in self._records)
        )
        self._reducer.follow()
        self._watch()
        if self._owes:
            self._owes = False
            self._reducer.finish()

    def _say_owed(self) -> None:
        if self._owes and not self._was_said:
            self._was_said = True
            warnings.warn(
                "gradients have been averaged in step(), not in backward, as all parameters lie in re-entrant checkpoints: if they are read or "
                "clipped before, call synchronize() before that, or checkpoint with use_reentrant=False. Said once",
                UserWarning,
                stacklevel=2,
            )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside keep their gradients local; the next one outside averages the sum."""
        with self._reducer.no_sync():
            yield

    def close(self) -> None:
        """Average no more."""
        _remove(self._entrances)
        self._step_handle.remove()
        self._owes = False
        self._reducer.close()

    def __getstate__(self) -> NoReturn:
        """Asked for by copy and pickle, which would share hooks of this optimizer's parameters."""
        msg = "expected an optimizer that averages to stay where it is, found that it is copied or pickled: use state_dict(), and make another one"
        raise ConfigError(msg)

    def _listen(self, ranks: tuple[int, ...]) -> None:
        reference = weakref.ref(self)  # hooks of parameters must not keep what has the parameters

        def on_outcome(outcome: Outcome) -> None:
            optimizer = reference()
            if optimizer is not None:
                optimizer._owes = False  # noqa: SLF001 - its continuation
                react(outcome, ranks, optimizer._reaction)  # noqa: SLF001 - likewise

        self._reducer.on_outcome = on_outcome
        # not a method `step`, which a scheduler that was made before would go round
        before = partial(_before_step, reference)
        self._step_handle = self.register_step_pre_hook(before)  # type: ignore[attr-defined]  # of the optimizer
        # parameters live on when the optimizer is gone
        weakref.finalize(self, _remove, self._entrances).atexit = False
        self._watch()

    def _watch(self) -> None:
        """Be called before gradients of parameters are accumulated, and before torch.autograd.grad returns them."""
        reference = weakref.ref(self)

        def on_part(_grad: torch.Tensor) -> None:
            optimizer = reference()
            if optimizer is not None:
                optimizer._enter()  # noqa: SLF001 - its continuation

        for group in self.param_groups:  # type: ignore[attr-defined]  # of the optimizer
            for param in group["params"]:
                if param.requires_grad and id(param) not in self._entrances:
                    self._entrances[id(param)] = param.register_hook(on_part)

    def _enter(self) -> None:
        """A gradient has been computed."""
        reducer = self._reducer
        if reducer._in_backward or not reducer.synchronize:  # noqa: SLF001 - its continuation
            return
        if not _is_nested():
            reducer._enter()  # noqa: SLF001 - likewise
            return
        self._owes = True
        passed = reducer._passed  # noqa: SLF001 - likewise
        with reducer.no_sync():
            reducer._enter()  # noqa: SLF001 - likewise

        def on_end() -> None:
            reducer._passed = passed  # noqa: SLF001 - it is the whole that counts

        torch.autograd.Variable._execution_engine.queue_callback(on_end)  # noqa: SLF001 - there is no public way


def _before_step(
    reference: weakref.ref[_Averaging], _inner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A step of the optimizer begins: gradients are averaged before it, and those of a closure when that has ended."""
    optimizer = reference()
    if optimizer is None:
        return args, kwargs
    optimizer._say_owed()  # noqa: SLF001 - its continuation
    optimizer.synchronize()
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return args, kwargs

    def averaged() -> Any:
        loss = closure()
        optimizer._say_owed()  # noqa: SLF001 - its continuation
        optimizer.synchronize()
        return loss

    if len(args) > 1:
        return (args[0], averaged, *args[2:]), kwargs
    return args, {**kwargs, "closure": averaged}


def _remove(handles: dict[int, RemovableHandle]) -> None:
    for handle in handles.values():
        handle.remove()
    handles.clear()


def _is_nested() -> bool:
    """Whether the present backward was called by an autograd.Function inside of another one."""
    frame = sys._getframe(1)  # noqa: SLF001 - autograd numbers its backwards, but does not tell which is inside of which
    while frame.f_code is not _APPLY:
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return True


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
