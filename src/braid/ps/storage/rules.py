"""Optimizers of a server, as immutable objects that step rows of a table.

Problem: torch optimizers own their parameters and have one state for a whole parameter. A sparse
table steps some rows of a growing matrix, and needs a state for each row.

Idea: a rule declares the columns of its state, and steps rows and their columns in place. The
storage gathers and scatters rows. Tables in half precision are stepped in float32, with state in
float32, and rounded once at the end.

    rows   [n, d]     grads  [n, d]     a column per element [n, d], or per row [n, 1]

A row that is in every update is bitwise equal to `torch.optim.SGD`, `Adagrad`, `Adam` or `AdamW`.
An update does not change other rows, nor their moments and step counts. So momentum and weight
decay pause for them, and the bias correction counts the updates of each row;
`torch.optim.SparseAdam` counts all updates of the parameter instead.

Sources: J. Duchi et al., Adagrad, JMLR 2011; D. Kingma and J. Ba, Adam, ICLR 2015; I. Loshchilov
and F. Hutter, AdamW, ICLR 2019; H. B. McMahan et al., Ad click prediction, KDD 2013 (FTRL);
M. Naumov et al., DLRM, 2019 (row-wise Adagrad).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, NamedTuple

import torch

from braid.errors import ConfigError

__all__ = ["FTRL", "SGD", "Adagrad", "Adam", "AdamW", "Column", "RowWiseAdagrad", "Rule"]

INF = math.inf


class Column(NamedTuple):
    """A named part of the state of rows.

    Attributes:
        per_element: Whether there is a value per element, instead of one per row.
        fill: Value for new rows.
        counts: Whether values are int64, instead of the dtype of computation.
    """

    per_element: bool
    fill: float = 0.0
    counts: bool = False


class Rule(ABC):
    """An optimizer that steps rows in place, each with its gradient and state.

    Attributes:
        by_elements: Whether the rule is elementwise, so that a dense table may be cut anywhere.
    """

    __slots__ = ()
    by_elements: ClassVar[bool] = True

    @property
    @abstractmethod
    def learning_rate(self) -> float:
        """Learning rate."""

    @abstractmethod
    def with_learning_rate(self, lr: float) -> Rule:
        """Return the same rule with another learning rate."""

    @property
    @abstractmethod
    def columns(self) -> Mapping[str, Column]:
        """Columns of the state, by name."""

    @abstractmethod
    def step(
        self, rows: torch.Tensor, grads: torch.Tensor, state: Mapping[str, torch.Tensor]
    ) -> None:
        """Step rows and their state in place.

        Args:
            rows: Values of at least one row.
            grads: Gradients; not changed.
            state: Columns of these rows.

        Shape:
            rows, grads: [n, d]; columns: [n, d] or [n, 1].
        """


@dataclass(frozen=True, slots=True)
class _Rated(Rule):
    """A rule with a learning rate called `lr`."""

    lr: float

    @property
    def learning_rate(self) -> float:
        return self.lr

    def with_learning_rate(self, lr: float) -> Rule:
        return dataclasses.replace(self, lr=lr)


@dataclass(frozen=True, slots=True)
class SGD(_Rated):
    """Stochastic gradient descent, with momentum as in torch.

    Raises:
        ConfigError: A value is out of range.
    """

    _: KW_ONLY
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check_ranges(self, lr=(0, INF), momentum=(0, 1), weight_decay=(0, INF))
        if self.nesterov and not self.momentum:
            msg = "SGD: nesterov=True needs a momentum above 0"
            raise ConfigError(msg)

    @property
    def columns(self) -> Mapping[str, Column]:
        """Columns of the state, by name; see `Rule.columns`."""
        return {"momentum_buffer": Column(per_element=True)} if self.momentum else {}

    def step(
        self, rows: torch.Tensor, grads: torch.Tensor, state: Mapping[str, torch.Tensor]
    ) -> None:
        """Step rows and their state in place; see `Rule.step`."""
        grads = _decayed(rows, grads, self.weight_decay)
        if self.momentum:
            buffer = state["momentum_buffer"].mul_(self.momentum).add_(grads)
            grads = grads.add(buffer, alpha=self.momentum) if self.nesterov else buffer
        rows.add_(grads, alpha=-self.lr)


@dataclass(frozen=True, slots=True)
class Adagrad(_Rated):
    """Adagrad: the rate of each element decreases with the sum of its squared gradients.

    Raises:
        ConfigError: A value is out of range.
    """

    _: KW_ONLY
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    def __post_init__(self) -> None:
        names = ("lr", "weight_decay", "initial_accumulator_value", "eps")
        _check_ranges(self, **dict.fromkeys(names, (0.0, INF)))

    @property
    def columns(self) -> Mapping[str, Column]:
        """Columns of the state, by name; see `Rule.columns`."""
        return {"sum": Column(per_element=self.by_elements, fill=self.initial_accumulator_value)}

    def step(
        self, rows: torch.Tensor, grads: torch.Tensor, state: Mapping[str, torch.Tensor]
    ) -> None:
        """Step rows and their state in place; see `Rule.step`."""
        grads = _decayed(rows, grads, self.weight_decay)
        std = state["sum"].addcmul_(grads, grads, value=1).sqrt().add_(self.eps)
        rows.addcdiv_(grads, std, value=-self.lr)


@dataclass(frozen=True, slots=True)
class RowWiseAdagrad(Adagrad):
    """Adagrad with one accumulator per row, which sums the means of the squared gradients.

    Its state has 1/d of the size of Adagrad's. Rows must not be cut, so it is for sparse tables
    only.

    Raises:
        ConfigError: A value is out of range.

    Source: M. Naumov et al., Deep learning recommendation model, 2019.
    """

    by_elements = False

    def step(
        self, rows: torch.Tensor, grads: torch.Tensor, state: Mapping[str, torch.Tensor]
    ) -> None:
        """Step rows and their state in place; see `Rule.step`."""
        grads = _decayed(rows, grads, self.weight_decay)
        total = state["sum"].add_(grads.square().mean(dim=1, keepdim=True))
        rows.addcdiv_(grads, total.sqrt().add_(self.eps), value=-self.lr)


@dataclass(frozen=True, slots=True)
class Adam(_Rated):
    """Adam, with a step count for each row.

    Raises:
        ConfigError: A value is out of range.
    """

    _: KW_ONLY
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    decoupled: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_ranges(self, lr=(0, INF), eps=(0, INF), weight_decay=(0, INF))
        if not all(0 <= beta < 1 for beta in self.betas):
            msg = f"{type(self).__name__}: betas must be two numbers in [0, 1), got {self.betas}"
            raise ConfigError(msg)

    @property
    def columns(self) -> Mapping[str, Column]:
        """Columns of the state, by name; see `Rule.columns`."""
        element = Column(per_element=True)
        step = Column(per_element=False, counts=True)
        return {"step": step, "exp_avg": element, "exp_avg_sq": element}

    def step(
        self, rows: torch.Tensor, grads: torch.Tensor, state: Mapping[str, torch.Tensor]
    ) -> None:
        """Step rows and their state in place; see `Rule.step`."""
        beta1, beta2 = self.betas
        if self.weight_decay and self.decoupled:
            rows.mul_(1 - self.lr * self.weight_decay)
        else:
            grads = _decayed(rows, grads, self.weight_decay)
        steps = state["step"].add_(1)
        # scalars of torch.optim.Adam, in float64 as there, for each row
        lr = torch.tensor(self.lr, dtype=torch.float64)  # `number / tensor` would round twice
        step_size = lr / (1 - _powers(beta1, steps))
        correction = (1 - _powers(beta2, steps)).sqrt()
        mean = state["exp_avg"].lerp_(grads, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(grads, grads, value=1 - beta2)
        std = square.sqrt().div_(correction.to(rows.dtype)).add_(self.eps)
        rows.add_((mean * -step_size.to(rows.dtype)).div_(std))


@dataclass(frozen=True, slots=True)
class AdamW(Adam):
    """Adam with decoupled weight decay.

    Raises:
        ConfigError: A value is out of range.
    """

    _: KW_ONLY
    weight_decay: float = 0.01

    decoupled = True


@dataclass(frozen=True, slots=True)
class FTRL(Rule):
    """FTRL-Proximal (follow the regularized leader), per coordinate; `l1` makes weights sparse.

        sigma = (sqrt(n + g^2) - sqrt(n)) / alpha        z += g - sigma w        n += g^2
        w = 0 where |z| <= l1, else -(z - sign(z) l1) / ((beta + sqrt(n)) / alpha + l2)

    Weights are a function of z and n from the first update on, so tables usually begin at 0.

    Attributes:
        alpha: Learning rate.
        beta: Damping of the first rates.
        l1: Strength of the L1 penalty.
        l2: Strength of the L2 penalty.

    Raises:
        ConfigError: A value is out of range.

    Source: H. B. McMahan et al., Ad click prediction: a view from the trenches, KDD 2013,
    algorithm 1.
    """

    alpha: float
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0

    def __post_init__(self) -> None:
        _check_ranges(self, alpha=(0, INF), beta=(0, INF), l1=(0, INF), l2=(0, INF))
        if not self.alpha:
            msg = "FTRL: alpha must be above 0, since the rule divides by alpha"
            raise ConfigError(msg)

    @property
    def learning_rate(self) -> float:
        """Learning rate; see `Rule.learning_rate`."""
        return self.alpha

    def with_learning_rate(self, lr: float) -> Rule:
        """Return this rule with the learning rate `lr`; see `Rule.with_learning_rate`."""
        return dataclasses.replace(self, alpha=lr)

    @property
    def columns(self) -> Mapping[str, Column]:
        """Columns of the state, by name; see `Rule.columns`."""
        return {"z": Column(per_element=True), "n": Column(per_element=True)}

    def step(
        self, rows: torch.Tensor, grads: torch.Tensor, state: Mapping[str, torch.Tensor]
    ) -> None:
        """Step rows and their state in place; see `Rule.step`."""
        z, n = state["z"], state["n"]
        root = n.sqrt()
        new_root = n.addcmul_(grads, grads, value=1).sqrt()
        sigma = (new_root - root).div_(self.alpha)
        z.add_(grads).sub_(sigma.mul_(rows))
        shrunk = z.sign().mul_(self.l1).sub_(z)
        rate = new_root.add_(self.beta).div_(self.alpha).add_(self.l2)
        # an element without gradients at beta 0 has 0/0, which also becomes 0
        rows.copy_(shrunk.div_(rate).masked_fill_(z.abs() <= self.l1, 0.0))


def _decayed(rows: torch.Tensor, grads: torch.Tensor, weight_decay: float) -> torch.Tensor:
    return grads.add(rows, alpha=weight_decay) if weight_decay else grads


def _powers(beta: float, steps: torch.Tensor) -> torch.Tensor:
    """Return beta ** steps in float64, bitwise equal to Python's floats.

    All powers below 2^-54 are replaced by one such power, since 1 minus any of them is 1.
    """
    vanishes = 1 if beta == 0 else math.ceil(54 * math.log(2) / -math.log(beta)) + 1
    largest = min(int(steps.max()), vanishes)
    table = _table_of_powers(beta, 1 << largest.bit_length())
    return table.take(steps.clamp(max=len(table) - 1))


@functools.lru_cache(maxsize=32)
def _table_of_powers(beta: float, size: int) -> torch.Tensor:
    return torch.tensor([beta**k for k in range(size)], dtype=torch.float64)


def _check_ranges(rule: Rule, **ranges: tuple[float, float]) -> None:
    """Check that fields are in half-open ranges.

    Raises:
        ConfigError: Fields are out of range; all of them are named.
    """
    problems = []
    for name, (low, high) in ranges.items():
        value = getattr(rule, name)
        if not low <= value < high:
            problems.append(f"{name} must be in [{low:g}, {high:g}), got {value!r}")
    if problems:
        msg = f"{type(rule).__name__}: {'; '.join(problems)}"
        raise ConfigError(msg)
