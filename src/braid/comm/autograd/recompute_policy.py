"""Policies of recomputation: which operators' results are kept, and which are computed again.

`checkpoint(f, x)` keeps nothing but x. With a policy it also keeps the results of some operators,
such as matrix products, so that only the cheap operators between them run again:

    checkpoint(f, x)                          keeps x            all of f runs again
    checkpoint(f, x, policy=MATMULS)          x, products        all but products runs again

A policy is a function `policy(context, operator, *args, **kwargs)` that returns a
`CheckpointPolicy`, or a list of operators to keep. torch's dispatch modes do the work.

Three kinds of operators always run again: operators that change an argument in place, and operators
that draw random numbers, which advance the generator, because a kept result alone does not have
their effect; and operators that return memory to be filled, because others fill it in place.

Source: torch.utils.checkpoint.create_selective_checkpoint_contexts (PyTorch 2.4 and later); Chen,
Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost" (2016), section 3: "drop the
results of low cost operations".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from braid.errors import ConfigError
from braid.runtime.torch_internals import (
    OpOverload,
    OpOverloadPacket,
    changes_arguments,
    draws_numbers,
)

__all__ = ["MATMULS", "CheckpointPolicy", "RecomputePolicy", "check_policy", "contexts_of"]

RecomputePolicy = Callable[..., CheckpointPolicy | bool] | Sequence[OpOverload]

ATTENTION = "_scaled_dot_product"
NAMES = (
    *("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution", "_scaled_mm"),
    *(f"{ATTENTION}_{kind}_attention" for kind in ("flash", "efficient", "cudnn")),
    f"{ATTENTION}_flash_attention_for_cpu",
)
# matrix products, convolutions and attention: the operators that take most of the time
MATMULS: tuple[OpOverload, ...] = tuple(
    getattr(torch.ops.aten, name).default for name in NAMES if hasattr(torch.ops.aten, name)
)
# torch accepts offloading to the CPU, but only its compiler does it
ALLOWED = ("MUST_SAVE", "PREFER_SAVE", "MUST_RECOMPUTE", "PREFER_RECOMPUTE")


def check_policy(policy: object) -> None:
    """Check a policy.

    Raises:
        ConfigError: It is not a function or a list of operators.
    """
    if callable(policy):
        return
    wrong = policy if isinstance(policy, list | tuple) else [policy]
    wrong = [op for op in wrong if not isinstance(op, OpOverload)]
    packets = [f"{op}.default" for op in wrong if isinstance(op, OpOverloadPacket)]
    if wrong:
        advice = f": use {', '.join(packets)}" if packets else ""
        msg = (
            "a policy of recomputation must be a function that returns one of "
            f"{', '.join(ALLOWED)}, or a list of operators to save, such as "
            f"[torch.ops.aten.mm.default], got {', '.join(map(repr, wrong))}{advice}"
        )
        raise ConfigError(msg)


def contexts_of(
    policy: RecomputePolicy,
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return two context managers: for a forward that keeps results, and for its recomputation.

    Args:
        policy: Policy, called for each operator of the forward.

    Raises:
        ConfigError: The policy is neither a function nor a list of operators; inside of the
            context, it returns something else than a `CheckpointPolicy`.
    """
    check_policy(policy)
    saved = frozenset() if callable(policy) else frozenset(policy)

    def decide(context: Any, op: OpOverload, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if changes_arguments(op) or draws_numbers(op, args, kwargs) or "empty" in str(op):
            return CheckpointPolicy.MUST_RECOMPUTE
        if not callable(policy):
            keeps: Any = op in saved
        else:
            keeps = policy(context, op, *args, **kwargs)
        if isinstance(keeps, bool):  # as in torch
            keeps = CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE
        if isinstance(keeps, CheckpointPolicy) and keeps.name in ALLOWED:
            return keeps
        msg = f"the policy of recomputation returned {keeps!r} for {op}: return one of "
        raise ConfigError(msg + ", ".join(ALLOWED))

    saving, loading = create_selective_checkpoint_contexts(decide)  # type: ignore[no-untyped-call]
    # The hooks around it are braid's, which save inputs of the recomputation. Torch's `checkpoint`
    # sets this attribute too; without it, torch 2.14.1 warns about each of these hooks.
    saving.respect_saved_tensors_hooks = False
    return saving, _Loading(loading)


class _Loading(AbstractContextManager[None]):
    """Context of a recomputation, which can be entered several times."""

    def __init__(self, mode: Any) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        self._mode.__enter__()

    def __exit__(self, *error: object) -> None:
        self._mode.__exit__(*error)
        if isinstance(error[1], RuntimeError) and "has been mutated" in str(error[1]):
            msg = (
                "a result that the policy of recomputation has saved was changed in place later: "
                "do not save results of this operator, or remove the change (such as inplace=True)"
            )
            raise ConfigError(msg) from error[1]
