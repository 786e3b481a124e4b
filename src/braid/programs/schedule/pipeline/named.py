"""Schedules by name: `1f1b`, or `interleaved:4` with four stages on each rank.

Schedules that assign stages to ranks in turns work with any number of stages; a name without a
number has two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from braid.programs.schedule.pipeline.asynchronous import (
    pipedream,
    pipedream_2bw,
    pipedream_vertical_sync,
)
from braid.programs.schedule.pipeline.controllable import v_half, v_min
from braid.programs.schedule.pipeline.interleaved import breadth_first, interleaved
from braid.programs.schedule.pipeline.one_f_one_b import forward_only, gpipe, one_f_one_b
from braid.programs.schedule.pipeline.zero_bubble import zb_h1, zb_h2, zbv
from braid.programs.schedule.program import Program

__all__ = ["ALL_SCHEDULES", "LOOPED", "SCHEDULES", "TRAINING", "Schedule", "find_schedule"]

# function of the numbers of ranks and micro-batches
Schedule = Callable[[int, int], Program]

SCHEDULES: Mapping[str, Schedule] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "breadth_first": breadth_first,
    "interleaved": interleaved,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "zbv": zbv,
    "v_half": v_half,
    "v_min": v_min,
    "forward": forward_only,
}

TRAINING = tuple(name for name in SCHEDULES if name != "forward")

# with schedules that use versions of weights, which `braid.Pipeline` does not execute
ALL_SCHEDULES: Mapping[str, Schedule] = {
    **SCHEDULES,
    "pipedream": pipedream,
    "pipedream_vertical_sync": pipedream_vertical_sync,
    "pipedream_2bw": pipedream_2bw,
}

LOOPED = {"breadth_first": breadth_first, "interleaved": interleaved}


def find_schedule(name: str) -> Schedule | None:
    """Return the schedule with a name, such as `zbv` or `interleaved:4`; None if there is none."""
    base, colon, count = name.partition(":")
    if not colon:
        return ALL_SCHEDULES.get(name)
    if base in LOOPED and count.isdecimal() and int(count) > 1:
        return partial(LOOPED[base], num_chunks=int(count))
    return None
