"""Training without a centre: each rank steps alone and mixes parameters with a few other ranks.

    method = DPSGD(model.parameters(), Mixing.ring(group.size), group)
    for x, y in batches:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
        method.mix()

Problem: in an all-reduce everybody waits for everybody, in every step.

Idea: a message to a few neighbours per step is enough for models to stay together (`mixing`). The
mean moves as if all gradients had been averaged. The distance of ranks from it, the *consensus
distance*, shrinks by the spectral gap in each step and grows by what gradients differ.
`consensus_distance` returns it; log it beside the loss.

    DPSGD     neighbours in both directions agree: doubly stochastic weights
    PushSum   messages in one direction only: a weight travels along and is divided out, so columns
              need to sum to 1, rows do not

The module is used as it is, not in DistributedDataParallel. Rank 0's parameters that require a
gradient are copied to all at the beginning; frozen ones and buffers stay each rank's own. In
`ad_psgd` ranks do not even keep step.

Source: Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS
2017, algorithm 1 (there, gradients are taken before mixing and added after it; here a step ends
before it mixes, which any optimizer can do); Assran et al., "Stochastic Gradient Push", ICML 2019,
algorithm 1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from braid.comm import StepsBy
from braid.data_parallel.flat_params import (
    FlatParams,
    Params,
    make_equal,
    parameters_in,
    refuse_others,
)
from braid.data_parallel.local_sgd.mixing import Mixing
from braid.errors import ConfigError
from braid.params.process_groups import group_of
from braid.types import text_digest

__all__ = ["DPSGD", "Decentralized", "PushSum"]

TAG = 0x6D6978  # "mix": of messages between neighbours


class Decentralized(ABC):
    """Base of methods that mix the parameters of a rank with those of some other ranks.

    Args:
        params: Parameters, or groups of an optimizer; in the same order on all ranks.
        process_group: Group, as for DistributedDataParallel.
        arguments: Further values that must be the same on all ranks, by name; compared as text.

    Attributes:
        group: The group of braid.
        num_mixed: Number of steps so far.

    Raises:
        ConfigError: There is no group, or there are no parameters.
        MismatchError: Ranks have other parameters, or another order, or use another method or
            mixing.
    """

    def __init__(self, params: Params, process_group: Any = None, **arguments: object) -> None:
        self.group = group_of(process_group)
        self.num_mixed = 0
        self._given = [p for x in params for p in (x["params"] if isinstance(x, Mapping) else [x])]
        self._flat = FlatParams.agreed(
            parameters_in(self._given), self.group, method=type(self).__name__, **arguments
        )
        make_equal(self._flat, self.group)

    @abstractmethod
    def mix(self) -> None:
        """Mix parameters with other ranks; call after each step of the optimizer.

        Raises:
            ConfigError: Parameters have been unfrozen since this was made.
        """

    def _refuse_others(self) -> None:
        refuse_others(self._flat, self._given, type(self).__name__)

    @torch.no_grad()
    def consensus_distance(self) -> float:
        """Return the distance of ranks from their mean; a collective.

        It is sqrt(mean over ranks of |x_i - mean|^2). The rank's events record it, too, as the next
        power of 2, with the number of the step.

        Cost: as an averaging of the parameters, in 32 bits at least.
        """
        total = torch.zeros(1, dtype=torch.float64, device=self._flat.flats[0].device)
        for flat in self._flat.read():
            own = _wide(flat)  # ranks may be closer than 16 bits can tell
            average = self.group.all_reduce(own.clone(), "avg")
            total += (own - average).abs().double().square().sum().to(total.device)
        distance = math.sqrt(self.group.all_reduce(total, "avg").item())
        # names of events are kept for good: a number in them must not have too many values
        bound = (
            f"under 2^{math.ceil(math.log2(distance))}"
            if 0 < distance < math.inf
            else str(distance)
        )
        self.group.context.events.instant(f"consensus distance {bound}", seq=self.num_mixed)
        return distance


class _Synchronous(Decentralized):
    """Base of methods in which every rank exchanges tensors with the ranks of a mixing."""

    def __init__(self, params: Params, mixing: Mixing, process_group: Any) -> None:
        if not isinstance(mixing, Mixing):
            msg = (  # type: ignore[unreachable]  # users without a type checker
                f"mixing of {type(self).__name__} must be a Mixing, got {mixing!r}: use "
                "Mixing.of([matrix]), or Mixing.ring(group.size) or another of its "
                "constructors"
            )
            raise ConfigError(msg)
        self.mixing = Mixing.of(mixing.matrices, mixing.name)
        weights = f"{text_digest(repr(self.mixing.matrices)):016x}"
        super().__init__(params, process_group, mixing=mixing, weights=weights)
        if mixing.size != self.group.size:
            msg = f"{mixing!r} is for {mixing.size} ranks, but the group has {self.group.size}"
            raise ConfigError(msg)
        self._received: list[list[torch.Tensor]] = []  # for the tensors of each neighbour

    def _mixed(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return all ranks' tensors weighted by the matrix of this step.

        They are added in the order of ranks, in 32 bits at least.
        """
        self._refuse_others()
        rank, step = self.group.rank, self.num_mixed
        sources = self.mixing.sources(rank, step)
        while len(self._received) < len(sources):
            self._received.append([torch.empty_like(x) for x in tensors])
        by_rank = {rank: list(tensors), **dict(zip(sources, self._received, strict=False))}
        with self.group.coalesce(steps_by=StepsBy.WAITER) as batch:
            for target in self.mixing.targets(rank, step):
                for x in tensors:
                    batch.send(x, target, tag=TAG)
            for source in sources:
                for x in by_rank[source]:
                    batch.recv(x, source, tag=TAG)
        batch.work.wait()
        row = self.mixing.at(step)[rank]
        totals = []
        for k, x in enumerate(tensors):
            total = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
            for member in sorted(by_rank):
                total.add_(by_rank[member][k], alpha=row[member])
            totals.append(total)
        self.num_mixed += 1
        return totals


class DPSGD(_Synchronous):
    """D-PSGD: the weighted mean with a rank's neighbours after each step.

    Args:
        params: Parameters, as for `Decentralized`.
        mixing: Weights with which ranks take each other's parameters; doubly stochastic.
        process_group: Group, as for `Decentralized`.

    Raises:
        ConfigError: The mixing is for another number of ranks, or its rows do not sum to 1.

    Cost: l bytes to each neighbour a step; memory for that and two more copies of the parameters.
    """

    def __init__(self, params: Params, mixing: Mixing, process_group: Any = None) -> None:
        super().__init__(params, mixing, process_group)
        if not self.mixing.doubly_stochastic:
            msg = (
                f"D-PSGD needs rows that sum to 1, and those of {mixing!r} do not: use "
                "PushSum, which needs no such rows"
            )
            raise ConfigError(msg)

    @torch.no_grad()
    def mix(self) -> None:
        """Take the mean with the neighbours; call on all ranks after each step of the optimizer."""
        flats = self._flat.read()
        for flat, total in zip(flats, self._mixed(flats), strict=True):
            flat.copy_(total)
        self._flat.write()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the step."""
        return {"num_mixed": self.num_mixed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of `state_dict`.

        The program loads the parameters itself, after this object was made, which copied rank 0's.
        """
        self.num_mixed = state["num_mixed"]


class PushSum(_Synchronous):
    """Stochastic gradient push: x and a weight w travel along directed edges.

    The model is z = x / w.

        x <- x + (what the optimizer has added to z)
        x_i <- sum_j W[i][j] x_j;   w_i <- sum_j W[i][j] w_j;   z = x / w

    Args:
        params: Parameters of the model, z, as for `Decentralized`.
        mixing: Weights with which ranks take each other's parameters; columns sum to 1.
        process_group: Group, as for `Decentralized`.

    Raises:
        ConfigError: The mixing is for another number of ranks.

    Cost: l bytes to each target a step; memory for that and four more copies of the parameters.
    """

    def __init__(self, params: Params, mixing: Mixing, process_group: Any = None) -> None:
        super().__init__(params, mixing, process_group)
        self._x = [_wide(flat) for flat in self._flat.flats]
        self._w = torch.ones(1, dtype=torch.float64, device=self._flat.flats[0].device)

    @property
    def weight(self) -> float:
        """This rank's w; the mean over ranks is 1."""
        return self._w.item()

    @torch.no_grad()
    def mix(self) -> None:
        """Push to the targets of this step; call on all ranks after each step of the optimizer."""
        for flat, x in zip(self._flat.read(), self._x, strict=True):
            before = (x / self.weight).to(flat.dtype)  # what the last step has written
            x.add_(_wide(flat).sub_(before))
        *self._x, self._w = self._mixed([*self._x, self._w])
        for flat, x in zip(self._flat.flats, self._x, strict=True):
            flat.copy_(x / self.weight)
        self._flat.write()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the step, and this rank's x and w."""
        return {
            "num_mixed": self.num_mixed,
            "x": [x.clone() for x in self._x],
            "w": self._w.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of `state_dict`.

        The program loads the parameters itself, after this object was made, which copied rank 0's.
        """
        self.num_mixed = state["num_mixed"]
        for into, x in zip([*self._x, self._w], [*state["x"], state["w"]], strict=True):
            into.copy_(x)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
