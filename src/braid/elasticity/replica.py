"""The model of a member in an epoch: whole, or a part on a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan
from typing import Any, Protocol

from braid.checkpoint import training_tensors
from braid.comm import Group
from braid.elasticity.gradient_sums import memory_for
from braid.elasticity.parts import TensorBox
from braid.elasticity.saving import TrainingCheckpoints
from braid.elasticity.state_transfer import TrainingState, check_same_training, transfer
from braid.elasticity.weight_digest import WeightBox, weight_digest
from braid.parallel.gradients import FlatBuffer, ParamRecord, ParamTable
from braid.runtime.tensor_buffers import checksum

__all__ = ["Replica", "WholeModel"]


class Replica(Protocol):
    """Interface of a member's model: whole, or a part on a mesh; kept over changes of members.

    Attributes:
        state: Objects that make up the state.
        group: Members that have the same parameters, and take micro-batches in turn.
        records: Parameters with gradients of this member's micro-batches.
        memory: Memory of the sums of gradients, for all epochs with these parameters.
        needs_all: Whether all members of `group` run every round, even those without a micro-batch.
        has_times: Whether the time that this member computes is known. It is not known if GPUs wait
            for other members.
    """

    state: TrainingState
    group: Group
    records: Sequence[ParamRecord]
    memory: list[FlatBuffer]
    needs_all: bool
    has_times: bool

    @property
    def spent_ns(self) -> int:
        """Nanoseconds that this member has spent in the communication of micro-batches."""

    @property
    def part_names(self) -> Sequence[str]:
        """Names of the parts of the state on this member; none if no member keeps copies."""

    def enter(
        self,
        group: Group,
        num_steps: Sequence[int],
        progress: dict[str, Any],
        checkpoints: TrainingCheckpoints,
    ) -> None:
        """Continue with these members, from the newest state; a collective.

        Args:
            group: The members.
            num_steps: Number of steps that each member's state includes; -1 for a newcomer.
            progress: Further values of this member, such as its position in the data; replaced
                together with the state.
            checkpoints: Checkpoints to load if no member has the state.
        """

    def weights(self, num_steps: int) -> dict[str, float]:
        """Return a digest of this member's share of the weights; see `weight_digest`."""

    def digests(self) -> dict[str, int]:
        """Return digests of this member's part of the model; equal names have equal values."""

    def begin(self, number: int) -> None:
        """Begin the micro-batch with this number, counted over all steps."""

    def note_sent(self, sums: dict[int, float] | None) -> None:
        """Add checksums of the values that this member sends in micro-batches to `sums`.

        Args:
            sums: Checksums by place in the order of computation; None to compute none.
        """

    def prepare(self) -> float:
        """Prepare the mean gradients for the update, such as by clipping; a collective.

        Returns:
            Norm of the gradients, if it was computed; else NaN.
        """

    def agree(self, *, flag: bool) -> bool:
        """Wait until all members have what their updates need; a collective.

        If it fails on a member, other members may have continued. The update itself is local.

        Args:
            flag: Whether any member of `group` has raised a flag.

        Returns:
            Whether any member has raised a flag.
        """

    def updated(self) -> None:
        """Record that the update has been made; not a collective."""

    def share(self) -> None:
        """Give all members the parameters that others have updated; a collective."""


class WholeModel:
    """Replica for members that each hold the whole model.

    Args:
        state: Objects that make up the state.
    """

    needs_all = False
    has_times = True
    spent_ns = 0
    part_names: Sequence[str] = ("whole",)
    group: Group

    def __init__(self, state: TrainingState) -> None:
        self.state = state
        self.records: Sequence[ParamRecord] = ParamTable.of(state.model).records
        self.memory = memory_for(self.records)

    def enter(
        self,
        group: Group,
        num_steps: Sequence[int],
        progress: dict[str, Any],
        checkpoints: TrainingCheckpoints,
    ) -> None:
        """Continue with these members from the newest state; see `Replica.enter`."""
        self.group = group
        check_same_training(group, num_steps, self.state, progress)
        newest: Mapping[str, Any] = progress
        if max(num_steps) < 0:
            newest = checkpoints.load(group, self.state) or progress
        progress.update(transfer(group, num_steps, self.state, newest))

    def weights(self, num_steps: int) -> dict[str, float]:
        """Return a digest of this member's part of the rows; see `Replica.weights`."""
        rank, size = self.group.rank, self.group.size
        boxes = []
        for name, param in self.state.model.named_parameters():
            rows = param.detach() if param.dim() else param.detach().view(1)
            first, end = (len(rows) * number // size for number in (rank, rank + 1))
            offset = (first, *(0 for _ in rows.shape[1:]))
            box = TensorBox.all_of(rows[first:end])._replace(whole=tuple(rows.shape), offset=offset)
            boxes.append(WeightBox(name, box, rows[first:end]))
        is_on_cpu = all(box.tensor.device.type == "cpu" for box in boxes)
        return weight_digest(boxes, num_steps, order=0 if is_on_cpu else -1)

    def digests(self) -> dict[str, int]:
        """Return digests of parameters and buffers; see `Replica.digests`."""
        tensors = training_tensors(self.state.model)
        return {name: checksum(tensor) for name, tensor in tensors.items()}

    def begin(self, number: int) -> None:
        """Do nothing; see `Replica.begin`."""

    def note_sent(self, sums: dict[int, float] | None) -> None:
        """Do nothing, since nothing is sent; see `Replica.note_sent`."""

    def prepare(self) -> float:
        """Return NaN: gradients are not changed; see `Replica.prepare`."""
        return nan

    def agree(self, *, flag: bool) -> bool:
        """Return `flag` without a collective; see `Replica.agree`."""
        return flag

    def updated(self) -> None:
        """Do nothing; see `Replica.updated`."""

    def share(self) -> None:
        """Do nothing: all members have updated all parameters; see `Replica.share`."""
