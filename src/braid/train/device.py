"""The device of a rank: chosen once when a rank starts, then passed to everything that computes.

    --device    no GPU         GPUs g of a host, rank with the local rank r
    auto        cpu            cuda:(r mod g)
    cpu         cpu            cpu
    cuda        ConfigError    cuda:(r mod g)

If a host has fewer GPUs than ranks, ranks share a GPU, and its peak is divided by their number.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from braid.comm.autograd.layer_costs import seconds_of
from braid.errors import ConfigError
from braid.plan.find import DTYPES
from braid.programs.topology import find_device
from braid.runtime.clock import Clock

__all__ = ["CPU", "RankDevice", "choose_device", "compute_deterministically"]

PROBE_SIZES = {
    "cpu": 512,
    "cuda": 4096,
}  # a GPU computes longer than a launch takes
PROBE_RUNS = 12
MEASURED = "measured with matrix products on all of them"


class RankDevice(NamedTuple):
    """A rank with the device on which it trains.

    Attributes:
        device: Device on which the rank computes.
        num_ranks: Number of ranks of this host that compute on the device.
    """

    device: torch.device
    num_ranks: int = 1

    @property
    def name(self) -> str:
        """Name of the device: cpu, or the GPU's product name."""
        if self.device.type != "cuda":
            return self.device.type
        return torch.cuda.get_device_name(self.device)

    def make_current(self) -> None:
        """Make a GPU the current device of this thread."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def peak(self, dtype: str, clock: Clock) -> tuple[float, str]:
        """Return the peak of this rank in operations per second, and its source.

        The peak comes from the data sheet if `programs.topology` lists the device. Else it is the
        rate of the fastest of several matrix products, which all ranks measure at the same time.
        """
        if known := find_device(self.name):
            return known.peak(dtype) / self.num_ranks, f"{known.source}, {dtype}"
        size = PROBE_SIZES[self.device.type]
        a = torch.ones(size, size, dtype=DTYPES[dtype], device=self.device)
        best_s = min(seconds_of(lambda: a @ a, [self.device], clock)[1] for _ in range(PROBE_RUNS))
        return 2 * size**3 / max(best_s, 1e-9), MEASURED


CPU = RankDevice(torch.device("cpu"))


def choose_device(wanted: str, local_rank: int = 0, local_size: int = 1) -> RankDevice:
    """Return the device of a rank by the table in the module's docstring.

    Args:
        wanted: `auto`, `cpu` or `cuda`.
        local_rank: Index of the rank among the ranks of this host that compute.
        local_size: Number of these ranks.

    Raises:
        ConfigError: `cuda` is wanted, and torch sees no GPU.
    """
    count = 0 if wanted == "cpu" else torch.cuda.device_count()
    if wanted == "cuda" and not count:
        msg = (
            "--device cuda: torch sees no GPU on this machine. Use --device cpu, or check "
            "CUDA_VISIBLE_DEVICES and the line GPUs of `braid doctor`"
        )
        raise ConfigError(msg)
    if not count:
        return CPU
    index = local_rank % count
    return RankDevice(torch.device("cuda", index), max(1, len(range(index, local_size, count))))


def compute_deterministically() -> None:
    """Select deterministic algorithms; call it before the first operation.

    Torch would also fill new memory first, in up to a tenth of a step. braid's operations write
    their memory before they read it, so this changes no result.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS raises without it
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
