"""Expert parallelism: mixtures of experts with different experts on different ranks."""

from __future__ import annotations

from braid.parallel.expert_parallel.dispatch import Dispatch
from braid.parallel.expert_parallel.divide import (
    divide_experts,
    expert_modules,
    expert_params,
    undivide_experts,
)
from braid.parallel.expert_parallel.gradients import (
    average_gradients,
    clip_grad_norm_,
    is_of_experts,
)
from braid.parallel.expert_parallel.mixture import MixtureOfExperts, auxiliary_loss
from braid.parallel.expert_parallel.routing import Routing, route

__all__ = [
    "Dispatch",
    "MixtureOfExperts",
    "Routing",
    "auxiliary_loss",
    "average_gradients",
    "clip_grad_norm_",
    "divide_experts",
    "expert_modules",
    "expert_params",
    "is_of_experts",
    "route",
    "undivide_experts",
]
