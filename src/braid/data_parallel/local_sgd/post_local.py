"""Post-local SGD: gradients of all ranks first, then those of few or of none, and models in between.

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
from braid.data_parallel.hooks.agreement import AgreedNames, agree
from braid.data_parallel.local_sgd.averaging import ModelAverager
from braid.data_parallel.step_counts import is_whole
from braid.data_parallel.wrapped_optimizer import WrappedOptimizer
from braid.errors import ConfigError
from braid.params import GradBucket
from braid.params.grad_bucket import Steps

__all__ = ["PostLocalSGDHook", "PostLocalSGDOptimizer"]


class PostLocalSGDHook:
    """Averages gradients over all ranks until step `start`, then over `subgroup` only.

    Parameters differ from then on until somebody averages them; a small message that says which
    rank has which gradients is exchanged in every step all the same, and so are buffers, unless the
    wrapper was told `forward_sync_buffers=False`.

    Args:
        start: Reductions of a parameter over all ranks; `warmup_steps` of the averager.
        subgroup: Ranks that go on averaging gradients, such as those of one host; None for each by
            itself.

    Raises:
        ConfigError: `start` is negative or broken.
    """

    def __init__(self, start: int, subgroup: Group | None = None) -> None:
        if not is_whole(start, 0):
            msg = f"expected a whole number of steps from 0 as start, found {start!r}"
            raise ConfigError(msg)
        self.start = start
        self.subgroup = subgroup
        self._num_steps: Counter[str] = Counter()
        self._agreed = AgreedNames()

    def __call__(self, state: object, bucket: GradBucket) -> Steps:
        """Average a bucket; `state` is not looked at."""
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
        """How often each parameter has been reduced."""
        return {"steps": dict(self._num_steps)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned, on all ranks of that time; ranks that are new go on with their steps.

        Raises:
            ConfigError: It is not that.
        """
        if set(state) != {"steps"}:
            msg = (
                "expected steps, and nothing else, in the state of PostLocalSGDHook, found "
                f"{sorted(state)}"
            )
            raise ConfigError(msg)
        self._num_steps = Counter(state["steps"])
        self._agreed.clear()

    def __repr__(self) -> str:
        return f"PostLocalSGDHook({self.start}, {self.subgroup!r})"


class PostLocalSGDOptimizer(WrappedOptimizer):
    """Takes a step, then lets an averager average the parameters if it is time.

    Args:
        optim: Takes the steps.
        averager: Counts them; its count is in `state_dict` under `step`.
    """

    def __init__(self, optim: torch.optim.Optimizer, averager: ModelAverager) -> None:
        super().__init__(optim)
        self.averager = averager

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; a collective in some of them."""
        loss = self.optim.step(closure)
        self.averager.average_parameters(self.param_groups)
        return loss

    def is_own(self, name: str, tensor: torch.Tensor) -> bool:  # noqa: ARG002 - of its base
        """All are, except for trained parameters in a step in which all ranks have averaged them."""
        return not self.averager.has_just_averaged(tensor)

    def state_dict(self) -> dict[str, Any]:
        """That of the optimizer inside, and the averager's step."""
        return {**self.optim.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from it; one without the averager's step lets it begin anew, with a warning."""
        self.optim.load_state_dict(state_dict)
        if "step" not in state_dict:
            warnings.warn(
                "expected the averager's step in the state of PostLocalSGDOptimizer, found none: "
                "it begins at 0, with its warm-up",
                UserWarning,
                stacklevel=2,
            )
        self.averager.step = state_dict.get("step", 0)
