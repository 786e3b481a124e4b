"""The options of torch.distributed.rpc, and three more that say what peers may do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from braid.compat.torch_rpc.rpc import constants
from braid.errors import ConfigError
from braid.rpc.options import RpcOptions

__all__ = ["RpcBackendOptions", "TensorPipeRpcBackendOptions"]

RpcBackendOptions = RpcOptions
Device = int | str | torch.device


class TensorPipeRpcBackendOptions(RpcOptions):
    """Options of a node, with torch's names.

    Args:
        num_worker_threads: Number of calls from peers that run at the same time.
        rpc_timeout: Seconds after which a call fails; 0 for never.
        init_method: Address of the rendezvous: "env://", "tcp://host:port" or "file:///path".
        device_maps: For each other node, a map from this node's devices to that node's devices.
        devices: GPUs that this node uses.
        allowed_modules: Modules with functions and classes that peers may use, in addition to the
            program's modules.
        allow_pickle: Whether values without another format are pickled, as in torch. Peers can then
            run any code; refused on a network without authentication.
        shared_memory: Whether large tensors are sent through shared memory on one host.

    Raises:
        ConfigError: A device is not a GPU, or a map has the same target for two devices.
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = constants.DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, Mapping[Device, Device]] | None = None,
        devices: Sequence[Device] | None = None,
        allowed_modules: Sequence[str] = (),
        allow_pickle: bool = False,
        shared_memory: bool = True,
        _transports: object = None,
        _channels: object = None,
    ) -> None:
        del _transports, _channels  # options of TensorPipe
        if isinstance(rpc_timeout, bool) or not isinstance(rpc_timeout, int | float):
            msg = f"rpc_timeout is a number of seconds, got {rpc_timeout!r}"
            raise TypeError(msg)
        super().__init__(
            num_worker_threads=num_worker_threads,
            rpc_timeout=rpc_timeout,
            init_method=init_method,
            allowed_modules=allowed_modules,
            allow_pickle=allow_pickle,
            shared_memory=shared_memory,
        )
        for to, device_map in (device_maps or {}).items():
            self.set_device_map(to, device_map)
        self.set_devices(devices or ())

    def set_device_map(self, to: str, device_map: Mapping[Device, Device]) -> None:  # type: ignore[override]
        """Map devices of this node to devices of the node `to`, for tensors that are sent there."""
        named = {_name(here): _name(there) for here, there in device_map.items()}
        merged = {**self.device_maps.get(to, {}), **named}
        by_place: dict[str, str] = {}
        for here, there in merged.items():
            first = by_place.setdefault(there, here)
            if first != here:
                msg = (
                    "`set_device_map` only supports 1-to-1 mapping, but it has both "
                    f"{first} and {here} for {there} of {to}"
                )
                raise ConfigError(msg)
        self.device_maps[to] = merged

    def set_devices(self, devices: Sequence[Device]) -> None:
        """Set the GPUs that this node uses."""
        for device in devices:
            if torch.device(_name(device)).type != "cuda":
                msg = f"`set_devices` expect a list of CUDA devices, got {device}"
                raise ConfigError(msg)
        self.devices = [_name(device) for device in devices]


def _name(device: Device) -> str:
    return str(torch.device("cuda", device) if isinstance(device, int) else torch.device(device))
