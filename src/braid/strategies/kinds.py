"""The strategies that keep a copy of the model in each replica."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from braid.comm import Group
from braid.context import init
from braid.errors import ConfigError
from braid.parallel.data_parallel.devices import DeviceLike, as_device
from braid.strategies.cluster import (
    ClusterResolver,
    LaunchedClusterResolver,
    TFConfigClusterResolver,
)
from braid.strategies.communication import CommunicationOptions, CrossDeviceOps
from braid.strategies.replicas import OneRank, ThreadReplicas
from braid.strategies.strategy import Strategy

__all__ = [
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
]


class OneDeviceStrategy(Strategy):
    """One replica on one device: the reference that other strategies are compared with.

    Args:
        device: Device of the replica.

    Raises:
        ConfigError: There is no such device.
    """

    def __init__(self, device: DeviceLike = "cpu") -> None:
        super().__init__(ThreadReplicas([as_device(device)]))


class MirroredStrategy(Strategy):
    """One replica on each of several devices of this process; each runs on a thread.

    Args:
        devices: Devices; one may occur several times, such as the CPU. All GPUs when None, or the
            CPU if there are none.
        cross_device_ops: Sizes of the buckets of gradients, by TensorFlow's names; braid's sizes
            when None.

    Raises:
        ConfigError: There are no such devices, or no such way to combine gradients.

    Random numbers:
        Replicas on the CPU draw from one default generator, in an order that may change from run to
        run.
    """

    def __init__(
        self,
        devices: Sequence[DeviceLike] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
    ) -> None:
        ops = CrossDeviceOps() if cross_device_ops is None else cross_device_ops
        ops.check()
        super().__init__(ThreadReplicas(_devices(devices)), bucket_cap_mb=ops.bucket_cap_mb)


class MultiWorkerMirroredStrategy(Strategy):
    """A replica in each process that a launcher, or `TF_CONFIG`, names.

    Args:
        cluster_resolver: Names the processes; TF_CONFIG if it is set, else the launcher's
            variables, when None.
        device: Device of this process's replica: by default its GPU, or the CPU if there is none.
        communication_options: Sizes of the buckets of gradients, deadline and engine.
        group: Group of the replicas; that of `braid.init()` when None.

    Raises:
        ConfigError: TF_CONFIG, the launcher's variables or the options make no sense.
        RendezvousError: Some processes did not come; they are named.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        device: DeviceLike | None = None,
        *,
        communication_options: CommunicationOptions | None = None,
        group: Group | None = None,
    ) -> None:
        if cluster_resolver is None:
            has_config = bool(os.environ.get("TF_CONFIG"))
            cluster_resolver = (
                TFConfigClusterResolver() if has_config else LaunchedClusterResolver()
            )
        group = init() if group is None else group
        if device is None:
            count = torch.cuda.device_count()
            local = int(os.environ.get("LOCAL_RANK", "0"))
            device = local % count if count else "cpu"
        options = communication_options or CommunicationOptions()
        options.apply(group, as_device(device))
        super().__init__(OneRank(as_device(device), group), cluster_resolver, options.bucket_cap_mb)


def _devices(devices: Sequence[DeviceLike] | None) -> list[torch.device]:
    if devices is None:
        devices = list(range(torch.cuda.device_count())) or ["cpu"]
    if not devices:
        msg = "devices is empty: name at least one device"
        raise ConfigError(msg)
    return [as_device(device) for device in devices]
