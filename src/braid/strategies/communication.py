"""Options of the sums of gradients over replicas, by TensorFlow's names.

    MirroredStrategy(cross_device_ops=HierarchicalCopyAllReduce(num_packs=2))
    MultiWorkerMirroredStrategy(communication_options=CommunicationOptions(bytes_per_pack=1 << 20))

braid averages gradients in buckets while backward goes on, in the order of replicas, whatever the
name, except NCCL. So the names choose the sizes of buckets and which engine is asked for; weights
end with the same bits.

Source: TensorFlow 2.21, `tf.distribute.CrossDeviceOps` and `tf.distribute.experimental`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from braid.comm import Group
from braid.errors import ConfigError

__all__ = [
    "CommunicationOptions",
    "CrossDeviceOps",
    "HierarchicalCopyAllReduce",
    "NcclAllReduce",
    "ReductionToOneDevice",
]

IMPLEMENTATIONS = ("AUTO", "RING", "NCCL")
MIB = float(1 << 20)


@dataclass(frozen=True, slots=True)
class CrossDeviceOps:
    """Way in which replicas of one process combine gradients: the sizes of their buckets.

    Attributes:
        num_packs: Number of buckets of equal size, after a first one of at most 1 MiB that is sent
            early. 0 for one bucket per gradient, None for braid's bucket sizes.

    Raises:
        ConfigError: `num_packs` is negative.
    """

    num_packs: int | None = None

    def __post_init__(self) -> None:
        if self.num_packs is not None and self.num_packs < 0:
            msg = f"num_packs must be at least 0, got {self.num_packs}"
            raise ConfigError(msg)

    def check(self, devices: Sequence[torch.device]) -> None:
        """Raise ConfigError if replicas on these devices cannot combine gradients in this way."""

    def bucket_cap_mb(self, num_bytes: int) -> float | None:
        """Return the size of buckets in MiB, for `num_bytes` bytes of parameters."""
        if self.num_packs is None:
            return None
        return max(1.0, num_bytes / self.num_packs if self.num_packs else 1.0) / MIB


@dataclass(frozen=True, slots=True)
class HierarchicalCopyAllReduce(CrossDeviceOps):
    """All-reduce over memory of the host, in `num_packs` buckets.

    braid chooses between one and two phases by size anyway, so this only sets the buckets.
    """

    num_packs: int | None = 1


@dataclass(frozen=True, slots=True)
class ReductionToOneDevice(CrossDeviceOps):
    """The default: gradients are summed in replica order, as if on one device."""


@dataclass(frozen=True, slots=True)
class NcclAllReduce(CrossDeviceOps):
    """All-reduce of NCCL for each gradient at the end of backward; each replica has its own GPU."""

    def check(self, devices: Sequence[torch.device]) -> None:
        """Raise ConfigError if these devices cannot combine gradients in this way."""
        if len(set(devices)) < len(devices) or any(device.type != "cuda" for device in devices):
            names = ", ".join(map(str, devices))
            msg = (
                f"NcclAllReduce needs a GPU for each replica, got {names}: pass devices that are "
                "different GPUs, or leave cross_device_ops out"
            )
            raise ConfigError(msg)


@dataclass(frozen=True, kw_only=True, slots=True)
class CommunicationOptions:
    """Options of the all-reduce of gradients between processes.

    Attributes:
        bytes_per_pack: Maximum number of bytes in a bucket; 0 for braid's sizes.
        timeout_seconds: Seconds after which a collective raises CommTimeout; the group's timeout
            when None.
        implementation: `NCCL` or `RING` (braid's engine on the CPU) to require it; AUTO for NCCL
            where each process has a GPU.

    Raises:
        ConfigError: A number is negative, or the implementation is unknown.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: str = "AUTO"

    def __post_init__(self) -> None:
        if self.bytes_per_pack < 0:
            msg = f"bytes_per_pack must be at least 0, got {self.bytes_per_pack}"
            raise ConfigError(msg)
        if self._name not in IMPLEMENTATIONS:
            names = ", ".join(IMPLEMENTATIONS)
            msg = f"implementation must be one of {names}, got {self.implementation!r}"
            raise ConfigError(msg)

    @property
    def _name(self) -> str:
        """Name of the implementation, also of an enumeration of other systems."""
        return str(getattr(self.implementation, "name", self.implementation)).upper()

    def apply(self, group: Group, device: torch.device) -> None:
        """Set the group's deadline, and check that it has the implementation.

        Raises:
            ConfigError: The group has another engine for tensors of the device.
        """
        if self.timeout_seconds is not None:
            group.set_deadline(self.timeout_seconds)
        has_nccl = device.type == "cuda" and "cuda" in group.devices
        if self._name != "AUTO" and (self._name == "NCCL") != has_nccl:
            engine = "NCCL" if has_nccl else "braid's own engine"
            msg = (
                f"implementation {self._name} does not match {device}, where {engine} averages "
                "gradients: pass AUTO, or RING with device='cpu', or NCCL with a GPU per process"
            )
            raise ConfigError(msg)

    def bucket_cap_mb(self, num_bytes: int) -> float | None:
        """Return the size of buckets in MiB; None for braid's sizes."""
        del num_bytes
        return self.bytes_per_pack / MIB if self.bytes_per_pack else None
