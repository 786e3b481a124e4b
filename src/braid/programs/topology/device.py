"""Devices as data sheets describe them, and what of that programs reach.

    seconds of an operation = max(FLOPs / (peak * share), bytes / (bandwidth * share)) + constant

The shares and the constant are an `Efficiency`. The default is fitted on 1,440 iterations of GPTs
on 2 to 8 A100, which Megatron trained (`python -m benchmarks plan --only device`; vTrain's table);
for other devices it is a guess, and predictions are labelled "estimated".

Source: S. Williams et al., Roofline, CACM 52 (2009); sheets of the vendor, as named beside each
device: peaks are dense, with accumulation in float32.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from braid.errors import ConfigError

__all__ = ["DEVICES", "DTYPES", "Device", "Efficiency", "find_device"]

DTYPES = {"fp32": 4, "bf16": 2, "fp16": 2}  # bytes of an element
# words of a product's name that do not affect its speed; other variants of a chip do
NAME_ONLY = {"nvidia", "tesla", "geforce", "sxm2", "sxm3", "sxm4", "hbm3"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """Shares of a device's data sheet figures that programs reach, and constant overheads.

    Attributes:
        flops: Share of the peak FLOPs that a large matrix product reaches.
        memory: Share of the memory bandwidth that programs reach.
        link: Share of the bandwidth of a link between devices that messages reach.
        operation_s: Overhead of an operation in seconds: its launch, and Python code around it.
        message_s: Overhead of each message of a collective in seconds, besides the link's latency.
        transfer_s: Overhead of a message between pipeline stages in seconds.
        step_s: Constant overhead of a step in seconds.
    """

    flops: float = 0.85
    memory: float = 0.98
    link: float = 1.0
    operation_s: float = 58e-6
    message_s: float = 38e-6
    transfer_s: float = 1e-3
    step_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Data sheet of a device, such as a GPU.

    Attributes:
        name: Name.
        flops_per_s: Peak FLOPs per second of matrix products, by dtype.
        bytes_per_s: Bandwidth of its memory.
        memory_bytes: Size of its memory.
        overlap: Share of a gradient's all-reduce that can overlap with a backward.
        efficiency: Shares of these figures that programs reach.
        source: Origin of the figures.
    """

    name: str
    flops_per_s: Mapping[str, float]
    bytes_per_s: float
    memory_bytes: float
    overlap: float = 0.8
    efficiency: Efficiency = field(default_factory=Efficiency)
    source: str = ""

    def peak(self, dtype: str) -> float:
        """Return the peak FLOPs per second of matrix products of a dtype.

        Raises:
            ConfigError: The peak is not known for this dtype.
        """
        if dtype not in self.flops_per_s:
            known = ", ".join(self.flops_per_s)
            msg = (
                f"the peak of {self.name} with {dtype} is not known: use {known}, or describe "
                "the device in a [device] table of the cluster file"
            )
            raise ConfigError(msg)
        return self.flops_per_s[dtype]


def _device(
    name: str, fp32: float, half: float, bandwidth: float, memory: float, source: str
) -> Device:
    """Make a device of TFLOP/s, of float32 and of 16 bits, GB/s and GB."""
    peaks = {"fp32": fp32 * 1e12, "bf16": half * 1e12, "fp16": half * 1e12}
    return Device(
        name=name,
        flops_per_s=peaks,
        bytes_per_s=bandwidth * 1e9,
        memory_bytes=memory * 1e9,
        source=source,
    )


DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        _device("p100-16gb", 10.6, 21.2, 732, 16, "NVIDIA Tesla P100 data sheet, 2016"),
        _device("v100-16gb", 15.7, 125, 900, 16, "NVIDIA V100 data sheet, 2020"),
        _device("v100-32gb", 15.7, 125, 900, 32, "NVIDIA V100 data sheet, 2020"),
        _device("t4", 8.1, 65, 320, 16, "NVIDIA T4 data sheet, 2019"),
        _device("a100-40gb", 19.5, 312, 1555, 40, "NVIDIA A100 data sheet, 2020"),
        _device("a100-80gb", 19.5, 312, 2039, 80, "NVIDIA A100 80GB data sheet, 2021"),
        _device("l4", 30.3, 121, 300, 24, "NVIDIA L4 data sheet, 2023"),
        _device("rtx4090", 82.6, 165, 1008, 24, "NVIDIA Ada architecture paper, 2022"),
        _device("h100-80gb", 67, 989, 3350, 80, "NVIDIA H100 SXM data sheet, 2023"),
        _device("h200", 67, 989, 4800, 141, "NVIDIA H200 data sheet, 2024"),
    )
}


def find_device(name: str) -> Device | None:
    """Return the device that a driver calls `name`; None if the table does not list it.

    >>> find_device("NVIDIA H100 80GB HBM3").name
    'h100-80gb'
    >>> find_device("NVIDIA H100 PCIe") is None  # slower than the SXM module of the table
    True
    """
    words = {*re.findall(r"[a-z0-9]+", name.lower().replace("rtx ", "rtx"))} - NAME_ONLY
    return next((d for key, d in DEVICES.items() if words == {*key.split("-")}), None)
