"""Recomputation: call a function again in backward instead of keeping what it saves.

torch's non-reentrant `checkpoint` works this way, too. This one also names the line whose saved
tensor came out differently, notices parameters that were changed in between, stops as soon as what
backward *still* needs is there, and lets a saved tensor be read more than once.

    forward    every tensor that autograd would save becomes a slot: a number and a note of shape,
               dtype and line
    backward   the first slot that is read runs the function again. The n-th tensor saved then fills
               slot n if anything still refers to it; after the last such slot the function is
               stopped. Reading a slot empties it

The second run happens once per segment and backward pass, in the same state of random generators
and autocast. Its own graph is thrown away. The arguments are saved tensors themselves, of whatever
surrounds the call: in a nested checkpoint they are slots of the outer one, and no memory is held by
the inner.

Cost: one more forward, up to the last needed tensor. Memory: the arguments until backward; while
backward passes the segment, all of its saved tensors, which are freed one by one. `recompute_plan`
chooses the segments.

Source: Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost" (2016); Griewank
and Walther, "Algorithm 799: revolve" (2000); hooks instead of a re-entrant Function as in PyTorch
1.11's `use_reentrant=False`.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from braid.comm.autograd.nested import flatten, unflatten
from braid.comm.autograd.phony import phony
from braid.comm.autograd.rng_and_autocast import RngAndAutocast, generators_of
from braid.errors import BraidError
from braid.runtime import seeding
from braid.runtime.torch_internals import current_graph_task, version_of
from braid.types import dtype_name

__all__ = ["RecomputeError", "checkpoint"]

Result = TypeVar("Result")
Around = Callable[[bool], AbstractContextManager[object]]

CPU = torch.device("cpu")
INNER = tuple(str(Path(file).parent) + "/" for file in (torch.__file__, __file__, seeding.__file__))
NO_PASS = -1  # torch's number for reading saved tensors outside of backward


class RecomputeError(BraidError, RuntimeError):
    """A function did not compute the same when it was called again."""


def checkpoint(
    function: Callable[..., Result],
    *args: Any,
    preserve_rng_state: bool | Sequence[torch.Generator] = True,
    early_stop: bool = True,
    around: Around | None = None,
    **kwargs: Any,
) -> Result:
    """Call `function` and keep nothing for backward but its arguments; backward calls it again.

    The function must do the same both times, as far as tensors are concerned: no arguments changed
    in place, and no decisions on what changes in between. Its other effects happen twice: a
    BatchNorm in training updates its statistics again. Collectives in it are called again, too, on
    all ranks at the same point of backward if their programs are the same.

    Args:
        function: Function to call. Of an nn.Module, changes to all parameters are noticed; of other
            functions, to those saved.
        args: Arguments; tensors may be anywhere in lists, tuples, mappings and dataclasses, and
            anything else is kept as it is.
        preserve_rng_state: Whether to draw the same random numbers again: from torch's default
            generators (True), these (a sequence), or no generator (False), which saves copying 5
            KB.
        early_stop: Whether to end the second call when backward has all it needs; False for
            functions that must run to their end, such as modules whose forward hooks release
            something.
        around: Function `around(again)` that makes a context for the function to run in; `again` is
            False in forward.
        kwargs: Keyword arguments, as args.

    Returns:
        The result of `function`. Without grad mode this is an ordinary call.

    Raises:
        RecomputeError: In backward: the function saved other tensors, or a parameter has been
            changed in place.

    Source: see the module.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    tree, tensors = flatten((args, kwargs))
    if isinstance(preserve_rng_state, bool):
        generators = generators_of(tensors) if preserve_rng_state else []
    else:
        generators = list(preserve_rng_state)
    call = _CheckpointedCall(
        function, tree, tensors, RngAndAutocast(generators), around, early_stop=early_stop
    )
    with saved_tensors_hooks(call.save, call.load), call.around(again=False):
        result = function(*args, **kwargs)
    call.complete = True
    return result


class _Stop(BaseException):
    """Raised when all needed tensors are saved; no Exception, so that no function catches it."""


class _Slot:
    """Placeholder of a saved tensor in the graph."""

    __slots__ = ("__weakref__",)


class _Note(NamedTuple):
    """Properties of a saved tensor that are remembered."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    version: int | None  # of parameters: how often they had been changed in place
    code: CodeType
    line: int

    def __str__(self) -> str:
        name = dtype_name(self.dtype)
        site = f"{self.code.co_filename}:{self.line} in {self.code.co_name}"
        return f"{name}{list(self.shape)} on {self.device} at {site}"


class _Keep(torch.autograd.Function):
    """Autograd function that saves tensors: hooks around it apply, changes are noticed."""

    @staticmethod
    def forward(ctx: Any, edge: torch.Tensor, *xs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*xs)
        return edge.detach()

    @staticmethod
    # autograd never computes these
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, ...]:  # noqa: ARG004
        raise AssertionError


class _CheckpointedCall:
    """One checkpointed call. The graph's saved tensors own it, by way of the hooks."""

    def __init__(
        self,
        function: Callable[..., object],
        tree: Any,
        tensors: Sequence[torch.Tensor],
        state: RngAndAutocast,
        around: Around | None,
        *,
        early_stop: bool,
    ) -> None:
        self.complete = False
        self._function = function
        self._tree = tree
        named = function.named_parameters() if isinstance(function, nn.Module) else ()
        self._parameters = [(name, parameter, _version(parameter)) for name, parameter in named]
        self._requires_grad = [x.requires_grad for x in tensors]
        # the tensor: torch 2.10 frees what its node has saved when nothing but the node is left
        self._kept = _Keep.apply(phony(CPU, True), *[x.detach() for x in tensors])  # type: ignore[no-untyped-call]
        self._state = state
        self._around = around
        self._early_stop = early_stop
        self._slots: list[weakref.ref[_Slot]] = []
        self._notes: list[_Note] = []
        self._lock = threading.RLock()  # one backward may run on a thread per device
        self._pass = NO_PASS
        self._recomputed: weakref.WeakKeyDictionary[_Slot, torch.Tensor] = (
            weakref.WeakKeyDictionary()
        )

    def around(self, *, again: bool) -> AbstractContextManager[object]:
        return contextlib.nullcontext() if self._around is None else self._around(again)

    def save(self, x: torch.Tensor) -> _Slot:
        slot = _Slot()
        self._slots.append(weakref.ref(slot))
        self._notes.append(_note(x))
        return slot

    def load(self, slot: _Slot) -> torch.Tensor:
        with self._lock:
            # what another pass left behind may be of other parameters
            # only this number identifies a backward pass
            number = current_graph_task()
            if number != self._pass or number == NO_PASS:
                self._recomputed.clear()
                self._pass = number
            if slot not in self._recomputed:
                self._run_again()
            return self._recomputed.pop(slot)

    def _run_again(self) -> None:
        for name, parameter, version in self._parameters:
            if _version(parameter) != version:
                changed = f"parameter {name} of {type(self._function).__name__}"
                raise RecomputeError(_changed(changed, version, _version(parameter)))
        last = max(index for index, slot in enumerate(self._slots) if slot() is not None)
        num_saved = 0

        def save(x: torch.Tensor) -> torch.Tensor:
            nonlocal num_saved
            index, num_saved = num_saved, num_saved + 1
            if index < len(self._notes):
                self._fill(index, x)
            if index == last and self._early_stop:
                raise _Stop
            return x.detach()

        kept = zip(self._kept.grad_fn.saved_tensors, self._requires_grad, strict=True)
        args, kwargs = unflatten(self._tree, [x.detach().requires_grad_(g) for x, g in kept])
        with (
            contextlib.suppress(_Stop),
            self._state.again(),
            torch.enable_grad(),
            saved_tensors_hooks(save, lambda x: x),
            self.around(again=True),
        ):
            self._function(*args, **kwargs)
        self._check_count(num_saved, last)

    def _fill(self, index: int, x: torch.Tensor) -> None:
        before = self._notes[index]
        if (before.shape, before.dtype, before.device) != (x.shape, x.dtype, x.device):
            msg = (
                f"function computed something else in backward: saved tensor {index} of "
                f"{len(self._notes)} was {before} in forward and is {_note(x)} now; it must "
                "depend on nothing that changed in between"
            )
            raise RecomputeError(msg)
        if before.version is not None and before.version != _version(x):
            changed = f"saved tensor {index} of {len(self._notes)} ({before})"
            raise RecomputeError(_changed(changed, before.version, _version(x)))
        slot = self._slots[index]()
        if slot is not None:
            self._recomputed[slot] = x.detach()

    def _check_count(self, num_saved: int, last: int) -> None:
        expected = len(self._notes)
        # a gradient computed inside the function needs a part of it only
        part = self._early_stop or not self.complete
        if num_saved > last if part else num_saved == expected:
            return
        missing = (
            f"the first that is missing was {self._notes[num_saved]}"
            if num_saved < expected
            else "forward saved fewer"
        )
        msg = (
            f"function saved {num_saved} tensors in backward, but {expected} in forward; "
            f"{missing}: it must depend on nothing that changed in between, such as a mode or "
            "a global"
        )
        raise RecomputeError(msg)


def _changed(changed: str, before: int, now: int) -> str:
    return (
        f"{changed} has been changed in place since forward (version {before}, now {now}): "
        "call backward before the optimizer's step"
    )


def _version(x: torch.Tensor) -> int:
    return version_of(x)


def _note(x: torch.Tensor) -> _Note:
    version = _version(x) if x.is_leaf and x.requires_grad else None
    # the line outside of torch and this package that saved it
    frame = sys._getframe(1)  # noqa: SLF001 - the only way to see the caller
    while frame.f_back is not None and frame.f_code.co_filename.startswith(INNER):
        frame = frame.f_back
    return _Note(x.shape, x.dtype, x.device, version, frame.f_code, frame.f_lineno)
