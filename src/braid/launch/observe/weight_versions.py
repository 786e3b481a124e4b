"""Sums up the steps of asynchronous pipelines: how old gradients were, and how many versions lived.

A rank records `gradient of stage 1` for each gradient of a step, with its age as the number (steps
that the stage made between its forward and its own), and `versions of stage 1` after each step,
with the number of versions of the stage's weights that are then in memory.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from braid.launch.observe.timeline import RankTimeline
from braid.runtime.diagnose.block import rank_list

__all__ = ["VersionRow", "version_rows", "versions_text"]

RECORD = re.compile(r"(gradient|versions) of stage (\d+)")


class VersionRow(NamedTuple):
    """Weight versions of one stage of an asynchronous pipeline.

    Attributes:
        stage: Number of the stage.
        ranks: Ranks of the stage.
        num_gradients: Number of gradients that its steps have used, over all of its ranks.
        mean_age: Mean age of these gradients, in steps of the stage.
        max_age: Largest age of these gradients.
        max_versions: Largest number of versions of its weights on a rank after a step.
    """

    stage: int
    ranks: tuple[int, ...]
    num_gradients: int
    mean_age: float
    max_age: int
    max_versions: int


def version_rows(timelines: Iterable[RankTimeline]) -> tuple[VersionRow, ...]:
    """Return a row for each pipeline stage that took optimizer steps independently."""
    ages: dict[int, Counter[int]] = defaultdict(Counter)
    versions: dict[int, int] = defaultdict(int)
    ranks: dict[int, set[int]] = defaultdict(set)
    for timeline in timelines:
        for record in timeline.intervals:
            if record.role != "instant" or not (match := RECORD.fullmatch(record.name)):
                continue
            stage = int(match[2])
            ranks[stage].add(timeline.rank)
            if match[1] == "gradient":
                ages[stage][record.seq] += 1
            else:
                versions[stage] = max(versions[stage], record.seq)
    return tuple(
        VersionRow(
            stage=stage,
            ranks=tuple(sorted(ranks[stage])),
            num_gradients=ages[stage].total(),
            mean_age=sum(age * n for age, n in ages[stage].items()) / ages[stage].total(),
            max_age=max(ages[stage]),
            max_versions=versions[stage],
        )
        for stage in sorted(ages)
    )


def versions_text(rows: Iterable[VersionRow]) -> list[str]:
    """Return a line of text on each pipeline stage, for the terminal."""
    return [
        f"stage {row.stage} ({rank_list(row.ranks)}): age of gradients {row.mean_age:.2f} steps on "
        f"average, {row.max_age} at most; live versions of weights: {row.max_versions} at most"
        for row in rows
    ]
