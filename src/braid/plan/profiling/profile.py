"""A profile: what each layer of a model costs, as a function of the rows of a micro-batch.

    time of n rows = constant + per_row * n

The constant matters: a layer takes some 10 us to start, however few rows it gets, so a batch that
is cut into more micro-batches takes longer. Bytes have a constant, too, such as masks.

A profile is a file: JSON, made by `braid profile`, read by `braid plan`.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from braid.errors import ConfigError
from braid.plan.pipedream.graph_text import ProfiledGraph, ProfiledNode

__all__ = [
    "FORMAT",
    "Curve",
    "HostProfile",
    "LayerProfile",
    "PerRows",
    "Profile",
    "fitted",
    "read_profile",
]


FORMAT: Final = 2  # increased with each change of a profile's meaning

Cost = Annotated[float, msgspec.Meta(ge=0)]


class PerRows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A cost that depends on the rows of a micro-batch.

    Attributes:
        constant: Part of the cost that does not depend on the rows.
        per_row: Cost of each row.
    """

    constant: Cost = 0.0
    per_row: Cost = 0.0

    def of(self, rows: float) -> float:
        """Return the cost for a number of rows."""
        return self.constant + self.per_row * rows


class LayerProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Costs of one layer.

    Attributes:
        name: Name in the model.
        kind: Class of the module.
        forward_s: Seconds of the forward.
        input_grad_s: Seconds to compute the gradients of the layer's inputs.
        weight_grad_s: Seconds to compute the gradients of the layer's weights.
        split_s: Additional seconds of a backward in two parts, to inputs and later to weights.
        saved_bytes: Bytes kept from forward to backward, including the output.
        output_bytes: Bytes of the output.
        param_bytes: Bytes of the parameters.
        flops_per_row: Floating point operations of the forward.
        params: Numbers of the layer's parameters; a tied parameter has the same number in all
            layers.
        reduces: Number of all-reduces of a forward, for a layer sharded over ranks.
        reduced_bytes: Total bytes of these all-reduces.
        workspace_bytes: Peak bytes of a backward in addition to the saved bytes.
        kv_bytes: Bytes of keys and values of the layer's attention; see `MicrobatchCost`.
        has_experts: Whether the layer has experts.
    """

    name: str
    kind: str
    forward_s: PerRows
    input_grad_s: PerRows
    weight_grad_s: PerRows
    saved_bytes: PerRows
    output_bytes: PerRows
    param_bytes: Annotated[int, msgspec.Meta(ge=0)]
    flops_per_row: Cost
    params: tuple[int, ...] = ()
    split_s: PerRows = PerRows()
    reduces: int = 0
    reduced_bytes: PerRows = PerRows()
    workspace_bytes: PerRows = PerRows()
    kv_bytes: PerRows = PerRows()
    has_experts: bool = False

    def backward_s(self, rows: float) -> float:
        """Return the seconds of the whole backward of `rows` rows."""
        return self.input_grad_s.of(rows) + self.weight_grad_s.of(rows)

    def intensity(self, rows: float) -> float:
        """Return the FLOPs of a forward of `rows` rows per byte that it must read and write."""
        moved = self.param_bytes + 2 * self.output_bytes.of(rows)
        return self.flops_per_row * rows / moved if moved else 0.0


class Curve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of an operation by its bytes, interpolated between measured points.

    Attributes:
        nbytes: Bytes of each point, ascending.
        seconds: Seconds of each point.
    """

    nbytes: tuple[Cost, ...]
    seconds: tuple[Cost, ...]

    def of(self, nbytes: float) -> float:
        """Return the seconds for a number of bytes; extrapolated above the last point."""
        if len(self.nbytes) < 2:
            return self.seconds[0] if self.seconds else 0.0
        upper = min(max(1, bisect(self.nbytes, nbytes)), len(self.nbytes) - 1)
        x0, x1 = self.nbytes[upper - 1 : upper + 1]
        y0, y1 = self.seconds[upper - 1 : upper + 1]
        return max(0.0, y0 + (y1 - y0) * (nbytes - x0) / (x1 - x0))


class HostProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Costs measured on one host while all of its ranks work.

    Attributes:
        ranks: Number of ranks.
        collectives: Seconds of each collective, by operation and group size, such as
            `all_reduce/2`. `push_pull/2` is a step with a parameter server, including the
            optimizer's step on the server.
        message: Seconds of a message from one rank to another.
        optimizer: Seconds of gradient clipping and a step of AdamW, by bytes of parameters.
        action_s: Overhead of each forward or backward in a pipeline, besides the layers' time.
        step_s: Constant overhead of a step in seconds.
        memory_bytes: Memory of the host for each rank.
        cores: Number of cores; 0 if it is not known.
    """

    ranks: Annotated[int, msgspec.Meta(ge=1)]
    collectives: dict[str, Curve]
    message: Curve
    optimizer: Curve
    action_s: Cost
    step_s: Cost
    memory_bytes: Cost
    cores: Annotated[int, msgspec.Meta(ge=0)] = 0


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Costs of all layers of a model, in order.

    Attributes:
        braid: Version of the format.
        model: Name of the model, and its size.
        device: Name of the device.
        threads: Threads of a rank.
        torch: Version of torch.
        rows: Rows of the micro-batches that were measured.
        layers: Layers, in order.
        context: Bytes of a sequence, for a GPT; 0 for another model.
        shared: Costs on one rank of layers that are sharded, by the number of ranks.
        host: Costs of this host with all ranks at work; None if they were not measured.
        dtype: Dtype of a GPT's matrix products; `bf16` is autocast.
        spread: Half of the range of the middle 80 % of the measured times of all layers together,
            relative to their mean; large on a busy host.
    """

    braid: Literal[2] = FORMAT
    model: str
    device: str
    threads: int
    torch: str
    rows: tuple[int, ...]
    layers: tuple[LayerProfile, ...]
    context: Annotated[int, msgspec.Meta(ge=0)] = 0
    shared: dict[int, tuple[LayerProfile, ...]] = {}
    host: HostProfile | None = None
    dtype: str = "fp32"
    spread: Annotated[float, msgspec.Meta(ge=0)] = 0.0

    def write(self, path: str | Path) -> None:
        """Write the profile as JSON."""
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1))

    def as_graph(self, rows: int) -> ProfiledGraph:
        """Return the costs for `rows` rows as a graph for PipeDream: a chain of nodes."""
        nodes = {
            f"node{number}": ProfiledNode(
                f"node{number}",
                f"{layer.kind}({layer.name})",
                layer.forward_s.of(rows),
                layer.backward_s(rows),
                layer.output_bytes.of(rows),
                layer.param_bytes,
                saved_bytes=layer.saved_bytes.of(rows),
            )
            for number, layer in enumerate(self.layers, 1)
        }
        edges: dict[str, tuple[str, ...]] = dict.fromkeys(nodes, ())
        edges |= {one: (other,) for one, other in pairwise(nodes)}
        return ProfiledGraph(nodes, edges)


def fitted(rows: Sequence[int], costs: Sequence[float]) -> PerRows:
    """Fit a cost to measurements with different numbers of rows: a line, never below zero.

    >>> fitted([2, 4], [5.0, 7.0])
    PerRows(constant=3.0, per_row=1.0)
    >>> fitted([2, 4], [5.0, 4.0])
    PerRows(constant=4.5, per_row=0.0)
    """
    count = len(rows)
    mean_rows, mean = sum(rows) / count, sum(costs) / count
    spread = sum((x - mean_rows) ** 2 for x in rows)
    along = sum((x - mean_rows) * (y - mean) for x, y in zip(rows, costs, strict=True))
    slope = max(0.0, along / spread) if spread else 0.0
    constant = mean - slope * mean_rows
    if constant < 0 or not spread:  # through the origin
        return PerRows(0.0, sum(costs) / sum(rows))
    return PerRows(constant, slope)


def read_profile(path: str | Path) -> Profile:
    """Read a profile that `braid profile` has written.

    Raises:
        ConfigError: The file cannot be read, or is not a profile; the message names the error.
    """
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Profile)
    except OSError as exc:
        msg = f"cannot read {path}: {exc.strerror}"
        raise ConfigError(msg) from exc
    except msgspec.MsgspecError as exc:
        msg = f"{path} is not a profile: {str(exc)[:200]}. Make one with `braid profile`"
        raise ConfigError(msg) from exc
