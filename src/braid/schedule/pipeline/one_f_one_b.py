"""1F1B and GPipe: pipelines of one stage per rank.

    GPipe, 3 stages, 4 micro-batches            1F1B: a backward that is possible comes first
    0  F0 F1 F2 F3          B0 B1 B2 B3         0  F0 F1 F2       B0 F3 B1    B2    B3
    1     F0 F1 F2 F3    B0 B1 B2 B3            1     F0 F1    B0 F2 B1 F3 B2    B3
    2        F0 F1 F2 F3 B0 B1 B2 B3            2        F0 B0 F1 B1 F2 B2 F3 B3

Both need (m + p - 1)(f + b): the bubble is (p-1)/m of the work. But GPipe holds the activations of
m micro-batches, 1F1B on rank r those of min(m, p - r): more forwards in advance than the way back
of their backward gain nothing.

Source: Y. Huang et al., GPipe, NeurIPS 2019; D. Narayanan et al., PipeDream, SOSP 2019, and (with
flushes) Memory-efficient pipeline-parallel DNN training, ICML 2021.
"""

from __future__ import annotations

from collections.abc import Sequence

from braid.errors import ConfigError
from braid.schedule.pipeline.vocabulary import PIPELINE
from braid.schedule.program import Action, Header, Program

__all__ = ["gpipe", "most_held", "one_f_one_b"]

Work = tuple[str, int]  # F or B, and the micro-batch


def one_f_one_b(num_stages: int, num_microbatches: int) -> Program:
    """Make a 1F1B program.

    Each stage runs a warm-up of min(p-r-1, m) forwards, then one forward and one backward in turns,
    then the remaining backwards.
    """
    work = []
    for stage in range(num_stages):
        ahead = min(num_stages - stage - 1, num_microbatches)
        own: list[Work] = [("F", i) for i in range(ahead)]
        for i in range(num_microbatches - ahead):
            own += [("F", ahead + i), ("B", i)]
        own += [("B", i) for i in range(num_microbatches - ahead, num_microbatches)]
        work.append(own)
    return _program("1f1b", work, num_microbatches)


def gpipe(num_stages: int, num_microbatches: int) -> Program:
    """Make a GPipe program: all forwards, then all backwards."""
    own: list[Work] = [(kind, i) for kind in "FB" for i in range(num_microbatches)]
    return _program("gpipe", [own] * num_stages, num_microbatches)


def most_held(program: Program) -> list[int]:
    """Return the largest number of micro-batches whose activations each rank holds at a time."""
    result = []
    for actions in program.ranks:
        held = most = 0
        for action in actions:
            held += (action.kind == "F") - (action.kind == "B")
            most = max(most, held)
        result.append(most)
    return result


def _program(name: str, work: Sequence[Sequence[Work]], num_microbatches: int) -> Program:
    num_stages = len(work)
    if num_stages < 1 or num_microbatches < 1:
        msg = (
            f"a pipeline needs at least 1 stage and 1 micro-batch, got {num_stages} and "
            f"{num_microbatches}"
        )
        raise ConfigError(msg)
    ranks = tuple(tuple(_with_messages(own, r, num_stages)) for r, own in enumerate(work))
    return Program(PIPELINE, Header(name, "train", num_stages, num_microbatches), ranks)


def _with_messages(work: Sequence[Work], stage: int, num_stages: int) -> list[Action]:
    """Insert receives right before the work that needs them, and sends right after their work."""
    before, behind = stage - 1, stage + 1
    actions = []
    for kind, index in work:
        way = kind.lower()
        source, target = (before, behind) if kind == "F" else (behind, before)
        if 0 <= source < num_stages:
            actions.append(Action(f"recv_{way}", stage, index, source))
        actions.append(Action(kind, stage, index))
        if 0 <= target < num_stages:
            actions.append(Action(f"send_{way}", stage, index, target))
    return actions
