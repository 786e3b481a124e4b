"""A profile as the planner asks for it: costs of layers and of ranks of this host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from braid.errors import ConfigError
from braid.plan.axes import sequence_axis
from braid.plan.costs import Axis, MicrobatchCost, Origin
from braid.plan.profiling.profile import Curve, HostProfile, LayerProfile, Profile

__all__ = ["MeasuredMachines", "MeasuredModel"]


class MeasuredModel:
    """Costs of a model that was profiled.

    Args:
        profile: The profile.
    """

    origin: Origin = "measured"
    expert_sizes: Sequence[int] = (1,)

    def __init__(self, profile: Profile) -> None:
        self.model, self.spread = profile.model, profile.spread
        has_attention = any(layer.kv_bytes.of(1) for layer in profile.layers)
        sequences = sequence_axis(profile.context, has_attention=has_attention)
        self.sequence_sizes = sequences.sizes
        self.left_out = [*sequences.left_out]
        if any(layer.has_experts for layer in profile.layers):
            self.left_out.append(
                "Axis ep is left out: a profile has no costs of messages to experts; plan with "
                "--cluster."
            )
        self._layers: dict[int, tuple[LayerProfile, ...]] = {1: profile.layers, **profile.shared}
        self._costs: dict[tuple[float, int], Sequence[MicrobatchCost]] = {}

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self._layers[1])

    @property
    def tensor_sizes(self) -> Sequence[int]:
        """Numbers of ranks over which the layers were sharded when they were profiled."""
        return sorted(self._layers)

    def layers(self, rows: float, tensor: int) -> Sequence[MicrobatchCost]:
        """Return the costs of all layers for a micro-batch; see `ModelCosts.layers`."""
        key = rows, tensor
        if key not in self._costs:
            self._costs[key] = [_cost(layer, rows) for layer in self._layers[tensor]]
        return self._costs[key]


def _cost(layer: LayerProfile, rows: float) -> MicrobatchCost:
    return MicrobatchCost(
        layer.forward_s.of(rows),
        layer.input_grad_s.of(rows),
        layer.weight_grad_s.of(rows),
        layer.saved_bytes.of(rows),
        layer.output_bytes.of(rows),
        layer.param_bytes,
        layer.params,
        layer.reduces,
        layer.reduced_bytes.of(rows),
        layer.workspace_bytes.of(rows),
        layer.kv_bytes.of(rows),
        split_s=layer.split_s.of(rows),
    )


class MeasuredMachines:
    """Measured costs of the ranks of this host, with all ranks at work.

    Args:
        host: Measurements, taken while all ranks worked.
        memory_bytes: Memory of a rank; an equal share of the host's memory if None.
    """

    origin: Origin = "measured"
    overlap = 0.0  # ranks of one host copy and add up with the cores that compute

    def __init__(self, host: HostProfile, memory_bytes: float | None = None) -> None:
        self.num_ranks = host.ranks
        self.memory_bytes = host.memory_bytes if memory_bytes is None else memory_bytes
        self.action_s, self.step_s = host.action_s, host.step_s
        self.ranks_per_core = max(1.0, host.ranks / host.cores) if host.cores else 1.0
        self.knows_servers = f"push_pull/{host.ranks}" in host.collectives
        self._host = host

    def collective_s(self, operation: str, axis: Axis, nbytes: float) -> float:
        """Return the seconds of a collective; see `Machines.collective_s`."""
        if axis.size == 1:
            return 0.0
        return self._curve(operation, axis.size).of(nbytes)

    def message_s(self, axis: Axis, nbytes: float) -> float:
        """Return the seconds of a message to the next rank of an axis; see `Machines.message_s`."""
        return self._host.message.of(nbytes) if axis.size > 1 else 0.0

    def optimizer_s(self, param_bytes: float) -> float:
        """Return the seconds of clipping and the optimizer's step; see `Machines.optimizer_s`."""
        return self._host.optimizer.of(param_bytes)

    def level_bytes(self, axis: Axis, sent: float) -> Mapping[str, float]:
        """Return the bytes on one link of each cluster level; see `Machines.level_bytes`."""
        return {"host": sent} if axis.size > 1 else {}

    def _curve(self, operation: str, size: int) -> Curve:
        name = f"{operation}/{size}"
        if name not in self._host.collectives:
            known = ", ".join(self._host.collectives)
            msg = (
                f"the profile has no {operation} of {size} ranks, only {known}: measure it with "
                "`braid profile`"
            )
            raise ConfigError(msg)
        return self._host.collectives[name]
