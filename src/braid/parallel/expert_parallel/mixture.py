"""Mixture of experts with different experts on different ranks.

                 ┌─ expert 0 ─┐  rank 0
    x ─ router ──┼─ expert 1 ─┼── y         each rank has different tokens, a copy of the router
                 ├─ expert 2 ─┤  rank 1     and E/n of the experts
                 └─ expert 3 ─┘

An expert is a perceptron: down(activation(up(x))). A token passes k of E experts, so the layer has
E/k times the parameters of a dense layer with the same compute.

Experts receive tokens of all ranks: after backward, their gradients belong to the sum of all ranks'
losses. Gradients of all other parameters belong to this rank's loss. `average_gradients` converts
both to gradients of the mean.

Source: N. Shazeer et al., Outrageously large neural networks, 2017; W. Fedus et al., Switch
transformers, 2022.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from braid.comm import Group
from braid.errors import ConfigError, raise_all
from braid.parallel.expert_parallel.dispatch import Dispatch
from braid.parallel.expert_parallel.routing import load_balance_loss, route, router_z_loss
from braid.parallel.gradients.incomplete import PartOfModel, mark_part, unmark_part
from braid.parallel.gradients.state_parts import note_parts
from braid.types import text_digest

__all__ = ["MixtureOfExperts", "auxiliary_loss", "check_experts", "mark_experts"]

CALLS = PartOfModel(
    "braid.parallel.expert_parallel.clip_grad_norm_(model, max_norm, group)",
    "braid.parallel.gradients.AgreedGradScaler([group], device)",
)


class MixtureOfExperts(nn.Module):
    """Mixture-of-experts layer with its experts sharded over ranks.

    Args:
        dim: Length of a token.
        hidden: Width of an expert.
        num_experts: Number of experts over all ranks.
        group: Ranks that share the experts.
        top_k: Number of experts per token.
        capacity_factor: Largest number of tokens of a rank per expert, divided by the even share;
            None for no limit.
        activation: Function between the two layers of an expert.
        seed: Seed of the initial values, which do not depend on the number of ranks.

    Attributes:
        load_balance_loss: This rank's term of the load balance loss of the last forward; see
            `routing`.
        router_z_loss: This rank's term of the router z-loss of the last forward.

    Shape:
        (..., dim) -> (..., dim); ranks may have different numbers of tokens.

    Raises:
        ConfigError: Numbers are out of range; the message has all problems.
    """

    load_balance_loss: torch.Tensor
    router_z_loss: torch.Tensor

    def __init__(
        self,
        dim: int,
        hidden: int,
        num_experts: int,
        *,
        group: Group,
        top_k: int = 2,
        capacity_factor: float | None = None,
        activation: Callable[[torch.Tensor], torch.Tensor] = functional.gelu,
        seed: int = 0,
    ) -> None:
        super().__init__()
        problems = check_experts(num_experts, group.size)
        if not 1 <= top_k <= num_experts:
            problems.append(
                f"top_k must be from 1 to the number of experts, {num_experts}, got {top_k}"
            )
        if capacity_factor is not None and not capacity_factor > 0:
            problems.append(f"capacity_factor must be positive or None, got {capacity_factor}")
        raise_all(problems)
        self.group = group
        self.num_experts = num_experts
        self.top_k = top_k
        self.capacity_factor = capacity_factor
        self.activation = activation
        count = num_experts // group.size
        local_experts = range(group.rank * count, (group.rank + 1) * count)
        self.router = nn.Parameter(_drawn(f"{seed}/router", num_experts, dim))
        self.up = nn.Parameter(
            torch.stack([_drawn(f"{seed}/{e}/up", hidden, dim) for e in local_experts])
        )
        self.down = nn.Parameter(
            torch.stack([_drawn(f"{seed}/{e}/down", dim, hidden) for e in local_experts])
        )
        mark_experts(group, self.up, self.down)
        note_parts(self)
        self._whole_group: Group | None = None  # group before divide()
        self._counts = self._kept = torch.zeros(group.size, num_experts, dtype=torch.int64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the experts' outputs for each token; a collective.

        Cost: an all_gather of 8 E bytes per rank, and two all_to_alls; see `Dispatch`.
        """
        tokens = x.reshape(-1, x.shape[-1])
        routing = route(tokens, self.router, self.top_k)
        dispatch = Dispatch(self.group, routing.experts, self.num_experts, self.capacity_factor)
        self._counts, self._kept = dispatch.counts, dispatch.kept
        self.load_balance_loss = load_balance_loss(routing, dispatch.counts)
        self.router_z_loss = router_z_loss(routing, dispatch.counts)
        return dispatch.run(tokens, routing.weights, self._experts).view(x.shape)

    @torch.no_grad()
    def divide(self, group: Group) -> None:
        """Shard a layer with all experts in place: keep this rank's experts; call it on all ranks.

        Args:
            group: Ranks that share the experts from now on.

        Raises:
            ConfigError: The number of experts cannot be divided, or they are sharded already.
        """
        problems = check_experts(self.num_experts, group.size)
        if self.group.size > 1:
            problems.append(
                f"the experts are already sharded over {self.group.size} ranks: shard them once"
            )
        raise_all(problems)
        count = self.num_experts // group.size
        for param in (self.up, self.down):
            param.data = param.data[group.rank * count : (group.rank + 1) * count].clone()
            param.grad = None
        self._whole_group, self.group = self.group, group
        mark_experts(group, self.up, self.down)
        self._counts = self._kept = torch.zeros(group.size, self.num_experts, dtype=torch.int64)

    @torch.no_grad()
    def undivide(self) -> None:
        """Gather all experts on each rank, if `divide` has sharded them; a collective."""
        if self._whole_group is None:
            return
        for param in (self.up, self.down):
            param.data = self.group.all_gather(param.detach().contiguous())
            param.grad = None
        self.group, self._whole_group = self._whole_group, None
        mark_experts(self.group, self.up, self.down)
        self._counts = self._kept = torch.zeros(1, self.num_experts, dtype=torch.int64)

    def statistics(self) -> dict[str, float]:
        """Return statistics of the last forward over all ranks, for example for `braid.log`.

        Returns:
            `dropped_share` of all choices, and `load_E` for each expert E: its choices divided by
            an even share of all choices. The same on all ranks.

        Cost: no messages.
        """
        total = max(int(self._counts.sum()), 1)
        loads = self._counts.sum(0) * (self.num_experts / total)
        dropped = 1 - int(self._kept.sum()) / total if self._counts.any() else 0.0
        return {
            "dropped_share": dropped,
            **{f"load_{expert}": load for expert, load in enumerate(loads.tolist())},
        }

    def extra_repr(self) -> str:
        """Return the layer's sizes and the numbers of this rank's experts, for `repr`."""
        count, hidden, dim = self.up.shape
        first = self.group.rank * count
        return (
            f"{dim}, {hidden}, experts {first} to {first + count - 1} of {self.num_experts}, "
            f"top_k={self.top_k}, capacity_factor={self.capacity_factor}"
        )

    def _experts(self, rows: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        """Run this rank's experts, each on all of its rows in one call."""
        order = local.argsort(stable=True)
        counts = local.bincount(minlength=len(self.up)).tolist()
        parts = rows.index_select(0, order).split_with_sizes(counts)
        results = [
            functional.linear(self.activation(functional.linear(part, up)), down)
            for part, up, down in zip(parts, self.up, self.down, strict=True)
        ]
        return torch.cat(results).index_select(0, order.argsort())


def auxiliary_loss(
    model: nn.Module, *, load_balance: float = 0.01, router_z: float = 0.001
) -> torch.Tensor:
    """Return the weighted sum of this rank's router losses, over all layers' last forwards.

    Args:
        model: Model with mixtures of experts.
        load_balance: Factor of the load balance losses.
        router_z: Factor of the router z-losses.

    Raises:
        ConfigError: The model has no mixture of experts.
    """
    layers = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    if not layers:
        msg = (
            f"{type(model).__name__} has no MixtureOfExperts, so it has no router loss: leave "
            "this call out"
        )
        raise ConfigError(msg)
    terms = [load_balance * m.load_balance_loss + router_z * m.router_z_loss for m in layers]
    return torch.stack(terms).sum()


def check_experts(num_experts: int, size: int) -> list[str]:
    """Return problems of sharding experts over `size` ranks; an empty list if there are none."""
    if num_experts > 0 and num_experts % size == 0:
        return []
    valid = [n for n in range(1, max(num_experts, 0) + 1) if num_experts % n == 0]
    numbers = ", ".join(map(str, valid)) or "none"
    return [f"{num_experts} experts cannot be divided over {size} ranks; valid: {numbers}"]


def mark_experts(group: Group, *params: nn.Parameter) -> None:
    """Mark parameters that hold different experts on the ranks of a group."""
    for param in params:
        param.__dict__["braid_experts"] = group.ranks
        if group.size > 1:
            part = f"expert shard {group.rank} of {group.size}"
            mark_part(param, CALLS._replace(part=part))
        else:
            unmark_part(param)


def _drawn(name: str, rows: int, columns: int) -> torch.Tensor:
    """Return initial values that depend on the name only."""
    generator = torch.Generator().manual_seed(text_digest(name))
    values = torch.randn(rows, columns, generator=generator)
    return values.mul_(columns**-0.5)
