"""Local backwards that call hooks on gradients of parameters, such as those of data parallelism.

Problem: gradients belong to a context, not to `.grad`, so `torch.autograd.grad` computes them. It
calls no hook that runs after a gradient has been accumulated, and data parallelism averages there.

Idea: where a parameter has such a hook, a local backward accumulates into `.grad` as usual, which
is the context's for that time: it begins with what the context has, and is put back afterwards.
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
    "hook_groups",
    "in_own_memory",
    "run_hooks",
]


class ParamLocks:
    """A lock for each parameter: an optimizer or a local backward uses its `.grad`, not both."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks = WeakTensorKeyDictionary()

    @contextlib.contextmanager
    def held(self, params: Sequence[torch.Tensor]) -> Iterator[None]:
        """Hold the locks of some parameters, in one order for all who do."""
        with self._guard:
            for p in params:
                if p not in self._locks:
                    self._locks[p] = threading.Lock()
            locks = {id(p): self._locks[p] for p in params}
        with contextlib.ExitStack() as stack:
            for key in sorted(locks):
                stack.enter_context(locks[key])
            yield


PARAM_LOCKS = ParamLocks()


@dataclass(slots=True, eq=False)
class HookGroup:
    """Hook that does nothing and marks parameters: a hook of one may set `.grad` of all of them.

    Attributes:
        members: The parameters.
        is_early: Whether the hooks do not wait for a second local backward of the same backward.
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
    """Let local backwards of contexts call the hooks that run after an accumulation.

    Hooks of `register_post_accumulate_grad_hook`, so those of braid's DistributedDataParallel, are
    called without this. It is needed where hooks cannot be seen from Python:

        dist_autograd.run_hooks(ddp.parameters())       torch's DistributedDataParallel

    Args:
        parameters: Parameters of this node. A hook of one of them may change the gradients of all:
            data parallelism averages a bucket in the backward that completes the bucket.
        is_early: Whether the hooks count on one local backward that reaches all parameters, as in
            torch's DistributedDataParallel with `static_graph` or `find_unused_parameters`. If a
            remote call lies between the parameters, the backward fails then. Of several calls with
            the same parameters, the last one decides.

    Cost: local backwards that reach one of them copy the gradients of all once more, and come one
    after the other.
    """
    params = [each for each in parameters if each.requires_grad]
    known = (group for group in hook_groups(params[:1]) if group.consists_of(params))
    group = next(known, None)
    if group is None:
        group = HookGroup(tuple(map(weakref.ref, params)))
        for each in params:
            _remove_dead_groups(each)
            each.register_post_accumulate_grad_hook(group)  # type: ignore[no-untyped-call]
    group.is_early = is_early


def _remove_dead_groups(param: torch.Tensor) -> None:
    """Remove groups that lack a parameter now: their owner averages nothing any more."""
    hooks = accumulate_hooks(param) or {}
    for key, hook in list(hooks.items()):
        if isinstance(hook, HookGroup) and any(ref() is None for ref in hook.members):
            del hooks[key]


def has_hooks(leaf: torch.Tensor) -> bool:
    """Whether a hook is to run after a gradient of a leaf has been accumulated."""
    return bool(accumulate_hooks(leaf))


def hook_groups(leaves: Sequence[torch.Tensor]) -> set[HookGroup]:
    """Return the groups to which some leaves belong."""
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
        anchors: Leaves of receives, likewise.
        known: Gradients that the context has.
        hooked: `.grad` after earlier local backwards of the same backward, which may be memory of
            the hooks' owner; this call adds its own.
        keeps: Whether the graph is kept.
    """
    members = {id(each): each for each in leaves}
    for group in hook_groups(leaves):
        members |= {id(each): each for ref in group.members if (each := ref()) is not None}
    changed = list(members.values())
    with PARAM_LOCKS.held(changed):
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
    """Return gradients that programs may change in place, such as by clipping.

    Autograd returns one tensor for several leaves, and expanded ones. A gradient that shares
    memory, also with `others`, or elements of its memory, is copied.
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
