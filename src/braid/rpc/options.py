"""Options of a node of remote calls, and the devices on which its tensors arrive at peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from braid.errors import ConfigError
from braid.rpc.outcomes import RpcError
from braid.rpc.workers import WorkerRecord

__all__ = ["DEFAULT_TIMEOUT_S", "RpcOptions", "place_of", "placed"]

DEFAULT_TIMEOUT_S = 60.0


@dataclass(kw_only=True)
class RpcOptions:
    """Options of a node of remote calls, for `init_rpc`.

    Attributes:
        num_worker_threads: Calls of peers that run at the same time.
        rpc_timeout: Seconds after which a call fails; 0 for never.
        init_method: Place at which nodes meet: "env://", "tcp://host:port" or "file:///path".
        device_maps: For each peer, a map from this node's devices to the peer's devices.
        devices: Devices that this node uses.
        allowed_modules: Further modules, beside the program's, that peers may use.
        allow_pickle: Whether values without another form are pickled. Peers can then run any code;
            refused on a network without authentication.
        shared_memory: Whether large tensors pass through shared memory inside a host.
        max_unanswered: Maximum number of unanswered calls to one peer; further calls block, which
            bounds the callee's queue.
    """

    num_worker_threads: int = 16
    rpc_timeout: float = DEFAULT_TIMEOUT_S
    init_method: str = "env://"
    device_maps: dict[str, dict[str, str]] = field(default_factory=dict)
    devices: Sequence[str] = ()
    allowed_modules: Sequence[str] = ()
    allow_pickle: bool = False
    shared_memory: bool = True
    max_unanswered: int = 4096

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.max_unanswered < 1 or self.num_worker_threads < 1:
            msg = (
                "num_worker_threads and max_unanswered must be at least 1, got "
                f"{self.num_worker_threads} and {self.max_unanswered}"
            )
            raise ConfigError(msg)

    def set_device_map(self, to: str, device_map: Mapping[object, object]) -> None:
        """Set the device of node `to` for tensors from each device of this node."""
        named = {_device(here): _device(there) for here, there in device_map.items()}
        self.device_maps.setdefault(to, {}).update(named)


def _device(device: object) -> str:
    return f"cuda:{device}" if isinstance(device, int) else str(device)


def place_of(
    device: torch.device,
    sender: str,
    maps: Mapping[str, Mapping[str, str]],
    receiver: WorkerRecord,
) -> str:
    """Return the device on which a tensor arrives; empty for main memory.

    Args:
        device: Device of the tensor here.
        sender: Name of this node.
        maps: Device maps of this node, by the name of the receiving node.
        receiver: Record of the receiving node; its map to this node is inverted if `maps` has no
            entry, such as for gradients.

    Raises:
        ConfigError: Neither map has the device.
    """
    if device.type == "cpu":
        return ""
    there = maps.get(receiver.name, {}).get(str(device))
    if there is None:
        backwards = {b: a for a, b in receiver.device_maps.get(sender, {}).items()}
        there = backwards.get(str(device))
    if there is None:
        msg = (
            f"a tensor on {device} is not mapped to a device of {receiver.name}: call "
            f"set_device_map({receiver.name!r}, {{{str(device)!r}: ...}}) in the options, or "
            "pass tensor.cpu()"
        )
        raise ConfigError(msg)
    return there


def placed(tensor: torch.Tensor, device: str, sender: str) -> torch.Tensor:
    """Return a tensor that arrived in main memory on the device to which its sender maps it.

    The copy keeps the graph of a tensor that a context records, whatever thread unpacks it.

    Raises:
        RpcError: This process has no such GPU.
    """
    target = torch.device(device)
    num_gpus = torch.cuda.device_count()
    if target.type == "cuda" and (target.index or 0) >= num_gpus:
        msg = (
            f"{sender} maps a tensor to {device}, but this node, which received it, has "
            f"{num_gpus} GPUs: correct set_device_map in the options of {sender}"
        )
        raise RpcError(msg)
    if tensor.grad_fn is None:
        return tensor.detach().to(target).requires_grad_(tensor.requires_grad)
    with torch.enable_grad():
        return tensor.to(target)
