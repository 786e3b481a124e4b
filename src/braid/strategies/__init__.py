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
from braid.strategies.coordinator import (
    ClosureCancelledError,
    ClusterCoordinator,
    RemoteValue,
)
from braid.strategies.datasets import DistributedDataset, InputContext
from braid.strategies.extended import StrategyExtended
from braid.strategies.fitting import fit
from braid.strategies.kinds import (
    CentralStorageStrategy,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
)
from braid.strategies.parameter_server import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    ParameterServerStrategy,
    ShardedVariable,
    SyncReplicas,
)
from braid.strategies.strategy import Strategy, compute_average_loss
from braid.strategies.values import PerReplica, SyncOnRead

__all__ = [
    "Callback",
    "CentralStorageStrategy",
    "ClosureCancelledError",
    "ClusterCoordinator",
    "ClusterResolver",
    "CommunicationOptions",
    "CrossDeviceOps",
    "DistributedDataset",
    "EarlyStop",
    "FixedShardsPartitioner",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "KubernetesClusterResolver",
    "LaunchedClusterResolver",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "PerReplica",
    "RayClusterResolver",
    "ReductionToOneDevice",
    "RemoteValue",
    "ReplicaContext",
    "ShardedVariable",
    "SlurmClusterResolver",
    "Strategy",
    "StrategyExtended",
    "SyncOnRead",
    "SyncReplicas",
    "TFConfigClusterResolver",
    "compute_average_loss",
    "fit",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "placed",
]
