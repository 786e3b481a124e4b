"""`megatron.core.pipeline_parallel.p2p_communication`: messages between neighboring stages.

Outputs go to the next rank with tag 0, and gradients to the previous rank with tag 1. With two
ranks the next rank is the previous one as well, and the tags keep the two kinds apart. Every send
is started before any receive is waited for, so that neighbors that send to each other do not block.
With `variable_seq_lengths` the shape of a tensor is sent before the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from braid.comm import Work
from braid.compat.megatron.failure import UsageError
from braid.compat.megatron.groups import braid_group
from braid.compat.megatron.utils import current_device, timed

__all__ = ["P2PCommunicator", "is_single_shape"]

FORWARD, BACKWARD = 0, 1
MAX_DIMS = 7
Tensors = torch.Tensor | list[torch.Tensor] | list[torch.Tensor | None] | None


class _Exchange(NamedTuple):
    """Received tensors, and the operations to wait for."""

    from_prev: torch.Tensor | None
    from_next: torch.Tensor | None
    works: list[Work]


class P2PCommunicator:
    """Sends and receives of a rank of a pipeline.

    Args:
        pp_group: Ranks of the pipeline.
        config: Megatron's configuration of the model, with `pipeline_dtype`.

    Attributes:
        next_rank: Global rank of the next stage; the first stage after the last one.
        prev_rank: Global rank of the previous stage; the last stage before the first one.
        device: Device of received tensors.
    """

    def __init__(self, pp_group: Any, config: Any) -> None:
        self.pp_group, self.config = pp_group, config
        self.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size
        self.group = braid_group(pp_group)
        rank, size = self.group.rank, self.group.size
        self._next, self._prev = (rank + 1) % size, (rank - 1) % size
        self.next_rank = dist.get_global_rank(pp_group, self._next)
        self.prev_rank = dist.get_global_rank(pp_group, self._prev)
        self.device = current_device()
        self._starter = self.group.starting()
        self._under_way: list[tuple[Work, torch.Tensor]] = []

    def start_send(self, tensor: torch.Tensor, direction: int) -> list[Work]:
        """Send a tensor to the next (0) or previous (1) rank; return without waiting."""
        self._under_way = [sent for sent in self._under_way if not sent[0].done()]
        peer = self._prev if direction else self._next
        content = tensor.detach().contiguous()
        messages = [content]
        if self.config.variable_seq_lengths:
            shape = [tensor.dim(), *tensor.shape]
            messages.insert(0, torch.tensor(shape + [0] * (MAX_DIMS + 1 - len(shape))))
        works = [
            self._starter.send(message, peer, tag=direction, async_op=True) for message in messages
        ]
        self._under_way += zip(works, messages, strict=True)
        return works

    def start_recv(self, shape: Sequence[int] | None, direction: int) -> tuple[torch.Tensor, Work]:
        """Return a tensor, and the receive that fills it; see `start_send`.

        Args:
            shape: Shape of the tensor; ignored with `variable_seq_lengths`.
            direction: 0 for an output of the previous rank, 1 for a gradient of the next rank.
        """
        peer = self._next if direction else self._prev
        dtype = self.config.pipeline_dtype
        if dtype is None:
            msg = "pipeline_dtype must be provided to receive: set config.pipeline_dtype"
            raise UsageError(msg)
        if self.config.variable_seq_lengths:
            announced = torch.empty(MAX_DIMS + 1, dtype=torch.int64)
            dims, *sizes = self.group.recv(announced, peer, tag=direction).tolist()
            shape = sizes[:dims]
        if shape is None:
            msg = (
                "tensor_shape must be specified to receive. Common tensor_shape is (seq_length, "
                "micro_batch_size, hidden_size)"
            )
            raise UsageError(msg)
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        work = self._starter.recv(tensor, peer, tag=direction, async_op=True)
        return tensor.requires_grad_(), work

    def finish(self) -> None:
        """Wait until all messages have been sent."""
        for work, _ in self._under_way:
            work.wait()
        self._under_way.clear()

    def recv_forward(self, tensor_shapes: Any, is_first_stage: bool) -> Tensors:
        """Receive outputs from the previous rank, one per shape; None on the first stage."""
        with timed(self.config, "forward-recv"):
            return self._each(None, tensor_shapes, FORWARD, BACKWARD, skip=is_first_stage)

    def recv_backward(self, tensor_shapes: Any, is_last_stage: bool) -> Tensors:
        """Receive gradients from the next rank, one per shape; None on the last stage."""
        with timed(self.config, "backward-recv"):
            return self._each(None, tensor_shapes, BACKWARD, FORWARD, skip=is_last_stage)

    def send_forward(self, output_tensors: Tensors, is_last_stage: bool) -> None:
        """Send outputs to the next rank, unless this is the last stage."""
        with timed(self.config, "forward-send"):
            self._send(output_tensors, FORWARD, skip=is_last_stage)

    def send_backward(self, input_tensor_grads: Tensors, is_first_stage: bool) -> None:
        """Send gradients to the previous rank, unless this is the first stage."""
        with timed(self.config, "backward-send"):
            self._send(input_tensor_grads, BACKWARD, skip=is_first_stage)

    def send_forward_recv_backward(
        self, output_tensors: Tensors, tensor_shapes: Any, is_last_stage: bool
    ) -> Tensors:
        """Send outputs to the next rank, and receive gradients from it."""
        with timed(self.config, "forward-send-backward-recv"):
            return self._each(output_tensors, tensor_shapes, BACKWARD, FORWARD, skip=is_last_stage)

    def send_backward_recv_forward(
        self, input_tensor_grads: Tensors, tensor_shapes: Any, is_first_stage: bool
    ) -> Tensors:
        """Send gradients to the previous rank, and receive outputs from it."""
        with timed(self.config, "backward-send-forward-recv"):
            return self._each(
                input_tensor_grads, tensor_shapes, FORWARD, BACKWARD, skip=is_first_stage
            )

    def send_forward_recv_forward(
        self,
        output_tensor: torch.Tensor | None,
        recv_prev: bool,
        tensor_shape: Sequence[int],
        overlap_p2p_comm: bool = False,
    ) -> Any:
        """Send an output to the next rank, and receive an output from the previous rank.

        Args:
            output_tensor: Output to send; None to send nothing.
            recv_prev: Whether to receive.
            tensor_shape: Shape of the received tensor.
            overlap_p2p_comm: Whether to return (tensor, works) without waiting.
        """
        with timed(self.config, "forward-send-forward-recv"):
            exchange = self._exchange(
                to_next=output_tensor,
                recv_prev=recv_prev,
                tensor_shape=tensor_shape,
                wait=not overlap_p2p_comm,
            )
        received = exchange.from_prev
        return (received, exchange.works) if overlap_p2p_comm else received

    def send_backward_recv_backward(
        self,
        input_tensor_grad: torch.Tensor | None,
        recv_next: bool,
        tensor_shape: Sequence[int],
        overlap_p2p_comm: bool = False,
    ) -> Any:
        """Send a gradient to the previous rank, and receive a gradient from the next rank.

        See `send_forward_recv_forward` for the arguments.
        """
        with timed(self.config, "backward-send-backward-recv"):
            exchange = self._exchange(
                to_prev=input_tensor_grad,
                recv_next=recv_next,
                tensor_shape=tensor_shape,
                wait=not overlap_p2p_comm,
            )
        received = exchange.from_next
        return (received, exchange.works) if overlap_p2p_comm else received

    def send_forward_backward_recv_forward_backward(
        self,
        output_tensor: torch.Tensor | None,
        input_tensor_grad: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Sequence[int],
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Send to both neighbors and receive from both; return the output and the gradient."""
        with timed(self.config, "forward-backward-send-forward-backward-recv"):
            exchange = self._exchange(
                to_next=output_tensor,
                to_prev=input_tensor_grad,
                recv_prev=recv_prev,
                recv_next=recv_next,
                tensor_shape=tensor_shape,
            )
        return exchange.from_prev, exchange.from_next

    def _exchange(
        self,
        *,
        to_next: torch.Tensor | None = None,
        to_prev: torch.Tensor | None = None,
        recv_prev: bool = False,
        recv_next: bool = False,
        tensor_shape: Sequence[int] | None = None,
        wait: bool = True,
    ) -> _Exchange:
        """Start sends, then receives; wait for all of them unless `wait` is False."""
        works: list[Work] = []
        received: list[torch.Tensor | None] = []
        for tensor, direction in ((to_next, FORWARD), (to_prev, BACKWARD)):
            works += [] if tensor is None else self.start_send(tensor, direction)
        for wanted, direction in ((recv_prev, FORWARD), (recv_next, BACKWARD)):
            tensor, work = self.start_recv(tensor_shape, direction) if wanted else (None, None)
            received.append(tensor)
            works += [] if work is None else [work]
        for work in works if wait else ():
            work.wait()
        return _Exchange(received[0], received[1], works)

    def _each(self, sent: Tensors, shapes: Any, receive: int, send: int, *, skip: bool) -> Tensors:
        """Send and receive one tensor per shape; return a list if a list came in."""
        one = is_single_shape(shapes)
        all_shapes = [shapes] if one else list(shapes)
        tensors = sent if isinstance(sent, list) else [sent] * len(all_shapes)
        results: list[torch.Tensor | None] = []
        for tensor, shape in zip(tensors, all_shapes, strict=True):
            if skip:
                results.append(None)
                continue
            exchange = self._exchange(
                to_next=tensor if send == FORWARD else None,
                to_prev=tensor if send == BACKWARD else None,
                recv_prev=receive == FORWARD,
                recv_next=receive == BACKWARD,
                tensor_shape=shape,
            )
            results.append(exchange.from_prev if receive == FORWARD else exchange.from_next)
        is_list = isinstance(sent, list) or (sent is None and not one)
        return results if is_list else results[0]

    def _send(self, tensors: Tensors, direction: int, *, skip: bool) -> None:
        for tensor in tensors if isinstance(tensors, list) else [tensors]:
            if not skip and tensor is not None:
                for work in self.start_send(tensor, direction):
                    work.wait()


def is_single_shape(shape: Any) -> bool:
    """Return whether an argument is one shape, not a list of shapes."""
    return isinstance(shape, torch.Size) or (
        isinstance(shape, list | tuple)
        and bool(shape)
        and all(isinstance(length, int) for length in shape)
    )
