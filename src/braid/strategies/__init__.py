"""Strategies: one line decides over which replicas a training is spread."""

from __future__ import annotations

from braid.strategies import placed
from braid.strategies.callbacks import Callback, EarlyStop
from braid.strategies.cluster import (
    ClusterResolver,
    KubernetesClusterResolver,
    LaunchedClusterResolver,
    RayClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
)
from braid.strategies.communication import (
    CommunicationOptions,
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from braid.strategies.contexts import (
    ReplicaContext,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from braid.strategies.datasets import DistributedDataset, InputContext
from braid.strategies.extended import StrategyExtended
from braid.strategies.fitting import fit
from braid.strategies.kinds import (
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
)
from braid.strategies.strategy import Strategy, compute_average_loss
from braid.strategies.values import PerReplica, SyncOnRead

__all__ = [
    "Callback",
    "ClusterResolver",
    "CommunicationOptions",
    "CrossDeviceOps",
    "DistributedDataset",
    "EarlyStop",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "KubernetesClusterResolver",
    "LaunchedClusterResolver",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "PerReplica",
    "RayClusterResolver",
    "ReductionToOneDevice",
    "ReplicaContext",
    "SlurmClusterResolver",
    "Strategy",
    "StrategyExtended",
    "SyncOnRead",
    "TFConfigClusterResolver",
    "compute_average_loss",
    "fit",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "placed",
]
