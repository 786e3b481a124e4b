"""Executor of the actions of one rank of a pipeline's program, in order.

The program defines all computations and messages, and their order. So one executor runs GPipe,
1F1B, interleaved, breadth-first and zero bubble programs, and programs for inference.

    recv_f  F  send_f        value of the previous stage -> layers -> next stage
            R                the layers again, saving tensors for backward
    recv_b  B  send_b        gradients of the outputs -> backward -> gradients of the inputs
            I  send_b  W     the same in two parts: to the inputs, and later to the weights

Stashed tensors are sent after F to the stage that pops them, and their gradients back after B or I,
in addition to the messages of the program. Sends do not block, so this delays no rank with work.

An exception on one rank ends the step on all: the group is aborted with layer, stage, micro-batch
and action, which all other waiting ranks raise as an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from braid.errors import CommError, InternalError, StaleError, raise_all
from braid.parallel.pipeline.messages import Carrier
from braid.parallel.pipeline.stage import Edge, Stage, StageError
from braid.programs.schedule import Action, Program
from braid.programs.schedule.pipeline import PIPELINE
from braid.programs.schedule.pipeline.vocabulary import TRAIN, WORK, work_ranks
from braid.runtime.seeding import Draws

__all__ = ["Executor"]

# weighted loss of the output for a micro-batch
LossOf = Callable[[Any, int], torch.Tensor]
DrawsOf = Callable[[int], Draws]
Gradients = list["torch.Tensor"]
# key of a value on this rank: kind, consuming stage or connection, micro-batch
Key = tuple[str, "int | Edge", int]
VALUE, OUTPUT, GRADS, INPUT_GRADS = "input", "output", "gradients of outputs", "gradients of inputs"
STASHED, STASHED_GRADS = "stashed value", "gradients of a stashed value"
MICROBATCH_BITS = 20
BACKWARD = frozenset({"B", "I", "W", "R", "recv_b", "send_b", "STEP"})


class Microbatches(Protocol):
    """Sequence-like access to the micro-batches of a batch, by number."""

    def __getitem__(self, i: int, /) -> Any:
        """Return a part."""


def _tag(edge: Edge, microbatch: int) -> int:
    """Return the number of a skip connection's messages for a micro-batch."""
    return edge.number << MICROBATCH_BITS | microbatch


class Executor:
    """Executor of this rank's actions in a pipeline program.

    Args:
        program: Program of the pipeline, for the number of ranks in the group.
        carrier: Carrier of messages to the other ranks.
        stages: Stages of this rank, by number.
        on_gradients: Called with a stage when its last gradient of a step has been computed.
        on_step: Called with a STEP, to step the optimizer of its stage; needed by programs with
            steps.
        on_sent: Called with each value and gradient that is sent to another rank, and the action.

    Raises:
        ConfigError: The program is for another number of ranks, assigns other stages to this rank,
            or has actions that are not supported.
    """

    def __init__(
        self,
        program: Program,
        carrier: Carrier,
        stages: Mapping[int, Stage],
        on_gradients: Callable[[int], None] | None = None,
        on_step: Callable[[Action], None] | None = None,
        *,
        on_sent: Callable[[Action, Any], None] = lambda *_: None,
    ) -> None:
        local_stages = {
            action.unit for action in program.ranks[carrier.rank] if action.kind in WORK
        }
        problems = []
        if program.num_ranks != carrier.size:
            problems.append(
                f"the schedule {program} is not for a group of {carrier.size} ranks: use the "
                "schedule's number of ranks"
            )
        if not local_stages <= set(stages):
            problems.append(
                f"the schedule {program} has stages {sorted(local_stages)} on this rank, got "
                f"{sorted(stages)}: pass these stages"
            )
        if on_step is None and any(a.kind == "STEP" for a in program.ranks[carrier.rank]):
            problems.append(
                f"the schedule {program} contains optimizer steps: pass optimizers with "
                "step_in_program"
            )
        raise_all(problems)
        self._actions = program.ranks[carrier.rank]
        self._trains = program.header.operation == TRAIN
        self._last = program.header.num_units - 1
        self._ranks = work_ranks(program)
        self._stages = stages
        self._carrier = carrier
        self._recomputed = {(a.unit, a.index) for a in self._actions if a.kind == "R"}
        self._final = {a.unit: a for a in self._actions if a.kind in {"B", "W"}}
        self._on_gradients = on_gradients
        self._on_step = on_step
        self._on_sent = on_sent
        self._under_way: dict[Key, Any] = {}
        self._results: dict[int, Any] = {}
        self._batches: Microbatches = ()
        self._draws: DrawsOf | None = None
        self._loss_of: LossOf | None = None

    def run(
        self,
        microbatches: Microbatches,
        loss_of: LossOf | None = None,
        draws: DrawsOf | None = None,
    ) -> dict[int, Any]:
        """Execute the program once.

        Args:
            microbatches: Micro-batches; only the rank of the first stage reads them.
            loss_of: Loss of an output of the last stage; needed by programs that train.
            draws: Random numbers of a micro-batch; None for torch's generators.

        Returns:
            On the rank of the last stage its losses, or its outputs without `loss_of`, by
            micro-batch; empty on all other ranks.

        Raises:
            CommError: Another rank has failed; the message has its layer and action.
            Exception: An exception of a layer or of `loss_of` on this rank.
        """
        self._batches, self._loss_of, self._draws = microbatches, loss_of, draws
        results = self._perform(self._actions)
        self._under_way.clear()  # gradients of the batch are not returned
        return results

    def run_forwards(
        self, microbatches: Microbatches, draws: DrawsOf | None = None
    ) -> dict[int, Any]:
        """Execute all forwards of a program in which they precede all backwards.

        The arguments are those of `run`.

        Returns:
            On the rank of the last stage, the model's outputs by micro-batch; empty on all other
            ranks. `run_backwards` then executes the rest of the program.
        """
        self._batches, self._loss_of, self._draws = microbatches, None, draws
        return self._perform([a for a in self._actions if a.kind not in BACKWARD])

    def run_backwards(self, grads: Sequence[Gradients]) -> dict[int, Gradients]:
        """Execute the backwards of a program, after `run_forwards`.

        Args:
            grads: Gradients of the outputs that require one, by micro-batch; only the rank of the
                last stage reads them.

        Returns:
            On the rank of the first stage the gradients of the batch's tensors that require one, by
            micro-batch.
        """
        if self._last in self._stages:
            self._under_way |= {(GRADS, self._last, i): tensors for i, tensors in enumerate(grads)}
        self._perform([a for a in self._actions if a.kind in BACKWARD])
        remaining = self._under_way.items()
        grads_of_batch = {
            i: tensors for (sort, at, i), tensors in remaining if (sort, at) == (INPUT_GRADS, 0)
        }
        self._under_way.clear()
        return grads_of_batch

    def _perform(self, actions: Sequence[Action]) -> dict[int, Any]:
        if not self._actions:  # a replica without a micro-batch
            return {}
        action = self._actions[0]
        try:
            for action in actions:
                with self._carrier.span(f"{action.kind}{action.unit}", action.index):
                    self._execute(action)
                if self._on_gradients is not None and self._final.get(action.unit) is action:
                    self._on_gradients(action.unit)
            self._carrier.finish()
        except StageError as exc:
            self._abort(f"layer {exc.layer}, {PIPELINE.describe(action)}", exc.error)
            raise exc.error from None
        except StaleError as exc:  # a running send has ended the group before this action
            self._carrier.pass_on(str(exc))
            self.clear()
            raise CommError(str(exc)) from exc
        except CommError as exc:
            self._carrier.pass_on(str(exc))
            self.clear()
            raise
        except BaseException as exc:  # also an exit: other ranks would wait
            self._abort(PIPELINE.describe(action), exc)
            raise
        results, self._results = self._results, {}
        return results

    def _abort(self, where: str, exc: BaseException) -> None:
        self._carrier.abort(f"failed in {where}: {type(exc).__name__}: {exc}")
        self.clear()

    def clear(self) -> None:
        """Drop all values and gradients, after a failure."""
        self._under_way.clear()
        self._results.clear()
        for stage in self._stages.values():
            stage.clear()

    def _execute(self, action: Action) -> None:
        carrier, stage, i = self._carrier, self._stages[action.unit], action.index
        match action.kind:
            case "recv_f":
                self._under_way[VALUE, action.unit, i] = carrier.recv_value(action.peer)
            case "F":
                self._forward(action)
            case "send_f":
                output = self._under_way.pop((OUTPUT, action.unit, i))
                self._on_sent(action, output)
                carrier.send_value(output, action.peer)
            case "R":
                self._recompute(action)
            case "recv_b":
                grads = carrier.recv_tensors(stage.outputs(i), action.peer)
                self._under_way[GRADS, action.unit, i] = grads
            case "B":
                self._hand_on(action, stage.backward(i, self._grads_of_outputs(action)))
            case "I":
                grads_of_inputs = stage.backward_to_inputs(i, self._grads_of_outputs(action))
                self._hand_on(action, grads_of_inputs)
            case "W":
                stage.backward_to_weights(i)
            case "send_b":
                grads = self._under_way.pop((INPUT_GRADS, action.unit, i))
                self._on_sent(action, grads)
                carrier.send_tensors(grads, action.peer)
            case "STEP":
                assert self._on_step is not None, "checked in the constructor"
                self._on_step(action)
            case _:
                msg = f"the executor has no action {action.kind}"
                raise InternalError(msg)

    def _forward(self, action: Action) -> None:
        stage, i = self._stages[action.unit], action.index
        value = (
            self._batches[i] if not stage.index else self._under_way.pop((VALUE, stage.index, i))
        )
        output, stashed = stage.forward(
            i,
            value,
            keeps=self._trains,
            skips={edge: self._popped(edge, i) for edge in stage.pops},
            draws=None if self._draws is None else self._draws(i),
            drops=(stage.index, i) in self._recomputed,
            version=action.version,
        )
        for edge, tensor in stashed.items():
            if self._ranks[edge.target, i] == self._carrier.rank:
                self._under_way[STASHED, edge, i] = tensor
            else:
                self._on_sent(action, tensor)
                self._carrier.send_value(tensor, self._ranks[edge.target, i], _tag(edge, i))
        if stage.index == self._last:
            self._conclude(stage, i, output)
        elif self._ranks[stage.index + 1, i] == self._carrier.rank:
            self._under_way[VALUE, stage.index + 1, i] = output
        else:
            self._under_way[OUTPUT, stage.index, i] = output

    def _popped(self, edge: Edge, i: int) -> Any:
        if self._ranks[edge.source, i] == self._carrier.rank:
            return self._under_way.pop((STASHED, edge, i))
        return self._carrier.recv_value(self._ranks[edge.source, i], _tag(edge, i))

    def _conclude(self, stage: Stage, i: int, output: Any) -> None:
        """Keep the output of the last stage, or its loss."""
        if self._loss_of is None:
            self._results[i] = output
            return
        if (stage.index, i) in self._recomputed:
            return  # backward begins at the output of R
        with torch.set_grad_enabled(self._trains):
            loss = self._loss_of(output, i)
        self._results[i] = loss.detach()
        if self._trains:
            self._begin_backward_at(stage, i, loss)

    def _begin_backward_at(self, stage: Stage, i: int, loss: torch.Tensor) -> None:
        stage.replace_outputs(i, loss)
        seed = [torch.ones_like(loss)] if loss.requires_grad else []
        self._under_way[GRADS, stage.index, i] = seed

    def _recompute(self, action: Action) -> None:
        stage, i = self._stages[action.unit], action.index
        output = stage.recompute(i)
        if stage.index == self._last and self._loss_of is not None:
            with torch.enable_grad():
                loss = self._loss_of(output, i)
            self._results[i] = loss.detach()
            self._begin_backward_at(stage, i, loss)

    def _grads_of_outputs(self, action: Action) -> Mapping[Edge | None, Gradients]:
        """Return the gradients of a stage's output and stashed tensors."""
        stage, i = self._stages[action.unit], action.index
        grads: dict[Edge | None, Gradients] = {None: self._under_way.pop((GRADS, stage.index, i))}
        for edge in stage.stashes:
            if self._ranks[edge.target, i] == self._carrier.rank:
                grads[edge] = self._under_way.pop((STASHED_GRADS, edge, i))
            else:
                like, peer = stage.outputs(i, edge), self._ranks[edge.target, i]
                grads[edge] = self._carrier.recv_tensors(like, peer, _tag(edge, i))
        return grads

    def _hand_on(self, action: Action, grads: Mapping[Edge | None, Gradients]) -> None:
        """Keep or send the gradients of a stage's inputs for the stages that computed them."""
        stage, i = self._stages[action.unit], action.index
        for edge in stage.pops:
            if self._ranks[edge.source, i] == self._carrier.rank:
                self._under_way[STASHED_GRADS, edge, i] = grads[edge]
            else:
                peer = self._ranks[edge.source, i]
                self._on_sent(action, grads[edge])
                self._carrier.send_tensors(grads[edge], peer, _tag(edge, i))
        if stage.index and self._ranks[stage.index - 1, i] == self._carrier.rank:
            self._under_way[GRADS, stage.index - 1, i] = grads[None]
        else:
            self._under_way[INPUT_GRADS, stage.index, i] = grads[None]
