"""Balance: the number of layers of each stage, by the time or the memory of layers.

    balance = balance_by_time(4, model, batch)       # of the whole batch, or of a micro-batch
    print(balance)                                   # bars by stage and layer
    pipeline = Pipeline(model, balance=balance, ...)

Layers are measured in sequence on a sample, each on the output of the previous layer, so shapes,
containers, dtypes and skip connections are the same as in training. Afterwards modes, devices,
gradients, buffers and torch's random generators are restored.

`block_partition` then minimizes the cost of the heaviest stage. Measure on one rank, and broadcast
the result, because times differ between ranks.

Source: C. Kim et al., torchgpipe (2020), with functions of these names and measurements; there
`balance_by_size` runs one row and needs CUDA, here it runs a micro-batch on any device.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from rich.cells import cell_len, set_cell_size
from torch import nn

from braid.comm.autograd.layer_costs import seconds_of
from braid.comm.autograd.nested import tensors_in
from braid.errors import ConfigError
from braid.parallel.pipeline.block_partition import block_partition
from braid.parallel.pipeline.cutting import layers_of
from braid.parallel.pipeline.layer_runs import Run, Skips, as_they_were, bytes_of_layer, run_all
from braid.parallel.pipeline.microbatches import num_rows, scatter, sizes_of
from braid.runtime.clock import Clock, MonotonicClock
from braid.runtime.text import seconds_text

__all__ = ["Balance", "balance_by_size", "balance_by_time"]

Layers = nn.Sequential | Sequence[nn.Module]
WIDTH = 30  # characters of the longest bar
EIGHTHS = " ▏▎▍▌▋▊▉"
MOST_NAME = 40  # characters of a layer's name
KIB = 1024


@dataclass(frozen=True)
class Balance(Sequence[int]):
    """Number of layers of each stage, and the costs from which they were computed.

    Attributes:
        sizes: Number of layers, by stage.
        names: Name and type of each layer.
        costs: Cost of each layer.
        unit: Unit of costs: `s` or `bytes`.
    """

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    costs: tuple[float, ...]
    unit: str

    @property
    def stage_costs(self) -> list[float]:
        """Total cost of the layers of each stage."""
        ends = itertools.accumulate(self.sizes)
        return [
            math.fsum(self.costs[end - size : end])
            for size, end in zip(self.sizes, ends, strict=True)
        ]

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return self.sizes[index]

    def __len__(self) -> int:
        return len(self.sizes)

    def __str__(self) -> str:
        """Draw a bar for each stage and layer; the heaviest stage is marked."""
        return _bars(self)


def balance_by_time(
    num_parts: int,
    layers: Layers,
    sample: Any,
    *,
    timeout_s: float = 1.0,
    device: torch.device | str | None = None,
    clock: Clock | None = None,
) -> Balance:
    """Balance layers by the time of their forward and backward.

    All layers run in several rounds, until the timeout; the cost is the median over the rounds
    after the first.

    Args:
        num_parts: Number of stages.
        layers: The model: an `nn.Sequential`, a list of modules, or segments of a captured model.
        sample: Input of the first layer, best a micro-batch; it is not changed.
        timeout_s: Seconds after which no further round begins. At least one round is timed.
        device: Device to measure on; a layer is moved to it only while it runs. None for the
            layers' device.
        clock: Clock for the times.

    Raises:
        ConfigError: There are fewer layers than parts, or a layer fails on the sample.
    """
    clock = clock or MonotonicClock()
    named = _named(layers, num_parts)
    times: list[list[float]] = []
    start_ns = clock.now_ns()
    with as_they_were([layer for _, layer in named], sample):
        while len(times) < 2 or clock.now_ns() - start_ns < timeout_s * 1e9:
            seconds: list[float] = []
            run_all(named, sample, device, _timed(seconds, clock))
            times.append(seconds)
    costs = [statistics.median(layer_times) for layer_times in zip(*times[1:], strict=True)]
    return _balance(num_parts, named, costs, "s")


def balance_by_size(
    num_parts: int,
    layers: Layers,
    sample: Any,
    *,
    num_microbatches: int = 1,
    param_scale: float = 2.0,
    device: torch.device | str | None = None,
) -> Balance:
    """Balance layers by the memory that they take in training.

    The cost of a layer is the bytes that it saves of a micro-batch from forward to backward,
    including its output, plus `param_scale` times the bytes of its parameters. A parameter that
    several layers use counts for each of them, because stages have separate copies.

    Args:
        num_parts: Number of stages.
        layers: The model; see `balance_by_time`.
        sample: A batch; it is not changed.
        num_microbatches: Number of micro-batches of this batch.
        param_scale: Copies of a parameter, including gradient and optimizer state: 2 for SGD, 3
            with momentum, 4 for Adam.
        device: Device to measure on; see `balance_by_time`.

    Raises:
        ConfigError: There are fewer layers than parts, options are not positive, or a layer fails
            on the sample.
    """
    if num_microbatches < 1 or not 0 <= param_scale < math.inf:
        msg = (
            "num_microbatches must be at least 1 and param_scale not negative, got "
            f"{num_microbatches} and {param_scale}"
        )
        raise ConfigError(msg)
    named = _named(layers, num_parts)
    sizes = sizes_of(num_rows(sample), num_microbatches)
    if not sizes:
        msg = "a batch of 0 rows has no activations to measure: give a sample with rows"
        raise ConfigError(msg)
    costs: list[float] = []
    with as_they_were([layer for _, layer in named], sample):
        run_all(named, scatter(sample, sizes)[0], device, _sized(costs, param_scale))
    return _balance(num_parts, named, costs, "bytes")


def _balance(
    num_parts: int, named: Sequence[tuple[str, nn.Module]], costs: Sequence[float], unit: str
) -> Balance:
    names = tuple(f"{name} {type(layer).__name__}" for name, layer in named)
    return Balance(tuple(block_partition(costs, num_parts)), names, tuple(costs), unit)


def _named(layers: Layers, num_parts: int) -> list[tuple[str, nn.Module]]:
    named = (
        layers_of(layers)
        if isinstance(layers, nn.Module)
        else [(str(i), layer) for i, layer in enumerate(layers)]
    )
    block_partition([0] * len(named), num_parts)  # raises for invalid numbers before a run
    return named


def _timed(seconds: list[float], clock: Clock) -> Run:
    def run(layer: nn.Module, x: Any, skips: Skips) -> Any:
        devices = {t.device for t in (*tensors_in(x), *layer.parameters())}
        before = set(skips)
        output, forward_s = seconds_of(lambda: layer(x), devices, clock)
        made = [output, *(skips[key] for key in skips if key not in before)]
        ends = list({id(t): t for t in tensors_in(made) if t.requires_grad}.values())
        grads = [torch.ones_like(t) for t in ends]

        def backward() -> None:
            if ends:
                torch.autograd.backward(ends, grads)

        seconds.append(forward_s + seconds_of(backward, devices, clock)[1])
        return output

    return run


def _sized(costs: list[float], param_scale: float) -> Run:
    def run(layer: nn.Module, x: Any, skips: Skips) -> Any:
        output, saved_bytes, _ = bytes_of_layer(layer, x, skips)
        costs.append(saved_bytes + param_scale * sum(p.nbytes for p in layer.parameters()))
        return output

    return run


def _bars(balance: Balance) -> str:
    """Draw a bar for each stage, followed by a bar for each of its layers.

    stage 0  3 layers  12.1 ms  ██████████████████████████████
      0 Embedding       1.1 ms  ██▋
      1 Block           5.5 ms  █████████████▋
    """
    rows = list(_rows(balance))
    heaviest = max(balance.stage_costs, default=0.0)
    shown = [_text(cost, balance.unit) for _, cost, _ in rows]
    wide = min(MOST_NAME, max((cell_len(name) for name, _, _ in rows), default=0))
    right = max(map(len, shown), default=0)
    lines = []
    marks = balance.stage_costs.count(heaviest) < len(balance)
    for (name, cost, is_stage), text in zip(rows, shown, strict=True):
        bar = _bar(cost / heaviest if heaviest else 0.0)
        mark = "  heaviest" if marks and is_stage and cost == heaviest else ""
        lines.append(f"{set_cell_size(name, wide)}  {text:>{right}}  {bar}{mark}".rstrip())
    return "\n".join(lines)


def _rows(balance: Balance) -> Iterator[tuple[str, float, bool]]:
    """Yield name, cost, and whether it is a stage: each stage, followed by its layers."""
    layers = iter(zip(balance.names, balance.costs, strict=True))
    for stage, (size, cost) in enumerate(zip(balance, balance.stage_costs, strict=True)):
        yield f"stage {stage}  {size} layer{'s' * (size != 1)}", cost, True
        for name, layer_cost in itertools.islice(layers, size):
            yield f"  {name}", layer_cost, False


def _bar(share: float) -> str:
    eighths = round(share * WIDTH * 8)
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def _text(cost: float, unit: str) -> str:
    if unit == "s":
        return seconds_text(cost)
    for name in ("B", "KiB", "MiB"):
        if cost < KIB:
            return f"{cost:.0f} B" if name == "B" else f"{cost:.1f} {name}"
        cost /= KIB
    return f"{cost:.1f} GiB"
