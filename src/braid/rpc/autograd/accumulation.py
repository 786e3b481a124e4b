"""Local backwards that call hooks on parameters' gradients, as data parallelism needs.

Problem: gradients belong to a context, not to `.grad`, so `torch.autograd.grad` computes them. It
calls no hook that runs after a gradient has been accumulated, and data parallelism averages there.

Idea: if a parameter has such a hook, `.grad` is set to the context's gradient for the time of the
local backward, which accumulates into it as usual. Afterwards the program's `.grad` is restored.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from braid.runtime.torch_internals import accumulate_hooks, has_internal_overlap, storage_id

__all__ = [
    "PARAM_LOCKS",
    "HookGroup",
    "accumulated",
    "has_hooks",
    "held",
    "hook_groups",
    "in_own_memory",
    "run_hooks",
]


class ParamLocks:
    """Locks of parameters, so that one optimizer or local backward at a time uses `.grad`."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks = WeakTensorKeyDictionary()

    def of(self, params: Sequence[torch.Tensor]) -> list[threading.Lock]:
        """Return the locks of parameters, in the order in which all callers acquire them."""
        with self._guard:
            for p in params:
                if p not in self._locks:
                    self._locks[p] = threading.Lock()
            locks = {id(p): self._locks[p] for p in params}
        return [locks[key] for key in sorted(locks)]


PARAM_LOCKS = ParamLocks()


@contextlib.contextmanager
def held(locks: Sequence[threading.Lock]) -> Iterator[None]:
    """Hold locks of parameters in the block."""
    with contextlib.ExitStack() as stack:
        for lock in locks:
            stack.enter_context(lock)
        yield


@dataclass(slots=True, eq=False)
class HookGroup:
    """Marks parameters that belong together: a hook of one may set `.grad` of all of them.

    Attributes:
        members: The parameters; this object is registered as a hook of each one.
        is_early: Whether one local backward must reach all parameters, see `run_hooks`.
    """

    members: tuple[weakref.ref[torch.Tensor], ...]
    is_early: bool = False

    def consists_of(self, params: Sequence[torch.Tensor]) -> bool:
        """Return whether the members are these parameters, in this order."""
        return len(self.members) == len(params) and all(
            ref() is param for ref, param in zip(self.members, params, strict=True)
        )

    def __call__(self, _param: torch.Tensor) -> None:
        """Do nothing."""


def run_hooks(parameters: Iterable[torch.Tensor], *, is_early: bool = False) -> None:
    """Make local backwards of contexts call the parameters' hooks that run after accumulation.

    Hooks of `register_post_accumulate_grad_hook`, such as the hooks of braid's
    DistributedDataParallel, are called anyway. Call this function for hooks in C++:

        dist_autograd.run_hooks(ddp.parameters())       torch's DistributedDataParallel

    Args:
        parameters: Parameters of this node. A hook of one of them may change the gradients of all:
            data parallelism averages a bucket in the backward that completes the bucket.
        is_early: Whether the hooks count on one local backward that reaches all parameters, as in
            torch's DistributedDataParallel with `static_graph` or `find_unused_parameters`. If it
            is True and a remote call lies between the parameters, the backward fails. The last
            call with the same parameters decides.

    Cost: a local backward that reaches one of the parameters copies the gradients of all once more;
    such backwards run sequentially.
    """
    params = [param for param in parameters if param.requires_grad]
    known = (group for group in hook_groups(params[:1]) if group.consists_of(params))
    group = next(known, None)
    if group is None:
        group = HookGroup(tuple(map(weakref.ref, params)))
        for param in params:
            _remove_dead_groups(param)
            param.register_post_accumulate_grad_hook(group)  # type: ignore[no-untyped-call]
    group.is_early = is_early


def _remove_dead_groups(param: torch.Tensor) -> None:
    """Remove groups with a collected parameter, which their owner no longer averages."""
    hooks = accumulate_hooks(param) or {}
    for key, hook in list(hooks.items()):
        if isinstance(hook, HookGroup) and any(ref() is None for ref in hook.members):
            del hooks[key]


def has_hooks(leaf: torch.Tensor) -> bool:
    """Return whether a leaf has a hook that runs after accumulation of its gradient."""
    return bool(accumulate_hooks(leaf))


def hook_groups(leaves: Sequence[torch.Tensor]) -> set[HookGroup]:
    """Return the groups of parameters that contain one of the leaves."""
    hooks = [hook for leaf in leaves for hook in (accumulate_hooks(leaf) or {}).values()]
    return {hook for hook in hooks if isinstance(hook, HookGroup)}


def accumulated(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    leaves: Sequence[torch.Tensor],
    anchors: Sequence[torch.Tensor],
    known: Mapping[torch.Tensor, torch.Tensor],
    hooked: dict[torch.Tensor, torch.Tensor | None],
    *,
    keeps: bool,
) -> dict[torch.Tensor, torch.Tensor | None]:
    """Run a local backward that calls hooks, and return all gradients that it may have changed.

    Args:
        pairs: Tensors, and the gradients from which the backward begins.
        leaves: Leaves on which the tensors depend.
        anchors: Leaves on which the tensors depend, and which represent received messages.
        known: Gradients that the context has so far.
        hooked: `.grad` of each parameter after earlier local backwards of the same backward, which
            may be memory of the module with the hooks; this call updates it.
        keeps: Whether the graph is kept.
    """
    members = {id(member): member for member in leaves}
    for group in hook_groups(leaves):
        members |= {id(member): member for ref in group.members if (member := ref()) is not None}
    changed = list(members.values())
    with held(PARAM_LOCKS.of(changed)):
        before = [(leaf, leaf.grad, _copied(leaf.grad)) for leaf in changed]
        for leaf in changed:
            leaf.grad = hooked[leaf] if leaf in hooked else _copied(known.get(leaf))
        try:
            torch.autograd.backward(
                [tensor for tensor, _ in pairs],
                [grad for _, grad in pairs],
                retain_graph=keeps,
                inputs=[*leaves, *anchors],
            )
            hooked.update({leaf: leaf.grad for leaf in changed})
            return {leaf: _copied(leaf.grad) for leaf in changed}
        finally:
            for leaf, grad, values in before:
                leaf.grad = grad
                if grad is not None and values is not None:  # hooks may have used its memory
                    grad.detach().copy_(values)


def in_own_memory(
    grads: Sequence[torch.Tensor | None], others: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Return gradients in separate memory, so that programs can change them in place.

    Autograd may return one tensor for several leaves, or expanded tensors. These gradients are
    copied, and also gradients that share memory with `others`.
    """
    taken = {storage_id(x.untyped_storage()) for x in others if _has_storage(x)}
    result: list[torch.Tensor | None] = []
    for grad in grads:
        if not _has_storage(grad):
            result.append(grad)
            continue
        memory = storage_id(grad.untyped_storage())
        is_shared = memory in taken or has_internal_overlap(grad) != 0
        result.append(grad.clone(memory_format=torch.contiguous_format) if is_shared else grad)
        taken.add(memory)
    return result


def _has_storage(x: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    return x is not None and x.layout == torch.strided


def _copied(grad: torch.Tensor | None) -> torch.Tensor | None:
    return None if grad is None else grad.detach().clone()
