"""Exchange of tokens with the ranks of their experts, and back.

    token 0  chose experts 2, 0        rank 0 has experts 0 and 1, rank 1 has 2 and 3
    token 1  chose experts 1, 3

    kept choices by expert     (0, e0) (1, e1) | (0, e2) (1, e3)
    all_to_all                 to rank 0       | to rank 1
    experts                    each rank runs its experts on received rows, in the order of ranks
    all_to_all back, and the sum of a token's choices, each times its weight

Ranks first exchange the number of choices of each expert. So messages have exact lengths, without
padding to a capacity.

Source: D. Lepikhin et al., GShard, 2020; exact lengths as in T. Gale et al., MegaBlocks, 2023.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from braid.comm import Group
from braid.comm.autograd import all_to_all
from braid.parallel.expert_parallel.routing import capacity_of, keep_within

__all__ = ["Dispatch"]

Experts = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Dispatch:
    """Exchange of tokens with the ranks of the experts that are chosen for them.

    Args:
        group: Ranks that share the experts; each has the same number, in the order of ranks.
        experts: Chosen experts of this rank's tokens, (T, k).
        num_experts: Number of experts over all ranks.
        capacity_factor: Largest number of a rank's tokens that an expert accepts, divided by the
            even share; other tokens are dropped. None drops nothing.

    Attributes:
        counts: Number of choices of each expert by each rank before dropping, (n, E).
        kept: Number of choices of each expert by each rank after dropping, (n, E).

    Cost: an all_gather of 8 E bytes per rank.
    """

    def __init__(
        self,
        group: Group,
        experts: torch.Tensor,
        num_experts: int,
        capacity_factor: float | None = None,
    ) -> None:
        self._group = group
        self._experts = experts
        num_chosen = experts.flatten().bincount(minlength=num_experts)
        self.counts = group.all_gather(num_chosen.unsqueeze(0))
        limits = [capacity_of(int(n), num_experts, capacity_factor) for n in self.counts.sum(1)]
        limit = torch.tensor(limits, device=num_chosen.device).unsqueeze(1)
        self.kept = self.counts.minimum(limit)
        keep = keep_within(experts, num_experts, limits[group.rank]).flatten()
        order = experts.flatten().argsort(stable=True)
        self._rows = order[keep[order]]  # kept choices, by expert and then by token
        per_rank = self.kept.view(group.size, group.size, -1)  # source, destination, expert there
        self._send_sizes: list[int] = per_rank[group.rank].sum(-1).tolist()
        self._receive_sizes: list[int] = per_rank[:, group.rank].sum(-1).tolist()
        here = per_rank[:, group.rank]
        local = torch.arange(here.shape[1], device=here.device).repeat(group.size)
        self._local = local.repeat_interleave(here.flatten())

    def run(self, x: torch.Tensor, weights: torch.Tensor, experts: Experts) -> torch.Tensor:
        """Send tokens to their experts and return the weighted sums of the experts' outputs.

        Args:
            x: This rank's tokens, (T, D).
            weights: Factor of each choice, (T, k).
            experts: Function of rows (R, D) and each row's local expert index (R,) that returns
                rows.

        Cost: two all_to_alls of the kept choices forward and two backward, (n-1)/n of k T D numbers
            each if the load is even.
        """
        num_tokens, num_choices = self._experts.shape
        choices = x.unsqueeze(1).expand(-1, num_choices, -1).reshape(-1, x.shape[-1])
        sizes = {"send_sizes": self._send_sizes, "receive_sizes": self._receive_sizes}
        rows = all_to_all(self._group, choices.index_select(0, self._rows), **sizes)
        rows = experts(rows, self._local)
        back = {"send_sizes": self._receive_sizes, "receive_sizes": self._send_sizes}
        rows = all_to_all(self._group, rows, **back)
        # one row per choice: sums of a token have a fixed order
        results = rows.new_zeros(num_tokens * num_choices, rows.shape[-1])
        results = results.index_copy(0, self._rows, rows)
        results = results.view(num_tokens, num_choices, rows.shape[-1])
        return (results * weights.to(results.dtype).unsqueeze(-1)).sum(1)
