"""Post-local SGD: averages gradients of all ranks first; later of few or none, and models instead.

    averager = PeriodicModelAverager(period=4, warmup_steps=100)
    model.register_comm_hook(None, PostLocalSGDHook(start=100))
    optimizer = PostLocalSGDOptimizer(optimizer, averager)

Source: Lin, Stich, Patel, Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from braid.comm import Group, StepsBy
from braid.errors import ConfigError
from braid.parallel.data_parallel.hooks.agreement import AgreedNames, agree
from braid.parallel.data_parallel.local_sgd.averaging import ModelAverager
from braid.parallel.data_parallel.step_counts import is_whole
from braid.parallel.data_parallel.wrapped_optimizer import WrappedOptimizer
from braid.parallel.gradients import GradBucket
from braid.parallel.gradients.grad_bucket import Steps

__all__ = ["PostLocalSGDHook", "PostLocalSGDOptimizer"]


class PostLocalSGDHook:
    """Hook that averages gradients over all ranks until step `start`, then over `subgroup` only.

    Parameters differ from then on until an averager averages them. The small status message about
    gradients is still exchanged over all ranks in every step. So are buffers, unless the wrapper
    was made with `forward_sync_buffers=False`.

    Args:
        start: Number of reductions of a parameter over all ranks; `warmup_steps` of the averager.
        subgroup: Ranks that keep averaging gradients, such as all ranks of a host; None for no
            averaging.

    Raises:
        ConfigError: `start` is negative or not an integer.
    """

    def __init__(self, start: int, subgroup: Group | None = None) -> None:
        if not is_whole(start, 0):
            msg = f"start must be an integer of at least 0 (steps), got {start!r}"
            raise ConfigError(msg)
        self.start = start
        self.subgroup = subgroup
        self._num_steps: Counter[str] = Counter()
        self._agreed = AgreedNames()

    def __call__(self, state: object, bucket: GradBucket) -> Steps:
        """Average a bucket; `state` is ignored."""
        del state
        fresh = self._agreed.fresh(bucket)
        if fresh:
            counts = [self._num_steps[name] for name in fresh]
            agreed = agree("PostLocalSGDHook", bucket, fresh, counts)
            self._num_steps |= dict(zip(fresh, agreed.counts, strict=True))
        begins = min(self._num_steps[name] for name in bucket.names) < self.start
        self._num_steps.update(bucket.names)
        group = bucket.group if begins else self.subgroup
        if group is not None:
            with group.coalesce(steps_by=StepsBy.WAITER) as batch:
                batch.all_reduce(bucket.buffer(), "avg")
            yield batch.work

    def state_dict(self) -> dict[str, Any]:
        """Return the number of reductions of each parameter."""
        return {"steps": dict(self._num_steps)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of `state_dict`, on all ranks that saved it.

        New ranks continue with the counts of ranks that have loaded a state.

        Raises:
            ConfigError: The state has other keys.
        """
        if set(state) != {"steps"}:
            msg = f"state of PostLocalSGDHook must have only the key 'steps', got {sorted(state)}"
            raise ConfigError(msg)
        self._num_steps = Counter(state["steps"])
        self._agreed.clear()

    def __repr__(self) -> str:
        return f"PostLocalSGDHook({self.start}, {self.subgroup!r})"


class PostLocalSGDOptimizer(WrappedOptimizer):
    """Optimizer that calls a model averager after each of its steps.

    Args:
        optim: Inner optimizer, which takes the steps.
        averager: Averager, which counts the steps; its count is in `state_dict` under `step`.
    """

    def __init__(self, optim: torch.optim.Optimizer, averager: ModelAverager) -> None:
        super().__init__(optim)
        self.averager = averager

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step, and average the parameters in some steps, which are then collectives."""
        loss = self.optim.step(closure)
        self.averager.average_parameters(self.param_groups)
        return loss

    def is_own(self, name: str, tensor: torch.Tensor) -> bool:  # noqa: ARG002 - as in its base
        """Return whether the tensor `name` of a checkpoint may differ between ranks.

        All tensors may differ, except parameters that all ranks have averaged in the last step.
        """
        return not self.averager.has_just_averaged(tensor)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner optimizer, and the averager's step."""
        return {**self.optim.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; if it lacks the key `step`, warn, and count the averager's steps from 0."""
        self.optim.load_state_dict(state_dict)
        if "step" not in state_dict:
            warnings.warn(
                "the state of PostLocalSGDOptimizer lacks the key 'step', so averaging starts "
                "again with its warm-up steps",
                UserWarning,
                stacklevel=2,
            )
        self.averager.step = state_dict.get("step", 0)
