"""One call of a schedule: runs this rank's actions of a pipeline program on Megatron's models.

Megatron writes 1F1B and interleaving as loops. Here the order of forwards, backwards and messages
comes from the programs of `braid.programs.schedule`, and one driver runs all of them:

    recv_f  F  send_f        output of the previous rank -> forward_step_func -> next rank
    recv_b  B  send_b        gradient of the output -> backward -> gradient of the input

Sends do not block. After F only the edge of the graph behind the output is kept, so the memory of
the output is freed when it has been sent. Chunk c of p ranks is stage c p + rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from braid.comm import Group
from braid.compat.megatron.failure import UsageError
from braid.compat.megatron.pipeline_parallel.p2p_communication import (
    BACKWARD,
    FORWARD,
    P2PCommunicator,
)
from braid.compat.megatron.pipeline_parallel.steps import LossScaling, backward_step, forward_step
from braid.errors import CommError, InternalError
from braid.programs.schedule import Action, Program

__all__ = ["ScheduleCall", "ScheduleRun"]

Key = tuple[int, int]  # stage and micro-batch


class ScheduleCall(NamedTuple):
    """Arguments of a schedule.

    Attributes:
        step: The program's `forward_step_func`.
        iterators: Iterator over micro-batches of each chunk.
        chunks: Parts of the model on this rank.
        config: Megatron's configuration of the model.
        options: Scaling of losses.
        forward_only: Whether to skip backwards.
        first_val_step: Whether this is the first step of a validation; None if unknown.
        recv_shape: Shape of the output of the previous stage.
        send_shape: Shape of the output of this rank's stages.
    """

    step: Callable[..., Any]
    iterators: Sequence[Iterator[Any] | None]
    chunks: Sequence[nn.Module]
    config: Any
    options: LossScaling
    forward_only: bool
    first_val_step: bool | None
    recv_shape: Sequence[int]
    send_shape: Sequence[int]


class ScheduleRun:
    """Carries out this rank's actions of a pipeline's schedule, in one call of it.

    Args:
        program: Order of actions of all ranks.
        call: Arguments of the schedule.
        communicator: Messages to the neighboring ranks.
        groups: Groups that are aborted if this rank fails: pipeline, tensor and data parallel.

    Attributes:
        collected: Data of the losses, on the rank with the last stage.
        num_tokens: Sum of the numbers of tokens that loss functions returned.
    """

    def __init__(
        self,
        program: Program,
        call: ScheduleCall,
        communicator: P2PCommunicator,
        groups: Sequence[Group],
    ) -> None:
        self._call, self._communicator, self._groups = call, communicator, groups
        self._rank, self._size = communicator.group.rank, communicator.group.size
        self._last = program.header.num_units - 1
        self._actions = program.ranks[self._rank]
        self.collected: list[Any] = []
        self.num_tokens = torch.zeros([], dtype=torch.int, device=communicator.device)
        self._num_forwards = 0
        kinds = [action.kind for action in self._actions]
        self._window = kinds[: kinds.index("B")].count("F") if "B" in kinds else kinds.count("F")
        self._inputs: dict[Key, torch.Tensor] = {}
        self._outputs: dict[Key, Any] = {}
        self._gradients: dict[Key, torch.Tensor] = {}
        self._sync_grads = call.config.grad_sync_func is None or (
            len(call.chunks) == 1 and self._rank == 0
        )

    def run(self) -> None:
        """Run all actions; an error here also ends the step on the ranks that wait for this one."""
        try:
            for action in self._actions:
                self._execute(action, (action.unit, action.index))
            self._communicator.finish()
        except BaseException as error:
            group, text = self._communicator.group, str(error)
            if not isinstance(error, CommError):  # which names the first rank that failed
                where = f"rank {group.ranks[group.rank]} stopped in a pipeline schedule"
                text = f"{where}: {type(error).__name__}: {text}"
            for waiting in self._groups:
                waiting.abort(text)
            raise
        config, chunks = self._call.config, self._call.chunks
        if not self._call.forward_only and not self._sync_grads and len(chunks) == 1:
            config.grad_sync_func(chunks[0].parameters())

    def _execute(self, action: Action, key: Key) -> None:
        call, communicator = self._call, self._communicator
        match action.kind:
            case "recv_f":
                received = communicator.recv_forward(call.recv_shape, is_first_stage=False)
                assert isinstance(received, torch.Tensor)
                self._inputs[key] = received
            case "F":
                self._forward(action, key)
            case "send_f":
                output = self._outputs.pop(key)
                communicator.start_send(output, FORWARD)
                if not call.forward_only:
                    self._outputs[key] = get_gradient_edge(output) if output.requires_grad else None
            case "recv_b":
                received = communicator.recv_backward(call.send_shape, is_last_stage=False)
                assert isinstance(received, torch.Tensor)
                self._gradients[key] = received.requires_grad_(False)
            case "B":
                self._backward(action, key)
            case "send_b":
                gradient = self._gradients.pop((action.unit - 1, action.index))
                communicator.start_send(gradient, BACKWARD)
            case _:
                msg = f"Megatron's schedules have no action {action.kind}"
                raise InternalError(msg)

    def _forward(self, action: Action, key: Key) -> None:
        chunk, call = action.unit // self._size, self._call
        model = call.chunks[chunk]
        self._start_params(chunk, action.index)
        first = action.index == 0
        if call.first_val_step is not None and call.forward_only:
            first = first and call.first_val_step
        if first and (started := getattr(model, "set_is_first_microbatch", None)) is not None:
            started()
        is_last_stage = action.unit == self._last
        with self._synchronization(action):
            result = forward_step(
                call.step,
                call.iterators[chunk],
                model,
                self._inputs.get(key),
                call.options,
                is_last_stage=is_last_stage,
                checkpoint=self._checkpoints(),
            )
        self._num_forwards += 1
        self.num_tokens += result.num_tokens
        self.collected += result.collected
        if not is_last_stage:
            self._check_output(result.output, action)
        if call.forward_only:
            self._inputs.pop(key, None)
        if not is_last_stage or not call.forward_only:
            self._outputs[key] = result.output

    def _backward(self, action: Action, key: Key) -> None:
        call, chunk = self._call, action.unit // self._size
        with self._synchronization(action):
            gradient = backward_step(
                self._inputs.pop(key, None),
                self._outputs.pop(key),
                self._gradients.pop(key, None),
                call.config,
            )
        if gradient is not None:
            self._gradients[action.unit - 1, action.index] = gradient
        is_final = action.index == call.options.num_microbatches - 1
        if is_final and not self._sync_grads and len(call.chunks) > 1:
            sync = call.config.grad_sync_func
            (sync[chunk] if isinstance(sync, list) else sync)(call.chunks[chunk].parameters())

    def _synchronization(self, action: Action) -> ExitStack:
        """Return a context without gradient synchronization, except for the last micro-batch."""
        stack, no_sync = ExitStack(), self._call.config.no_sync_func
        is_final = action.index == self._call.options.num_microbatches - 1
        if no_sync is not None and not (is_final and self._sync_grads):
            for function in no_sync if isinstance(no_sync, list) else [no_sync]:
                stack.enter_context(function())
        return stack

    def _start_params(self, chunk: int, microbatch: int) -> None:
        """Start the synchronization of the parameters of the next chunk."""
        call = self._call
        sync, num_chunks = call.config.param_sync_func, len(call.chunks)
        if sync is None or microbatch or call.forward_only or num_chunks == 1:
            return
        for index in (chunk, chunk + 1) if chunk == 0 else (chunk + 1,):
            if index < num_chunks:
                function = sync[index] if isinstance(sync, list) else sync
                function(call.chunks[index].parameters())

    def _checkpoints(self) -> bool | None:
        """Return whether the forward recomputes all layers in backward; None by default."""
        limit = self._call.config.num_microbatches_with_partial_activation_checkpoints
        if limit is None or self._size == 1:
            return None
        return bool(self._num_forwards % max(self._window, 1) >= limit)

    def _check_output(self, output: Any, action: Action) -> None:
        """Raise UsageError unless the next stage expects this output."""
        config, shape = self._call.config, tuple(self._call.send_shape)
        where = f"stage {action.unit}, micro-batch {action.index}"
        if not isinstance(output, torch.Tensor):
            msg = (
                f"{where}: expected Tensor, found {type(output).__name__}: return one tensor from "
                "every stage except the last one"
            )
            raise UsageError(msg)
        if output.dtype != config.pipeline_dtype:
            msg = (
                f"{where}: the output has dtype {output.dtype}, but pipeline_dtype is "
                f"{config.pipeline_dtype}: set config.pipeline_dtype to the output's dtype"
            )
            raise UsageError(msg)
        if not config.variable_seq_lengths and tuple(output.shape) != shape:
            msg = (
                f"{where}: the output has shape {list(output.shape)}, but the next stage expects "
                f"{list(shape)} (seq_length, micro_batch_size, hidden_size): pass the right "
                "numbers to the schedule, or set config.variable_seq_lengths"
            )
            raise UsageError(msg)
