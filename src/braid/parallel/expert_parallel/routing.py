"""Routing: the experts that each token goes to, which tokens are dropped, and losses for balance.

    T tokens, D width, E experts, k choices of each token, n ranks

    logits = x router^T          (T, E), in float32 at least
    p = softmax(logits)          (T, E)
    experts, weights = top-k(p)  (T, k), weights divided by their sum where k > 1

Capacity: an expert takes at most ceil(capacity_factor T k / E) choices of *each rank*, as most
systems have it. So a rank knows without asking which of its choices are dropped, and these do not
depend on other ranks. First choices of all tokens come before second choices, then earlier tokens
before later ones. A dropped choice adds nothing to its token.

Losses, with f_i the share of all choices that went to expert i and P_i the mean of its p:

    load balance    E sum_i f_i P_i                     1 where the load is even
    router z        mean of logsumexp(logits)^2         keeps logits small

Sources: W. Fedus, B. Zoph, N. Shazeer, Switch transformers, 2022 (capacity, load balance);
D. Lepikhin et al., GShard, 2020 (order of choices); B. Zoph et al., ST-MoE, 2022 (router z).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.nn import functional

__all__ = ["Routing", "capacity_of", "keep_within", "load_balance_loss", "route", "router_z_loss"]


class Routing(NamedTuple):
    """Experts that the router has chosen for this rank's tokens.

    Attributes:
        logits: Scores of experts, (T, E).
        probabilities: Softmax of the logits, (T, E).
        experts: Chosen experts, best first, (T, k).
        weights: Factor of each choice, (T, k).
    """

    logits: torch.Tensor
    probabilities: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor


def route(x: torch.Tensor, router: torch.Tensor, top_k: int) -> Routing:
    """Choose the `top_k` most probable experts of each token; the lower index wins a tie.

    Args:
        x: Tokens, (T, D).
        router: Weight of the router, (E, D).
        top_k: Number of choices of each token.
    """
    wide = x.float() if x.dtype in {torch.float16, torch.bfloat16} else x
    logits = functional.linear(wide, router.to(wide.dtype))
    probabilities = logits.softmax(-1)
    ordered, experts = probabilities.sort(dim=-1, descending=True, stable=True)
    weights = ordered[:, :top_k]
    if top_k > 1:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(logits, probabilities, experts[:, :top_k], weights)


def capacity_of(num_choices: int, num_experts: int, factor: float | None) -> int:
    """Return an expert's capacity: the largest number of choices by one rank that it accepts.

    Args:
        num_choices: Number of the rank's tokens, times the number of choices per token.
        num_experts: Number of experts over all ranks.
        factor: Capacity divided by the even share; None for no limit.
    """
    if factor is None:
        return num_choices
    return min(math.ceil(factor * num_choices / num_experts), num_choices)


def keep_within(experts: torch.Tensor, num_experts: int, capacity: int) -> torch.Tensor:
    """Return which choices are within the capacity of their expert.

    Shape:
        experts: (T, k). Result: (T, k), bool.
    """
    by_choice = experts.t().flatten()  # all first choices, then all second choices
    order = by_choice.argsort(stable=True)
    counts = by_choice.bincount(minlength=num_experts)
    starts = counts.cumsum(0) - counts
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device) - starts[by_choice[order]]
    return (places < capacity).view(experts.shape[1], -1).t()


def load_balance_loss(routing: Routing, counts: torch.Tensor) -> torch.Tensor:
    """Return this rank's term of the load balance loss, whose mean over ranks is the loss.

    Args:
        routing: Choices of this rank's tokens.
        counts: Number of choices of each expert by each rank, (n, E).
    """
    num_choices = counts.sum()
    shares = counts.sum(0) / num_choices.clamp(min=1)
    total = routing.probabilities.sum(0) * _terms(routing, counts)
    return counts.shape[1] * (shares.to(total.dtype) * total).sum()


def router_z_loss(routing: Routing, counts: torch.Tensor) -> torch.Tensor:
    """Return this rank's term of the router z-loss, whose mean over ranks is the loss.

    Args:
        routing: Choices of this rank's tokens.
        counts: Number of choices of each expert by each rank, (n, E).
    """
    return routing.logits.logsumexp(-1).square().sum() * _terms(routing, counts)


def _terms(routing: Routing, counts: torch.Tensor) -> float:
    """Return the factor that makes a sum over this rank's tokens a term of a mean over all."""
    num_tokens = int(counts.sum()) // routing.experts.shape[1]
    return counts.shape[0] / max(num_tokens, 1)
