"""Parameter server strategies: variables on servers, workers at their own pace."""

from __future__ import annotations

from braid.strategies.parameter_server.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
)
from braid.strategies.parameter_server.sharded_variable import ShardedVariable
from braid.strategies.parameter_server.strategy import ParameterServerStrategy, SyncReplicas

__all__ = [
    "FixedShardsPartitioner",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "ParameterServerStrategy",
    "ShardedVariable",
    "SyncReplicas",
]
