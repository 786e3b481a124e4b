"""Executes the actions of one rank of a pipeline's program, one after the other.

The program decides everything: what is computed when, and what is sent where. So one executor runs
GPipe, 1F1B, interleaved, breadth-first and zero bubble programs, and programs that only infer.

    recv_f  F  send_f        value of the previous stage -> layers -> next stage
    recv_b  B  send_b        gradients of the outputs -> backward -> gradients of the inputs
            I  send_b  W     the same in two parts: to the inputs, and later to the weights

An exception on one rank ends the step on all: the group is aborted with layer, stage, micro-batch
and action, which the waits of all other ranks raise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from braid.comm import Group
from braid.errors import CommError, ConfigError, StaleError
from braid.pipeline.messages import Messages
from braid.pipeline.stage import Stage, StageError
from braid.schedule import Action, Program
from braid.schedule.pipeline import PIPELINE
from braid.schedule.pipeline.vocabulary import TRAIN, stage_ranks

__all__ = ["Executor", "LossOf"]

# loss of the output for a micro-batch, with its weight in it
LossOf = Callable[[Any, int], torch.Tensor]
Gradients = list["torch.Tensor"]


class Executor:
    """Runs the part of a program that belongs to this rank.

    Args:
        program: Program of the pipeline, for as many ranks as the group has.
        group: Ranks of the pipeline, in the order of the program.
        stages: Stages of this rank, by number.

    Raises:
        ConfigError: The program is of another size, has other stages here, or actions that are not
            executed.
    """

    def __init__(self, program: Program, group: Group, stages: Mapping[int, Stage]) -> None:
        own = {stage for stage, rank in stage_ranks(program).items() if rank == group.rank}
        problems = []
        if program.num_ranks != group.size:
            problems.append(f"{program} is not for a group of {group.size} ranks")
        if own != set(stages):
            problems.append(f"{program} has stages {sorted(own)} here, got {sorted(stages)}")
        if problems:
            raise ConfigError("; ".join(problems))
        self._program = program
        self._actions = program.ranks[group.rank]
        self._trains = program.header.operation == TRAIN
        self._last = program.header.num_units - 1
        self._ranks = stage_ranks(program)
        self._group = group
        self._stages = stages
        self._messages = Messages(group)
        self._values: dict[tuple[int, int], Any] = {}  # inputs by stage and micro-batch
        self._outputs: dict[tuple[int, int], Any] = {}
        self._grads: dict[tuple[int, int], Gradients] = {}  # of outputs
        self._input_grads: dict[tuple[int, int], Gradients] = {}
        self._results: dict[int, Any] = {}
        self._table: dict[str, Callable[[Action], None]] = {
            "recv_f": self._recv_f,
            "F": self._forward,
            "send_f": self._send_f,
            "recv_b": self._recv_b,
            "B": self._backward,
            "I": self._backward_to_inputs,
            "W": self._backward_to_weights,
            "send_b": self._send_b,
        }
        self._batches: Sequence[Any] = ()
        self._loss_of: LossOf | None = None

    def run(self, microbatches: Sequence[Any], loss_of: LossOf | None = None) -> dict[int, Any]:
        """Execute the program once.

        Args:
            microbatches: Parts of the batch; only the rank of the first stage reads them.
            loss_of: Loss of an output of the last stage; needed by programs that train.

        Returns:
            On the rank of the last stage its losses, or its outputs without `loss_of`, by
            micro-batch; empty on all other ranks.

        Raises:
            CommError: Another rank has failed; the message says in which layer and action.
            Exception: An exception of a layer or of `loss_of` on this rank.
        """
        self._batches, self._loss_of = microbatches, loss_of
        action = self._actions[0]
        try:
            for action in self._actions:
                with self._group.context.events.span(
                    f"{action.kind}{action.unit}", seq=action.index
                ):
                    self._table[action.kind](action)
            self._messages.finish()
        except StageError as exc:
            self._abort(f"layer {exc.layer}, {PIPELINE.describe(action)}", exc.error)
            raise exc.error from None
        except StaleError as exc:  # a send under way has ended the group before this action
            self._clear()
            raise CommError(str(exc)) from exc
        except CommError:
            self._clear()
            raise
        except Exception as exc:
            self._abort(PIPELINE.describe(action), exc)
            raise
        results, self._results = self._results, {}
        return results

    def _abort(self, where: str, exc: BaseException) -> None:
        rank = self._group.ranks[self._group.rank]
        self._group.abort(f"rank {rank} failed in {where}: {type(exc).__name__}: {exc}")
        self._clear()

    def _clear(self) -> None:
        for kept in (self._values, self._outputs, self._grads, self._input_grads, self._results):
            kept.clear()
        for stage in self._stages.values():
            stage.clear()

    # One method for each kind of action

    def _recv_f(self, action: Action) -> None:
        self._values[action.unit, action.index] = self._messages.recv_value(action.peer)

    def _forward(self, action: Action) -> None:
        stage, i = self._stages[action.unit], action.index
        value = self._batches[i] if not stage.index else self._values.pop((stage.index, i))
        output = stage.forward(i, value, keeps=self._trains)
        if stage.index == self._last:
            self._conclude(stage, i, output)
        elif self._ranks[stage.index + 1] == self._group.rank:
            self._values[stage.index + 1, i] = output
        else:
            self._outputs[stage.index, i] = output

    def _conclude(self, stage: Stage, i: int, output: Any) -> None:
        """Keep the output of the last stage, or its loss."""
        if self._loss_of is None:
            self._results[i] = output
            return
        with torch.set_grad_enabled(self._trains):
            loss = self._loss_of(output, i)
        self._results[i] = loss.detach()
        if self._trains:
            stage.replace_outputs(i, loss)
            self._grads[stage.index, i] = [torch.ones_like(loss)] if loss.requires_grad else []

    def _send_f(self, action: Action) -> None:
        self._messages.send_value(self._outputs.pop((action.unit, action.index)), action.peer)

    def _recv_b(self, action: Action) -> None:
        grads = self._stages[action.unit].gradients_like(action.index)
        self._messages.recv_tensors(grads, action.peer)
        self._grads[action.unit, action.index] = list(grads)

    def _backward(self, action: Action) -> None:
        grads = self._grads.pop((action.unit, action.index))
        self._hand_on(action, self._stages[action.unit].backward(action.index, grads))

    def _backward_to_inputs(self, action: Action) -> None:
        grads = self._grads.pop((action.unit, action.index))
        self._hand_on(action, self._stages[action.unit].backward_to_inputs(action.index, grads))

    def _backward_to_weights(self, action: Action) -> None:
        self._stages[action.unit].backward_to_weights(action.index)

    def _hand_on(self, action: Action, grads: Gradients) -> None:
        """Keep the gradients of a stage's inputs for the previous stage."""
        if not action.unit:
            return
        if self._ranks[action.unit - 1] == self._group.rank:
            self._grads[action.unit - 1, action.index] = grads
        else:
            self._input_grads[action.unit, action.index] = grads

    def _send_b(self, action: Action) -> None:
        grads = self._input_grads.pop((action.unit, action.index))
        self._messages.send_tensors(grads, action.peer)
