"""Rollback: after gradients that are not finite, go back to a copy of the last good state, on all ranks in the same step.

Problem: a step that is skipped leaves what led to it: moments of the optimizer that have grown for many steps, running means that the bad batch has
been through. A checkpoint on disk is older, and loading it means to start the job again.

Idea: every n good steps one copy in memory, of everything a step changes. `finite.react` calls all ranks in the same backward, so all go back to the
same step, without a message of their own.

    step        1    2    3    4    5    bad                  5    6
    copy   ^0             ^3              |              ^3             made before the forward of the step that follows
                          '---- back -----'---- again ---'
           what the loop still does after the bad backward, such as scheduler.step(), is undone before the next forward

Source: what large runs do by hand, see Chowdhery et al., "PaLM", JMLR 2023, section 5.1 (go back some 100 steps, and leave the batches out).
"""

from __future__ import annotations

import copy
import threading
import warnings
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch._compile import _disable_dynamo

from braid.data_parallel.finite import NonFinite, NonFiniteError
from braid.errors import ConfigError

__all__ = ["Rollback", "WentBack"]


class Stateful(Protocol):
    """What has a state that can be copied."""

    def state_dict(self) -> dict[str, Any]:
        """All of it."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Go on from it."""
        ...


class WentBack(NamedTuple):
    """One return to the copy.

    Attributes:
        found: Why: step, ranks and parameters.
        step: Steps of the optimizer that the copy had seen.
        num_lost: Steps after it, which are undone.
        in_a_row: Returns without a good step in between, this one included.
    """

    found: NonFinite
    step: int
    num_lost: int
    in_a_row: int

    def __str__(self) -> str:
        lost = f"{self.num_lost} step{'' if self.num_lost == 1 else 's'}"
        again = f"; return {self.in_a_row} in a row" if self.in_a_row > 1 else ""
        return f"{self.found}: went back to the copy after {self.step} steps of the optimizer, losing {lost}{again}"


class _Copy(NamedTuple):
    """A good state.

    Attributes:
        step: Steps that it had seen.
        params: Each with its values.
        buffers: Values by name.
        states: Of the kept objects, in their order.
    """

    step: int
    params: list[tuple[torch.Tensor, torch.Tensor]]
    buffers: dict[str, torch.Tensor]
    states: list[dict[str, Any]]


class Rollback:
    """What to do about gradients that are not finite: go back to a copy, and go on with the next batch.

    Made before the wrapper, and given to it:

        optimizer = torch.optim.AdamW(net.parameters())
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, 1000)
        rollback = Rollback(net, optimizer, scheduler, every=100)
        model = DistributedDataParallel(net, process_group=group, nonfinite=rollback)

    The loop stays as it is. The copy holds parameters (of the model and of the optimizers), buffers and the states of what is kept; gradients are
    None after a return, so the optimizer's step that follows does nothing. Random generators go on. Not for a `torch.amp.GradScaler`, which looks at
    gradients itself: say "ignore" with one.

    Args:
        model: What is called to train; the wrapped module, or what it is a part of.
        *kept: Optimizers, and whatever else has `state_dict` and `load_state_dict`: schedulers, averages of weights. Not the place in the
            data: a return would lead to the same batch.
        every: Good steps of an optimizer from copy to copy.
        limit: Returns in a row, without a good step in between, before it is given up.

    Attributes:
        num_rollbacks: Returns so far.
        last: The last one.

    Raises:
        ConfigError: Something has no state or is a gradient scaler, or a number is below 1.

    Cost:
        Memory for one more set of parameters, buffers and states, on their devices; a copy of them every `every` steps.

    On failure:
        After `limit` returns in a row, NonFiniteError on all ranks; the model is in the state of the copy then. States are as exact as
        `load_state_dict` of their owners (torch's optimizers cast floating ones to the dtype of their parameter).
    """

    def __init__(self, model: nn.Module, *kept: Stateful, every: int = 100, limit: int = 3) -> None:
        wrong = [f"{n}={v!r}" for n, v in (("every", every), ("limit", limit)) if not _counts(v)]
        if wrong:
            msg = (
                f"expected every and limit to be numbers of steps above 0, found {', '.join(wrong)}"
            )
            raise ConfigError(msg)
        self._step = 0  # as of the last forward
        self.num_rollbacks = 0
        self.last: WentBack | None = None
        self._model = model
        # by themselves: in a forward in 16 bits, copies stand in their places
        self._params = list(model.parameters())
        self._every = every
        self._limit = limit
        self._kept: list[Stateful] = []
        self._optimizers: list[Any] = []
        self._copy: _Copy | None = None
        self._stepped = False
        self._in_a_row = 0
        self._went_back = False
        self._lock = threading.Lock()  # replicas on several devices are called in threads
        self._handles = [model.register_forward_pre_hook(_BeforeForward(self))]
        self.keep(*kept)

    @property
    def step(self) -> int:
        """Steps of the optimizer that the present state has seen."""
        return self._step + (self._stepped and not self._went_back)

    def keep(self, *more: Stateful) -> None:
        """Copy these, too, from the next copy on; such as optimizers that are there only after wrapping (`step_in_backward`).

        Raises:
            ConfigError: One has no state to copy, or is a gradient scaler.
        """
        if any(isinstance(one, torch.amp.GradScaler) for one in more):
            msg = (
                "expected no gradient scaler, found one: it lowers its scale where gradients are not finite, and needs them to see that, but after a "
                "return they are gone. Say nonfinite='ignore' with a scaler, or train in bfloat16, which needs none"
            )
            raise ConfigError(msg)
        stateless = [
            type(one).__name__
            for one in more
            if not all(callable(getattr(one, n, None)) for n in ("state_dict", "load_state_dict"))
        ]
        if stateless:
            msg = (
                f"expected optimizers and other objects with state_dict() and load_state_dict(), found {', '.join(stateless)}: "
                "pass each by itself, not in a list"
            )
            raise ConfigError(msg)
        with self._lock:
            for one in more:
                self._kept.append(one)
                if hasattr(one, "register_step_post_hook"):
                    self._optimizers.append(one)
                    self._handles.append(one.register_step_post_hook(self._after_step))
            if self._step == 0 and not self._stepped:
                self._copy = None  # nothing has happened yet: make it anew, with these

    def __call__(self, found: NonFinite) -> None:
        """Go back; called on all ranks at the end of the same backward.

        Raises:
            NonFiniteError: It is one time too many in a row, or there is no copy.
        """
        kept = self._copy
        if kept is None:
            msg = (
                f"expected a copy to go back to, found that {found} before the model that Rollback was given has been called: give it what is called to "
                "train, such as the module that is wrapped"
            )
            raise NonFiniteError(msg)
        if self._went_back:  # and no forward since: it has no input and helps the others (`join`), or is called for the same forward again
            self._restore(kept)
            return
        self._in_a_row += 1
        lost = self._step - kept.step
        self._restore(kept)
        self._went_back = True
        if self._in_a_row > self._limit:
            msg = (
                f"expected a good step after {self._limit} returns to the copy after {kept.step} steps, found that {found}: look at the batches that come "
                "after it, lower the learning rate or clip, or let every= be more; the model is in the state of the copy"
            )
            raise NonFiniteError(msg)
        self.num_rollbacks += 1
        self.last = WentBack(found, kept.step, lost, self._in_a_row)
        warnings.warn(str(self.last), RuntimeWarning, stacklevel=2)

    def close(self) -> None:
        """Forget the copy, and make no more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._copy = None

    def _before_forward(self, model: nn.Module) -> None:
        """The moment at which a step and all that follows it in the loop is over."""
        recomputes = torch._C._current_graph_task_id() != -1  # noqa: SLF001 - no public way
        if recomputes or not (model.training or torch.is_grad_enabled()):
            return
        with self._lock:
            if self._went_back and self._copy is not None:
                self._restore(self._copy)
                self._went_back = self._stepped = False
            if self._stepped:
                self._stepped = False
                self._in_a_row = 0
                self._step += 1
            if self._copy is None or self._step - self._copy.step >= self._every:
                self._make()

    def _after_step(self, *_: object) -> None:
        self._stepped = True

    def _make(self) -> None:
        if not self._optimizers:
            msg = "expected an optimizer whose steps are counted, found none: Rollback(model, optimizer, ...), or keep(optimizer) before the first forward"
            raise ConfigError(msg)
        self._copy = None  # one at a time
        params = {id(param): param for param in self._params}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                params.update((id(param), param) for param in group["params"])
        named = self._model.named_buffers(remove_duplicate=False)
        self._copy = _Copy(
            self._step,
            [(param, param.detach().clone()) for param in params.values()],
            {name: buffer.detach().clone() for name, buffer in named},
            [copy.deepcopy(one.state_dict()) for one in self._kept],
        )

    def _restore(self, kept: _Copy) -> None:
        self._step = kept.step
        with torch.no_grad():
            for param, values in kept.params:
                param.grad = None
                param.copy_(values)
            _restore_buffers(self._model, kept.buffers)
        for one, state in zip(self._kept, kept.states, strict=False):  # later ones have no copy yet
            one.load_state_dict(copy.deepcopy(state))  # owners go on changing what they are given

    def __repr__(self) -> str:
        held = "no copy yet" if self._copy is None else f"copy after {self._copy.step} steps"
        return f"Rollback(every={self._every}, limit={self._limit}; {held}, {self.num_rollbacks} returns)"


class _BeforeForward:
    """The hook on the model. A copy of the model, or one from a file, has one that does nothing."""

    def __init__(self, owner: Rollback | None = None) -> None:
        self._owner = None if owner is None else weakref.ref(owner)

    @_disable_dynamo  # torch.compiler.disable would import the compiler here, which takes a second
    def __call__(self, model: nn.Module, _args: object) -> None:
        owner = None if self._owner is None else self._owner()
        if owner is not None:
            owner._before_forward(model)  # noqa: SLF001 - its continuation

    def __reduce__(self) -> tuple[type[_BeforeForward], tuple[()]]:
        return _BeforeForward, ()


def _restore_buffers(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    for name, kept in values.items():
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        now = owner._buffers.get(leaf)  # noqa: SLF001 - a name in no other way leads to None
        if now is not None and (now.shape, now.dtype) == (kept.shape, kept.dtype):
            now.copy_(kept)
        else:  # a forward has put another one in its place
            setattr(owner, leaf, kept.clone())


def _counts(value: object) -> bool:
    return type(value) is int and value > 0
