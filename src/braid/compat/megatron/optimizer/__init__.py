"""`megatron.core.optimizer`: Adam and SGD on the flat gradients of DistributedDataParallel."""

from __future__ import annotations

from braid.compat.megatron.optimizer.optimizer import MegatronOptimizer
from braid.compat.megatron.optimizer.optimizer_config import OptimizerConfig
from braid.compat.megatron.optimizer.param_groups import get_megatron_optimizer

__all__ = ["MegatronOptimizer", "OptimizerConfig", "get_megatron_optimizer"]
