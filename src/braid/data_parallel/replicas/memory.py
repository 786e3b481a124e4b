"""What each device holds when several replicas train in one process.

The first device is always the fullest: it has the parameters, their gradients and, if outputs are gathered, those of the whole
batch. This shows it in bytes, so that one sees what `criterion=` saves and how large the share of the others could be.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from braid.data_parallel.outputs import tensors_in

__all__ = ["DeviceMemory", "LastForward", "MemoryReport", "memory_of"]

WIDTH = 120  # of the table as text; it is narrower
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class DeviceMemory(NamedTuple):
    """Bytes on one device.

    Attributes:
        device: Its name.
        num_replicas: That the last forward ran there.
        parameters: Of the module itself, with its buffers.
        gradients: Of its trained parameters, once backward has left them there. Those of replicas live for a moment only.
        replicas: Copies of parameters and buffers.
        inputs: Shares of the batch; on the device of the batch these are views.
        outputs: What the replicas returned.
        gathered: What DataParallel returned, where that is not an output as it was.
    """

    device: str
    num_replicas: int = 0
    parameters: int = 0
    gradients: int = 0
    replicas: int = 0
    inputs: int = 0
    outputs: int = 0
    gathered: int = 0

    @property
    def total(self) -> int:
        """All of them; activations, which are proportional to the share, come on top."""
        return sum(self[2:])


class MemoryReport(NamedTuple):
    """Bytes on every device; printed as a table.

    Attributes:
        rows: In the order of the devices.
    """

    rows: tuple[DeviceMemory, ...]

    @property
    def imbalance(self) -> float:
        """Bytes of the fullest device over those of the emptiest; infinite if that one has nothing."""
        totals = [row.total for row in self.rows]
        least, most = min(totals, default=0), max(totals, default=0)
        if least == most:
            return 1.0
        return most / least if least else math.inf

    def __rich__(self) -> Table:
        """For consoles of rich."""
        names = DeviceMemory._fields[2:]
        table = Table(box=None, pad_edge=False)
        table.add_column("device", no_wrap=True)
        for name in ("replicas run", *names, "total"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in self.rows:
            sizes = [bytes_text(nbytes) for nbytes in (*row[2:], row.total)]
            table.add_row(row.device, str(row.num_replicas), *sizes)
        return table

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=WIDTH, color_system=None).print(self)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


class LastForward(NamedTuple):
    """Bytes by device that only a forward knows.

    Attributes:
        num_replicas: Not bytes: how many ran there.
        replicas: Copies of parameters and buffers.
        inputs: Shares.
        outputs: Of replicas.
        gathered: Returned.
    """

    num_replicas: Mapping[str, int]
    replicas: Mapping[str, int]
    inputs: Mapping[str, int]
    outputs: Mapping[str, int]
    gathered: Mapping[str, int]

    @classmethod
    def of(
        cls,
        module: nn.Module,
        devices: Sequence[torch.device],
        replicas: Sequence[nn.Module],
        shares: Any,
        outputs: Any,
        *,
        gathered: Any,
    ) -> LastForward:
        """Count one."""
        copied = [replica for replica in replicas if replica is not module]
        own = {_storage(x) for x in _held(module)} if copied else set()
        copies = {_storage(x): x for replica in copied for x in _held(replica)}
        returned = {_storage(x) for x in tensors_in(outputs)}
        counts = [str(device) for device in devices[: len(replicas)]]
        return cls(
            {name: counts.count(name) for name in counts},
            bytes_by_device(x for key, x in copies.items() if key not in own),
            bytes_by_device(tensors_in(shares)),
            bytes_by_device(tensors_in(outputs)),
            bytes_by_device(x for x in tensors_in(gathered) if _storage(x) not in returned),
        )


NOTHING_YET = LastForward({}, {}, {}, {}, {})


def memory_of(
    module: nn.Module,
    devices: Iterable[torch.device],
    last: LastForward = NOTHING_YET,
) -> MemoryReport:
    """The report.

    Args:
        module: The one that is replicated.
        devices: Of replicas, and that of outputs.
        last: Forward.
    """
    parameters = bytes_by_device(_held(module))
    gradients = bytes_by_device(x for x in module.parameters() if x.requires_grad)
    rows = (
        DeviceMemory(
            name,
            last.num_replicas.get(name, 0),
            *(
                by_device.get(name, 0)
                for by_device in (parameters, gradients, last.replicas, last.inputs)
            ),
            *(by_device.get(name, 0) for by_device in (last.outputs, last.gathered)),
        )
        for name in dict.fromkeys(str(device) for device in devices)
    )
    return MemoryReport(tuple(rows))


def bytes_by_device(tensors: Iterable[torch.Tensor]) -> dict[str, int]:
    """Bytes of tensors, each counted once, by the name of their device."""
    counted: dict[str, int] = {}
    for x in {id(x): x for x in tensors}.values():
        counted[str(x.device)] = counted.get(str(x.device), 0) + x.numel() * x.element_size()
    return counted


def bytes_text(nbytes: int) -> str:
    """`1.5 MiB`."""
    size, unit = float(nbytes), 0
    while size >= 1024 and unit < len(UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.1f} {UNITS[unit]}" if unit else f"{nbytes} B"


def _held(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _storage(x: torch.Tensor) -> tuple[str, int]:
    """The same for tensors that share their memory; tensors without memory are each their own."""
    address = x.untyped_storage().data_ptr() if x.layout == torch.strided else 0
    return str(x.device), address or id(x)
