"""An optimizer for parameters that live in several nodes.

    optimizer = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.1)
    scheduler = optimizer.schedule(torch.optim.lr_scheduler.StepLR, step_size=10)
    optimizer.step(context_id)
    scheduler.step()

Each node that owns parameters has an optimizer of torch for them, which steps with the gradients of
a context. Steps on the same parameters run sequentially; steps on different parameters do not wait
for each other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from braid.errors import ConfigError
from braid.rpc import optimizer_checkpoints
from braid.rpc.api import remote
from braid.rpc.autograd.accumulation import PARAM_LOCKS, held
from braid.rpc.current import current_agent
from braid.rpc.names import register
from braid.rpc.references import RRef, call_methods

__all__ = ["DistributedOptimizer", "DistributedScheduler"]

MakeOptimizer = Callable[..., torch.optim.Optimizer]
MakeScheduler = Callable[..., torch.optim.lr_scheduler.LRScheduler]


@register
class _LocalOptimizer:
    """The optimizer of one node's parameters."""

    def __init__(self, make: MakeOptimizer, groups: list[dict[str, Any]], **kwargs: Any) -> None:
        local = [
            {**group, "params": [item.local_value() for item in group["params"]]}
            for group in groups
        ]
        params = [p for group in local for p in group["params"]]
        if len(set(params)) < len(params):
            msg = (
                "two references point to one parameter, which would be updated twice: pass one "
                "reference per parameter, also if layers share it"
            )
            raise ConfigError(msg)
        self.optimizer = make(local, **kwargs)
        self.params = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.locks = PARAM_LOCKS.of(self.params)
        self.schedulers: list[torch.optim.lr_scheduler.LRScheduler] = []

    def step(self, context_id: int, scale: float = 1.0) -> None:
        """Step with the gradients of a context, multiplied by `scale`."""
        gradients = current_agent().contexts.get(context_id).gradients
        with held(self.locks):
            kept = [p.grad for p in self.params]
            for p in self.params:
                grad = gradients.get(p)
                p.grad = grad if grad is None or scale == 1.0 else grad * scale
            try:
                self.optimizer.step()
            finally:
                for p, grad in zip(self.params, kept, strict=True):
                    p.grad = grad

    def square_norm(self, context_id: int) -> float:
        """Return the sum of the squares of a context's gradients."""
        gradients = current_agent().contexts.get(context_id).gradients
        grads = [gradients[p] for p in self.params if p in gradients]
        return float(
            sum(
                g.coalesce().values().double().pow(2).sum()
                if g.is_sparse
                else g.double().pow(2).sum()
                for g in grads
            )
        )

    def settings(self) -> list[dict[str, Any]]:
        """Return the settings of the parameter groups."""
        return [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]

    def set(self, group: int, name: str, value: Any) -> None:
        """Change the setting `name`, such as `lr`, of a parameter group."""
        self.optimizer.param_groups[group][name] = value

    def schedule(self, make: MakeScheduler, kwargs: dict[str, Any]) -> int:
        """Make a learning rate scheduler, by `make(optimizer, **kwargs)`; return its number."""
        self.schedulers.append(make(self.optimizer, **kwargs))
        return len(self.schedulers) - 1

    def schedule_step(self, number: int, args: Sequence[Any]) -> list[float]:
        """Step the scheduler with a number; return the learning rates of the groups."""
        with held(self.locks):
            self.schedulers[number].step(*args)
        return self.learning_rates(number)

    def learning_rates(self, number: int) -> list[float]:
        """Return the learning rates that the scheduler with a number has set."""
        return [float(rate) for rate in self.schedulers[number].get_last_lr()]

    def schedule_state(self, number: int) -> dict[str, Any]:
        """Return the state of the scheduler with a number."""
        return self.schedulers[number].state_dict()

    def schedule_load(self, number: int, state: dict[str, Any]) -> None:
        """Load the state of the scheduler with a number."""
        self.schedulers[number].load_state_dict(state)

    def export(self) -> optimizer_checkpoints.Part:
        """Return parameters, their states and the settings of their groups."""
        with held(self.locks):
            return optimizer_checkpoints.Part(
                [p.detach().clone() for p in self.params],
                [dict(self.optimizer.state.get(p, {})) for p in self.params],
                self.settings(),
            )

    def shapes(self) -> list[list[int]]:
        """Return the shapes of the parameters."""
        return [list(p.shape) for p in self.params]

    def restore(self, part: optimizer_checkpoints.Part) -> None:
        """Load the result of `export`."""
        with held(self.locks), torch.no_grad():
            groups = self.optimizer.state_dict()["param_groups"]
            groups = [{**old, **new} for old, new in zip(groups, part.settings, strict=True)]
            states = {n: state for n, state in enumerate(part.states) if state}
            self.optimizer.load_state_dict({"state": states, "param_groups": groups})
            for param, value in zip(self.params, part.params, strict=True):
                param.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state."""
        with held(self.locks):
            self.optimizer.load_state_dict(state)


@register
def _make(make: MakeOptimizer, groups: list[dict[str, Any]], kwargs: dict[str, Any]) -> Any:
    return _LocalOptimizer(make, groups, **kwargs)


class DistributedOptimizer:
    """Steps parameters in the nodes that own them.

    Args:
        optimizer_class: An optimizer of torch, or a class that works like one, which all owners can
            find by name.
        params_rref: References to parameters, or groups: dictionaries with `params` and settings.
        args: Settings of all groups, in the order of the optimizer's own arguments.
        kwargs: Settings by name.

    Raises:
        ConfigError: There are no references, or two to one parameter.
        Exception: Exception of the optimizer's constructor, with its original type.
    """

    def __init__(
        self,
        optimizer_class: MakeOptimizer,
        params_rref: Sequence[RRef] | Sequence[dict[str, Any]],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        groups = [item if isinstance(item, dict) else {"params": [item]} for item in params_rref]
        if not any(isinstance(item, dict) for item in params_rref):
            groups = [{"params": list(params_rref)}]
        if not any(group["params"] for group in groups):
            msg = (
                "DistributedOptimizer got an empty list: pass at least one reference to a parameter"
            )
            raise ConfigError(msg)
        kwargs = {**_named(optimizer_class, args), **kwargs}
        by_owner: dict[int, list[dict[str, Any]]] = {}
        for number, group in enumerate(groups):
            for rref in group["params"]:
                owner_groups = by_owner.setdefault(
                    rref.owner().id, [{**g, "params": []} for g in groups]
                )
                owner_groups[number]["params"].append(rref)
        self._num_groups = len(groups)
        every = [rref.owner().id for group in groups for rref in group["params"]]
        self._positions = {  # places of each owner's parameters among all
            owner: [n for n, number in enumerate(every) if number == owner] for owner in by_owner
        }
        self._owners: dict[int, list[int]] = {}  # places of each owner's groups among all
        made = {}
        for owner, owner_groups in by_owner.items():
            self._owners[owner] = [n for n, group in enumerate(owner_groups) if group["params"]]
            filled = [group for group in owner_groups if group["params"]]
            made[owner] = remote(owner, _make, (optimizer_class, filled, kwargs))
        for rref in made.values():
            rref._get_type()  # noqa: SLF001 - raises the constructor's exception
        self._optimizers = made

    def step(self, context_id: int, *, max_norm: float | None = None) -> float | None:
        """Step with the gradients of a context, in all nodes at the same time.

        Args:
            context_id: Context with a finished backward.
            max_norm: Largest norm of all gradients together; larger ones are scaled down to it.

        Returns:
            The norm before scaling; None without `max_norm`.

        Raises:
            Exception: Exception of a step, raised after all other steps have ended.
        """
        scale, norm = 1.0, None
        if max_norm is not None:
            squares = self._each("square_norm", context_id)
            norm = sum(squares) ** 0.5
            scale = min(1.0, max_norm / (norm + 1e-6))
        self._each("step", context_id, scale)
        return norm

    def zero_grad(self) -> None:
        """Do nothing, for training loops that call it: gradients end with their context."""

    def set(self, name: str, value: Any, group: int | None = None) -> None:
        """Change the setting `name`, such as `lr`, of the group `group`, or of all groups."""
        calls = []
        for owner, places in self._owners.items():
            for place, number in enumerate(places):
                if group in {None, number}:
                    proxy = self._optimizers[owner].rpc_async()
                    calls.append(proxy.set(place, name, value))
        torch.futures.wait_all(calls)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all nodes, by the name of the node."""
        names = [rref.owner_name() for rref in self._optimizers.values()]
        return dict(zip(names, self._each("state_dict"), strict=True))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the states of all nodes.

        Raises:
            ConfigError: The states do not have the names of this optimizer's nodes.
        """
        names = {rref.owner_name(): rref for rref in self._optimizers.values()}
        if names.keys() != state.keys():
            msg = (
                f"the state was saved on nodes {sorted(state)}, but the parameters are on "
                f"{sorted(names)}: load it into an optimizer with parameters on the same nodes"
            )
            raise ConfigError(msg)
        torch.futures.wait_all(
            [rref.rpc_async().load_state_dict(state[name]) for name, rref in names.items()]
        )

    def schedule(self, make: MakeScheduler, **kwargs: Any) -> DistributedScheduler:
        """Return a scheduler of torch that changes the learning rates in all nodes.

        Args:
            make: Class of the scheduler, or a function of the optimizer.
            kwargs: Settings of the scheduler.
        """
        (number, *_) = self._each("schedule", make, kwargs)
        return DistributedScheduler(self, number)

    def save(
        self, directory: str | os.PathLike[str], step: int, *, keep: int | None = None
    ) -> Path:
        """Write the parameters and optimizer states of all nodes as a checkpoint.

        Args:
            directory: Directory of checkpoints.
            step: Number of completed steps.
            keep: Number of checkpoints to keep, this one included; all when None.

        Cost: all bytes are sent to this node once.

        Raises:
            CheckpointError: The checkpoint cannot be written; earlier checkpoints are unchanged.
        """
        parts = dict(zip(self._optimizers, self._each("export"), strict=True))
        return optimizer_checkpoints.write(
            directory,
            [(self._positions[owner], self._owners[owner], part) for owner, part in parts.items()],
            step=step,
            keep=keep,
        )

    def load(self, directory: str | os.PathLike[str]) -> int:
        """Load parameters and optimizer states from the last checkpoint; return its step.

        Parameters are identified by their position in `params_rref`, so they may be on other nodes.

        Raises:
            CheckpointError: No checkpoint exists, or it is damaged or has other parameters; nothing
                is changed.
        """
        places = [(self._positions[owner], self._owners[owner]) for owner in self._optimizers]
        step, parts = optimizer_checkpoints.read(
            directory, places, self._num_groups, self._each("shapes")
        )
        torch.futures.wait_all(
            [
                rref.rpc_async().restore(part)
                for rref, part in zip(self._optimizers.values(), parts, strict=True)
            ]
        )
        return step

    def _each(self, method: str, *args: Any) -> list[Any]:
        """Call a method of all nodes' optimizers at the same time; raise after all have ended."""
        outcomes = call_methods(list(self._optimizers.values()), method, args)
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        return [outcome.value for outcome in outcomes]


class DistributedScheduler:
    """A scheduler of torch for each node's part of a `DistributedOptimizer`, made by `schedule`."""

    def __init__(self, optimizer: DistributedOptimizer, number: int) -> None:
        self._optimizer = optimizer
        self._number = number

    def step(self, *args: Any) -> None:
        """Step the schedulers; arguments are passed to their `step`, such as a metric."""
        self._each("schedule_step", list(args))

    def get_last_lr(self) -> list[float]:
        """Return the learning rates of the groups."""
        rates = self._each("learning_rates")
        owners = self._optimizer._owners.values()  # noqa: SLF001 - of this module
        by_group = {
            group: rate
            for groups, owner_rates in zip(owners, rates, strict=True)
            for group, rate in zip(groups, owner_rates, strict=True)
        }
        return [by_group[group] for group in sorted(by_group)]

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state, which is the same on all nodes."""
        state: dict[str, Any] = self._each("schedule_state")[0]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state in all nodes."""
        self._each("schedule_load", state)

    def _each(self, method: str, *args: Any) -> list[Any]:
        return self._optimizer._each(method, self._number, *args)  # noqa: SLF001 - of this module


def _named(make: MakeOptimizer, args: Sequence[Any]) -> dict[str, Any]:
    """Return positional settings by name."""
    import inspect  # noqa: PLC0415 - only where settings are given by place

    if not args:
        return {}
    names = list(inspect.signature(make).parameters)[1:]
    return dict(zip(names, args, strict=False))
