"""Measures of a pipeline: its bubble, and the activations that each rank holds.

The bubble is the time in which the busiest rank does not work, as a share of its work: (p-1)/m for
1F1B, whatever a micro-batch takes. Activations are counted in micro-batches: 1 is what all stages
of a rank keep from the forward of one micro-batch to its backward. Stages of a rank count alike.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from braid.programs.schedule.pipeline.linear import most_held
from braid.programs.schedule.pipeline.vocabulary import TRAIN, stage_ranks
from braid.programs.schedule.program import Program
from braid.programs.schedule.simulate import Timeline

__all__ = ["bubble", "measures_text", "peak_activations"]

MOST_LISTED = 16  # ranks up to which a line lists the peak of each rank


def bubble(timeline: Timeline) -> float:
    """Return the idle time (bubble), divided by the work of the busiest rank; 0 without work."""
    work_s: dict[int, float] = defaultdict(float)
    for interval in timeline.intervals:
        if not interval.is_message:
            work_s[interval.rank] += interval.end_s - interval.start_s
    busiest_s = max(work_s.values(), default=0.0)
    return timeline.seconds / busiest_s - 1 if busiest_s else 0.0


def peak_activations(program: Program) -> list[float]:
    """Return the peak number of activations on each rank, in micro-batches."""
    if program.header.operation != TRAIN:
        return [0.0] * program.num_ranks
    num_stages = Counter(stage_ranks(program).values())
    return [held / max(1, num_stages[rank]) for rank, held in enumerate(most_held(program))]


def measures_text(program: Program, timeline: Timeline) -> str:
    """Return `bubble` and `peak_activations` as text, such as `bubble 37.5 % of the work, ...`.

    Args:
        program: Pipeline.
        timeline: Timeline of a simulation of the program.
    """
    text = f"bubble {100 * bubble(timeline):.1f} % of the work"
    if program.header.operation != TRAIN:
        return text
    peaks = peak_activations(program)
    if len(set(peaks)) == 1:
        return f"{text}, peak activations {peaks[0]:g} micro-batches on each rank"
    if len(peaks) > MOST_LISTED:
        return f"{text}, peak activations {min(peaks):g} to {max(peaks):g} micro-batches"
    listed = ", ".join(f"{peak:g}" for peak in peaks)
    return f"{text}, peak activations {listed} micro-batches on ranks 0 to {len(peaks) - 1}"
