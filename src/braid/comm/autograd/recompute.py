"""Recomputation: call a function again in backward instead of keeping the tensors that it saves.

torch's non-reentrant `checkpoint` works this way as well. This one also names the source line of a
saved tensor that differs, detects parameters that were changed in between, stops as soon as it has
all tensors that backward *still* needs, and allows reading a saved tensor more than once.

    forward    every tensor that autograd would save becomes a slot: a number with the tensor's
               shape, dtype and source line
    backward   the first read of a slot runs the function again. The n-th saved tensor then fills
               slot n if the graph still refers to it; after the last such slot the function is
               stopped. Reading a slot empties it

The second run happens once per segment and backward pass, with the same state of random generators
and autocast. Its graph is discarded. The arguments are saved tensors of the surrounding graph: in a
nested checkpoint they are slots of the outer checkpoint, and the inner one holds no memory.

Cost: one more forward, up to the last needed tensor. Memory: the arguments until backward; during
the segment's backward all of its saved tensors, which are freed one by one. `recompute_plan`
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from braid.comm.autograd.nested import flatten, unflatten
from braid.comm.autograd.phony import phony
from braid.comm.autograd.recompute_policy import RecomputePolicy, contexts_of
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
    """A function saved other tensors when it was called again in backward."""


def checkpoint(
    function: Callable[..., Result],
    *args: Any,
    preserve_rng_state: bool | Sequence[torch.Generator] = True,
    early_stop: bool = True,
    around: Around | None = None,
    policy: RecomputePolicy | None = None,
    **kwargs: Any,
) -> Result:
    """Call `function` and save only its arguments for backward, which calls it again.

    The function must compute the same tensors both times: it must not change arguments in place, or
    depend on state that changes in between. Its side effects happen twice: a BatchNorm in training
    updates its statistics again. Its collectives are called again as well, at the same point of
    backward on all ranks if their programs are the same.

    Args:
        function: Function to call. Changes to any parameter of an nn.Module are detected; for other
            functions, changes to saved parameters.
        args: Arguments; tensors may be nested in lists, tuples, mappings and dataclasses. Other
            objects are passed as they are.
        preserve_rng_state: Generators that must repeat their random numbers: True for torch's
            default generators, or a sequence, or False for none, which saves copying 5 KB.
        early_stop: Whether to stop the second call when backward has all tensors it needs; False
            for functions that must run to their end, such as modules with forward hooks that
            release resources.
        around: Function `around(again)` that returns a context manager for each run; `again` is
            False in forward.
        policy: Policy of results that are kept as well, or a list of operators with kept results;
            see `recompute_policy`. Then only one backward can run through the result.
        kwargs: Keyword arguments, as args.

    Returns:
        The result of `function`. Without grad mode this is an ordinary call.

    Raises:
        ConfigError: The policy is neither a function nor a list of operators.
        RecomputeError: In backward: the function saved other tensors, or a parameter was changed in
            place.

    Source: see the module.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    tree, tensors = flatten((args, kwargs))
    if isinstance(preserve_rng_state, bool):
        generators = generators_of(tensors) if preserve_rng_state else []
    else:
        generators = list(preserve_rng_state)
    if policy is not None:
        around = _with_policy(around, policy)
    call = CheckpointedCall(
        function, tree, tensors, RngAndAutocast(generators), around, early_stop=early_stop
    )
    with saved_tensors_hooks(call.save, call.load), call.around(again=False):
        result = function(*args, **kwargs)
    call.complete = True
    return result


def _with_policy(around: Around | None, policy: RecomputePolicy) -> Around:
    """Return `around` with the contexts of a policy inside."""
    contexts = contexts_of(policy)

    @contextlib.contextmanager
    def both(again: bool) -> Iterator[None]:
        outer = contextlib.nullcontext() if around is None else around(again)
        with outer, contexts[again]:
            yield

    return both


class _Stop(BaseException):
    """Raised when all needed tensors are saved; not an Exception, so functions do not catch it."""


class _Slot:
    """Placeholder of a saved tensor in the graph."""

    __slots__ = ("__weakref__",)


class _Note(NamedTuple):
    """Recorded properties of a saved tensor."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    version: int | None  # for a parameter: its count of in-place changes
    code: CodeType
    line: int

    def __str__(self) -> str:
        name = dtype_name(self.dtype)
        site = f"{self.code.co_filename}:{self.line} in {self.code.co_name}"
        return f"{name}{list(self.shape)} on {self.device} at {site}"


class KeptTensors(torch.autograd.Function):
    """Autograd function that saves tensors through the hooks around it, with version checks."""

    @staticmethod
    def forward(ctx: Any, edge: torch.Tensor, *xs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*xs)
        return edge.detach()

    @staticmethod
    # autograd never computes these
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, ...]:  # noqa: ARG004
        raise AssertionError


class CheckpointedCall:
    """One checkpointed call, kept alive by the hooks of the graph's saved tensors.

    Args:
        function: Function that runs again in backward.
        tree: Its arguments, with placeholders instead of tensors.
        tensors: Tensors of its arguments.
        state: State of random generators and autocast.
        around: See `checkpoint`.
        early_stop: See `checkpoint`.
    """

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
        self._parameters: list[tuple[str, nn.Parameter, int]] = []
        if isinstance(function, nn.Module):
            self.register_parameters(function)
        self._requires_grad = [x.requires_grad for x in tensors]
        # keep the tensor: torch 2.10 frees a node's saved tensors if only the node itself is left
        self._kept = KeptTensors.apply(phony(CPU, True), *[x.detach() for x in tensors])  # type: ignore[no-untyped-call]
        self._state = state
        self._around = around
        self.early_stop = early_stop
        self._slots: list[weakref.ref[_Slot]] = []
        self._notes: list[_Note] = []
        self._num_again = self._last = 0  # of the running recomputation
        self._lock = threading.RLock()  # one backward may run on a thread per device
        self._pass = NO_PASS
        self._recomputed: weakref.WeakKeyDictionary[_Slot, torch.Tensor] = (
            weakref.WeakKeyDictionary()
        )

    def register_parameters(self, module: nn.Module) -> None:
        """Register the parameters of a module, which must not change in place until backward."""
        for name, parameter in module.named_parameters():
            text = f"parameter {name} of {type(module).__name__}"
            self._parameters.append((text, parameter, _version(parameter)))

    def around(self, *, again: bool) -> AbstractContextManager[object]:
        """Return the context manager around the first run, or around the second if `again`."""
        return contextlib.nullcontext() if self._around is None else self._around(again)

    def save(self, x: torch.Tensor) -> _Slot:
        """Return a slot, which autograd keeps instead of a tensor that the first run saves."""
        slot = _Slot()
        self._slots.append(weakref.ref(slot))
        self._notes.append(_note(x))
        return slot

    def load(self, slot: _Slot) -> torch.Tensor:
        """Return the tensor of a slot; run the function again if it is empty."""
        with self._lock:
            # discard leftovers of another pass, which may have used other parameters
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
                raise RecomputeError(_changed(name, version, _version(parameter)))
        self._last = max(index for index, slot in enumerate(self._slots) if slot() is not None)
        self._num_again = 0
        with (
            contextlib.suppress(_Stop),
            self._state.again(),
            torch.enable_grad(),
            saved_tensors_hooks(self.save_again, lambda x: x),
        ):
            self._call_again()
        self._check_count(self._num_again, self._last)

    def _call_again(self) -> None:
        kept = zip(self._kept.grad_fn.saved_tensors, self._requires_grad, strict=True)
        args, kwargs = unflatten(self._tree, [x.detach().requires_grad_(g) for x, g in kept])
        with self.around(again=True):  # not above: an outer checkpoint may recompute arguments
            self._function(*args, **kwargs)

    def save_again(self, x: torch.Tensor) -> torch.Tensor:
        """Fill the next slot with a tensor that the recomputation saves."""
        index, self._num_again = self._num_again, self._num_again + 1
        if index < len(self._notes):
            self._fill(index, x)
        if index == self._last and self.early_stop:
            raise _Stop
        return x.detach()

    def _fill(self, index: int, x: torch.Tensor) -> None:
        before = self._notes[index]
        if (before.shape, before.dtype, before.device) != (x.shape, x.dtype, x.device):
            msg = (
                f"function computed something else in backward: saved tensor {index} of "
                f"{len(self._notes)} was {before} and is {_note(x)} when computed again: make the "
                "function independent of state that changes between forward and backward"
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
        # if a gradient is computed inside the function, only a part of it runs again
        part = self.early_stop or not self.complete
        if num_saved > last if part else num_saved == expected:
            return
        missing = (
            f"the first missing tensor was {self._notes[num_saved]}"
            if num_saved < expected
            else "forward saved fewer"
        )
        msg = (
            f"function saved {num_saved} tensors in backward, but {expected} in forward; "
            f"{missing}: make the function independent of state that changes in between, such as "
            "train mode or a global"
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
    # the innermost line outside of torch and this package
    frame = sys._getframe(1)  # noqa: SLF001 - the only way to see the caller
    while frame.f_back is not None and frame.f_code.co_filename.startswith(INNER):
        frame = frame.f_back
    return _Note(x.shape, x.dtype, x.device, version, frame.f_code, frame.f_lineno)
