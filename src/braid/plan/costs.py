"""Interfaces for the costs that a planner needs: a model's layers, and machines.

    model      layers(rows, tensor) -> time, bytes and messages of each layer of a micro-batch
    machines   seconds of a collective over an axis of ranks, of a message, of an optimizer step

Two sources implement them: a measured profile, or counted operations with a described device. Every
prediction carries its origin, measured or estimated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, get_args

from braid.errors import below, raise_all

__all__ = ["Axis", "Machines", "MicrobatchCost", "ModelCosts", "Origin", "ParamDtype", "Training"]

Origin = Literal["measured", "estimated"]
ParamDtype = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, slots=True)
class Training:
    """Size of a training: batch, dtype and optimizer states.

    Attributes:
        batch: Rows of a step over all ranks.
        dtype: Dtype of parameters and activations.
        optimizer_states: Number of optimizer states per parameter: 2 for Adam, 1 for momentum.
    """

    batch: int = 16
    dtype: ParamDtype = "fp32"
    optimizer_states: int = 2

    def __post_init__(self) -> None:
        problems = below(1, batch=self.batch) + below(0, optimizer_states=self.optimizer_states)
        if self.dtype not in (known := get_args(ParamDtype)):
            problems.append(f"dtype must be one of {', '.join(known)}, got {self.dtype!r}")
        raise_all(problems)


class MicrobatchCost(NamedTuple):
    """Costs of one layer for a micro-batch, on one of the ranks that share the layer.

    Attributes:
        forward_s: Seconds of the forward, without communication.
        input_s: Seconds to compute the gradients of the layer's inputs.
        weight_s: Seconds to compute the gradients of the layer's weights.
        saved_bytes: Bytes kept from forward to backward, including the output.
        output_bytes: Bytes of the output.
        param_bytes: Bytes of the parameters of this rank.
        params: Numbers of the layer's parameters; a tied parameter has the same number in all
            layers.
        reduces: Number of all-reduces in a forward, over the ranks that share the layer; a backward
            has the same number.
        reduced_bytes: Total bytes of these all-reduces.
        workspace_bytes: Peak bytes of a backward in addition to the saved bytes.
        kv_bytes: Bytes of the keys and values of the layer's attention, which ranks exchange if
            they share sequences; 0 for a layer without attention.
        routed_bytes: Bytes of the tokens that a forward sends to experts, each once per chosen
            expert; 0 for a layer without experts.
        expert_bytes: Bytes of the experts' parameters, a part of `param_bytes`.
        split_s: Additional seconds of a backward in two parts, to inputs and later to weights.
    """

    forward_s: float
    input_s: float
    weight_s: float
    saved_bytes: float
    output_bytes: float
    param_bytes: float
    params: tuple[int, ...] = ()
    reduces: int = 0
    reduced_bytes: float = 0.0
    workspace_bytes: float = 0.0
    kv_bytes: float = 0.0
    routed_bytes: float = 0.0
    expert_bytes: float = 0.0
    split_s: float = 0.0


class ModelCosts(Protocol):
    """Costs of a model, layer by layer."""

    @property
    def model(self) -> str:
        """Name of the model."""

    @property
    def origin(self) -> Origin:
        """Whether times were measured or are estimated."""

    @property
    def spread(self) -> float:
        """Relative spread of the measured times; 0 if they are estimated."""

    @property
    def num_layers(self) -> int:
        """Number of layers."""

    @property
    def tensor_sizes(self) -> Sequence[int]:
        """Numbers of ranks over which each layer can be sharded; 1 is always included."""

    @property
    def sequence_sizes(self) -> Sequence[int]:
        """Numbers of ranks over which sequences can be sharded; 1 is always included."""

    @property
    def expert_sizes(self) -> Sequence[int]:
        """Numbers of ranks over which experts can be sharded; 1 is always included."""

    @property
    def left_out(self) -> Sequence[str]:
        """Sentences about axes of a mesh that the model could use, but a plan cannot."""

    def layers(self, rows: float, tensor: int) -> Sequence[MicrobatchCost]:
        """Return the costs of all layers for a micro-batch, on one of `tensor` ranks.

        Args:
            rows: Number of rows; a rank that shares sequences has a fraction of each row.
            tensor: Number of ranks that share each layer.
        """


class Axis(NamedTuple):
    """Ranks of one axis of a mesh: `size` of them, `stride` apart.

    Attributes:
        size: Number of ranks.
        stride: Difference between the ranks of two neighbours on the axis.
    """

    size: int
    stride: int


class Machines(Protocol):
    """Interface for the costs of devices and of communication between them."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""

    @property
    def origin(self) -> Origin:
        """Whether times were measured or are estimated."""

    @property
    def memory_bytes(self) -> float:
        """Memory of a rank; infinity if it is not known."""

    @property
    def knows_servers(self) -> bool:
        """Whether the cost of `push_pull`, a whole step of a parameter server, is known."""

    @property
    def overlap(self) -> float:
        """Share of a gradient's all-reduce that a backward can hide, from 0 to 1."""

    @property
    def ranks_per_core(self) -> float:
        """Number of ranks that share a CPU core; times were measured while all of them computed."""

    @property
    def action_s(self) -> float:
        """Overhead in seconds of each forward or backward in a pipeline, besides the layers."""

    @property
    def step_s(self) -> float:
        """Constant overhead of a step in seconds, such as the time to fetch the batch."""

    def collective_s(self, operation: str, axis: Axis, nbytes: float) -> float:
        """Return the seconds of a collective that all groups of an axis run at the same time."""

    def message_s(self, axis: Axis, nbytes: float) -> float:
        """Return the seconds of a message to the next rank of an axis, over the slowest hop."""

    def optimizer_s(self, param_bytes: float) -> float:
        """Return the seconds of gradient clipping and the optimizer's step, for `param_bytes`."""

    def level_bytes(self, axis: Axis, sent: float) -> Mapping[str, float]:
        """Return the bytes on one link, by cluster level, if each rank of an axis sends `sent`."""
