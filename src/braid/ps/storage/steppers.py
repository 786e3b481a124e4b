"""Optimizers of a dense shard behind one interface: a rule, or a torch optimizer.

A stepper owns the optimizer's state but not the values, which the storage may move to other memory.
Both kinds export their state under the same names:

    state.<name>     a value per element, shape [n]; or one for the shard, shape []
    scalar.<name>    a value that a torch optimizer keeps as int or float, shape []
    lr               learning rate, shape []
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from braid.errors import ConfigError
from braid.parallel.gradients.optimizer_kinds import kind_of_optimizer, refusal_of_optimizer
from braid.ps.storage.checks import Expected, check_names, described
from braid.ps.storage.rules import Rule
from braid.ps.storage.storage import State

__all__ = [
    "ADVICE",
    "MakeOptimizer",
    "RuleStepper",
    "Stepper",
    "TorchStepper",
    "allocate",
    "stepper_of",
]

MakeOptimizer: TypeAlias = Callable[[list[nn.Parameter]], Optimizer]
ADVICE = "Load the export of a table with the same kind of optimizer"


class Stepper(ABC):
    """Steps a flat vector, and keeps the optimizer's state."""

    @abstractmethod
    def step(self, values: torch.Tensor, grad: torch.Tensor) -> None:
        """Step values in place with a gradient, which is not modified; both have shape [n]."""

    @abstractmethod
    def export(self) -> State:
        """Return a copy of the state."""

    @abstractmethod
    def check(self, state: Mapping[str, torch.Tensor]) -> None:
        """Check a state for `load`.

        Raises:
            ConfigError: Names, dtypes or shapes do not fit.
        """

    @abstractmethod
    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace the state by a copy of a checked one."""

    @property
    @abstractmethod
    def lr(self) -> float:
        """Learning rate."""

    @abstractmethod
    def set_lr(self, lr: float) -> None:
        """Change the learning rate.

        Raises:
            ConfigError: The rate is out of range.
        """

    @abstractmethod
    def check_lr(self, lr: float) -> None:
        """Check a learning rate before it is announced to other nodes; see `set_lr`."""


def stepper_of(table: str, values: torch.Tensor, rule: Rule | MakeOptimizer) -> Stepper:
    """Return the stepper for a rule, or for a function that returns a torch optimizer.

    Raises:
        ConfigError: The optimizer is not elementwise.
    """
    if isinstance(rule, Rule):
        return RuleStepper(table, values, rule)
    return TorchStepper(table, values, rule)


def allocate(rule: Rule, shape: tuple[int, int], dtype: torch.dtype) -> State:
    """Return the columns of a rule's state for new rows.

    Args:
        rule: The rule.
        shape: Number of rows, and elements of a row.
        dtype: Dtype of columns other than counts.
    """
    rows, dim = shape
    return {
        name: torch.full(
            (rows, dim if column.per_element else 1),
            column.fill,
            dtype=torch.int64 if column.counts else dtype,
        )
        for name, column in rule.columns.items()
    }


class RuleStepper(Stepper):
    """Applies a table's update rule to a flat vector, as if the vector were one row.

    Args:
        table: Name of the table, for messages.
        values: Vector with the length and dtype to step.
        rule: The rule.

    Raises:
        ConfigError: The rule is not elementwise.
    """

    def __init__(self, table: str, values: torch.Tensor, rule: Rule) -> None:
        if not rule.by_elements:
            msg = (
                f"table {table!r}: {type(rule).__name__} needs whole rows, but servers may divide "
                "a dense table anywhere. Use another rule such as Adagrad, or a sparse table"
            )
            raise ConfigError(msg)
        self._table = table
        self._rule = rule
        self._dtype = torch.promote_types(values.dtype, torch.float32)
        self._state = allocate(rule, (1, len(values)), self._dtype)

    def step(self, values: torch.Tensor, grad: torch.Tensor) -> None:
        """Step `values` in place with their gradient; see `Stepper.step`."""
        rows = values.to(self._dtype)  # the same memory unless the table has half precision
        self._rule.step(rows[None], grad.to(self._dtype)[None], self._state)
        if rows is not values:
            values.copy_(rows)

    def export(self) -> State:
        """Return a copy of the optimizer's state; see `Stepper.export`."""
        lr = torch.tensor(self.lr, dtype=torch.float64)
        state = {f"state.{name}": self._part(name).clone() for name in self._state}
        return {**state, "lr": lr}

    def check(self, state: Mapping[str, torch.Tensor]) -> None:
        """Check a state for `load`; see `Stepper.check`."""
        check_names(self._table, state, [*(f"state.{name}" for name in self._state), "lr"])
        problems = []
        for name in self._state:
            part, tensor = self._part(name), state[f"state.{name}"]
            expected = Expected(f"state.{name}", part.dtype, tuple(part.shape))
            if expected.differs(tensor):
                problems.append(f"expected {expected.name} {expected}, got {described(tensor)}")
        if problems:
            msg = (
                f"table {self._table!r}: the state does not match the table: "
                f"{'; '.join(problems)}. {ADVICE}"
            )
            raise ConfigError(msg)
        self._rule.with_learning_rate(float(state["lr"]))

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace the optimizer's state by a copy of `state`; see `Stepper.load`."""
        for name in self._state:
            self._part(name).copy_(state[f"state.{name}"])
        self.set_lr(float(state["lr"]))

    @property
    def lr(self) -> float:
        """Learning rate; see `Stepper.lr`."""
        return self._rule.learning_rate

    def set_lr(self, lr: float) -> None:
        """Change the learning rate; see `Stepper.set_lr`."""
        self._rule = self._rule.with_learning_rate(lr)

    def check_lr(self, lr: float) -> None:
        """Check a learning rate; see `Stepper.check_lr`."""
        self._rule.with_learning_rate(lr)

    def _part(self, name: str) -> torch.Tensor:
        """Return a view of a named state: shape [n] with a value per element, else []."""
        column = self._state[name]
        return column[0] if self._rule.columns[name].per_element else column[0, 0]


class TorchStepper(Stepper):
    """Steps a flat vector with a torch optimizer.

    Args:
        table: Name of the table, for messages.
        values: Vector with the length and dtype to step.
        make: Returns the optimizer of a list with one parameter.

    Raises:
        ConfigError: The optimizer is not known to be elementwise, or has several parameter groups.
    """

    def __init__(self, table: str, values: torch.Tensor, make: MakeOptimizer) -> None:
        self._table = table
        self._param = nn.Parameter(values.detach())
        self._optimizer = self._checked(make([self._param]))

    def _checked(self, optimizer: object) -> Optimizer:
        if not isinstance(optimizer, Optimizer):
            kind = type(optimizer).__name__
            msg = (
                f"table {self._table!r}: the given function returned a {kind}, not an optimizer: "
                "pass a rule of braid.ps.storage, or a function such as "
                "partial(torch.optim.SGD, lr=0.1)"
            )
            raise ConfigError(msg)
        name, kind = type(optimizer).__name__, kind_of_optimizer(optimizer)
        reason = refusal_of_optimizer(optimizer)
        if reason is None and kind == "whole":
            reason = "it uses the shape or the norm of a whole parameter"
        if reason is None and kind == "unknown":
            reason = "it is not known to change each element separately"
        if reason is not None:
            msg = (
                f"table {self._table!r}: servers divide a table, so its optimizer must change each "
                f"element separately. {name} does not: {reason}. Use a class of torch.optim, such "
                "as SGD or AdamW, and change it by its options and hooks"
            )
            raise ConfigError(msg)
        for group in optimizer.param_groups:
            if group.get("foreach", True) is None:  # torch would look at all devices in each step
                group["foreach"] = False  # as torch chooses on the CPU
        groups = [len(group["params"]) for group in optimizer.param_groups]
        if groups != [1]:
            msg = (
                f"table {self._table!r}: the optimizer must have one group with the single "
                f"parameter that the function gets, but has groups of {groups} parameters"
            )
            raise ConfigError(msg)
        return optimizer

    def step(self, values: torch.Tensor, grad: torch.Tensor) -> None:
        """Step `values` in place with their gradient; see `Stepper.step`."""
        self._param.data = values
        self._param.grad = grad
        self._optimizer.step()
        self._param.grad = None

    def export(self) -> State:
        """Return a copy of the optimizer's state; see `Stepper.export`."""
        state: State = {"lr": torch.tensor(self.lr, dtype=torch.float64)}
        for name, value in self._optimizer.state[self._param].items():
            if isinstance(value, torch.Tensor):
                state[f"state.{name}"] = value.detach().clone()
            elif value is not None:
                dtype = torch.float64 if isinstance(value, float) else torch.int64
                state[f"scalar.{name}"] = torch.tensor(value, dtype=dtype)
        return state

    def check(self, state: Mapping[str, torch.Tensor]) -> None:
        """Check a state for `load`; see `Stepper.check`."""
        problems = [] if "lr" in state else ["it lacks lr"]
        for name, value in state.items():
            if not name.startswith(("state.", "scalar.")):
                if name != "lr":
                    problems.append(f"it has the unknown {name}")
            elif value.shape not in {self._param.shape, torch.Size()}:
                length = len(self._param)
                problems.append(
                    f"expected {name} of shape [{length}] or [], got {described(value)}"
                )
        if problems:
            msg = (
                f"table {self._table!r}: the state does not match the table: "
                f"{'; '.join(problems)}. {ADVICE}"
            )
            raise ConfigError(msg)

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace the optimizer's state by a copy of `state`; see `Stepper.load`."""
        optimizer_state: dict[str, Any] = {}
        for key, value in state.items():
            kind, _, name = key.partition(".")
            if kind == "state":
                optimizer_state[name] = value.detach().clone()
            elif kind == "scalar":
                optimizer_state[name] = value.item()
        self._optimizer.state.clear()
        if optimizer_state:
            self._optimizer.state[self._param] = optimizer_state
        self.set_lr(float(state["lr"]))

    @property
    def lr(self) -> float:
        """Learning rate; see `Stepper.lr`."""
        return float(self._group["lr"])

    def check_lr(self, lr: float) -> None:
        """Check a learning rate; see `Stepper.check_lr`."""
        if not 0 <= lr < math.inf:
            msg = f"table {self._table!r}: a learning rate must be at least 0 and finite, got {lr}"
            raise ConfigError(msg)

    def set_lr(self, lr: float) -> None:
        """Change the learning rate; see `Stepper.set_lr`."""
        self.check_lr(lr)
        if isinstance(self._group["lr"], torch.Tensor):
            self._group["lr"].fill_(lr)
        else:
            self._group["lr"] = lr

    @property
    def _group(self) -> dict[str, Any]:
        return self._optimizer.param_groups[0]
