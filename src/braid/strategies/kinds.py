"""The strategies that keep a copy of the model in each replica."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from braid.comm import Group
from braid.context import init
from braid.errors import ConfigError
from braid.parallel.data_parallel.devices import DeviceLike, as_device
from braid.parallel.gradients.incomplete import params_of
from braid.strategies.cluster import (
    ClusterResolver,
    LaunchedClusterResolver,
    resolver_of_tf_config,
)
from braid.strategies.communication import (
    CommunicationOptions,
    CrossDeviceOps,
    NcclAllReduce,
)
from braid.strategies.nccl_average import NcclAverage
from braid.strategies.replica_objects import ReplicaObjects
from braid.strategies.replicas import OneRank, ThreadReplicas
from braid.strategies.strategy import Strategy

__all__ = [
    "CentralStorageStrategy",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
]


class OneDeviceStrategy(Strategy):
    """Strategy with one replica on one device, as a reference for other strategies.

    Args:
        device: Device of the replica.

    Raises:
        ConfigError: The device does not exist.
    """

    def __init__(self, device: DeviceLike = "cpu") -> None:
        super().__init__(ThreadReplicas([as_device(device)]))


class MirroredStrategy(Strategy):
    """One replica on each of several devices of this process; each runs on a thread.

    Args:
        devices: Devices; one may occur several times, such as the CPU. All GPUs when None, or the
            CPU if there are none.
        cross_device_ops: Sizes of the buckets of gradients, by TensorFlow's names, or NCCL; braid's
            sizes when None.

    Raises:
        ConfigError: A device does not exist, or `cross_device_ops` does not support the devices.

    Random numbers:
        Replicas on the CPU share one default generator, and draw from it in an order that may
        differ between runs.
    """

    def __init__(
        self,
        devices: Sequence[DeviceLike] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
    ) -> None:
        ops = CrossDeviceOps() if cross_device_ops is None else cross_device_ops
        replicas = ThreadReplicas(_devices(devices))
        ops.check(replicas.devices)
        self._has_nccl = isinstance(ops, NcclAllReduce)
        super().__init__(replicas, bucket_cap_mb=ops.bucket_cap_mb)

    def _average(
        self, objects: ReplicaObjects, index: int, group: Group, optimizer: Any, named: list[Any]
    ) -> Sequence[Any]:
        if self._has_nccl:
            merge = partial(self._replicas.merge, index)
            return NcclAverage(dict(named), merge, group.size).hooks
        return super()._average(objects, index, group, optimizer, named)


class CentralStorageStrategy(Strategy):
    """Variables and optimizer state on one device of this process, computation on all.

    Each replica computes with a copy of the variables. One optimizer steps, on the first device,
    with the average of the gradients; then the other replicas receive the variables. The weights
    are equal to the weights with `MirroredStrategy`; the state of the optimizer is on one device.

    Args:
        compute_devices: Devices of the replicas; see `MirroredStrategy`.
        parameter_device: Device of the variables, one of the compute devices; the first when None.

    Raises:
        ConfigError: A device does not exist, or `parameter_device` is not a compute device.

    Cost per step: the average of the gradients, and one broadcast of the parameters.
    """

    def __init__(
        self,
        compute_devices: Sequence[DeviceLike] | None = None,
        parameter_device: DeviceLike | None = None,
    ) -> None:
        devices = _devices(compute_devices)
        if parameter_device is not None:
            first = as_device(parameter_device)
            if first not in devices:
                msg = (
                    f"the parameter device {first} is not one of the compute devices "
                    f"{', '.join(map(str, devices))}: name one of them"
                )
                raise ConfigError(msg)
            devices.remove(first)
            devices.insert(0, first)
        super().__init__(ThreadReplicas(devices))

    def _average_gradients(
        self, objects: ReplicaObjects, index: int, group: Group, hooks: list[Any]
    ) -> None:
        super()._average_gradients(objects, index, group, hooks)
        for optimizer in objects.optimizers:
            central = _CentralStep(group)
            hooks += [
                optimizer.register_step_pre_hook(central.before),
                optimizer.register_step_post_hook(central.after),
            ]


class _CentralStep:
    """Steps with the first replica's optimizer only; the others receive the parameters."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._grads: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def before(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Hide the gradients from the optimizer, unless it is the first replica's."""
        if len(args) > 1 or kwargs.get("closure") is not None:
            msg = (
                f"{type(optimizer).__name__}.step(closure) is not supported in a "
                "CentralStorageStrategy, where one optimizer updates all replicas: use "
                "MirroredStrategy"
            )
            raise ConfigError(msg)
        if self._group.rank == 0:
            return
        params = params_of(optimizer)
        self._grads = [(param, param.grad) for param in params]
        for param in params:
            param.grad = None

    def after(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Send the first replica's parameters to the other replicas, after an optimizer's step."""
        for param in params_of(optimizer):
            self._group.broadcast(param.detach(), 0)
        for param, grad in self._grads:
            param.grad = grad
        self._grads = []


class MultiWorkerMirroredStrategy(Strategy):
    """One replica in each process; a launcher or `TF_CONFIG` defines the processes.

    Args:
        cluster_resolver: Resolver for the processes. When None, TF_CONFIG is read if it is set,
            else the launcher's environment variables.
        device: Device of this process's replica: by default its GPU, or the CPU if there is none.
        communication_options: Sizes of the buckets of gradients, deadline and engine.
        group: Group of the replicas; the group that `braid.init()` returns when None.

    Raises:
        ConfigError: TF_CONFIG, the launcher's variables or the options are not valid.
        RendezvousError: Some processes did not arrive in time; the message names them.
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
            cluster_resolver = resolver_of_tf_config() or LaunchedClusterResolver()
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
