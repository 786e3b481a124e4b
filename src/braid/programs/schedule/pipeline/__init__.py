"""Pipeline schedules, as data: see the README of `schedule`."""

from __future__ import annotations

from braid.programs.schedule.pipeline.asynchronous import (
    VersionRule,
    asynchronous,
    num_of_step,
    oldest_ages,
    pipedream,
    placement_of,
    staleness,
)
from braid.programs.schedule.pipeline.controllable import v_half, v_min
from braid.programs.schedule.pipeline.interleaved import breadth_first, interleaved
from braid.programs.schedule.pipeline.linear import (
    StageWork,
    looped,
    most_held,
    pipeline_program,
    vee,
)
from braid.programs.schedule.pipeline.list_schedule import StageCosts, list_schedule
from braid.programs.schedule.pipeline.measures import bubble, measures_text, peak_activations
from braid.programs.schedule.pipeline.named import (
    ALL_SCHEDULES,
    LOOPED,
    SCHEDULES,
    TRAINING,
    Schedule,
    find_schedule,
)
from braid.programs.schedule.pipeline.one_f_one_b import forward_only, gpipe, one_f_one_b
from braid.programs.schedule.pipeline.recompute import RECOMPUTE_MODES, with_recompute, with_steps
from braid.programs.schedule.pipeline.torch_csv import from_csv, to_csv
from braid.programs.schedule.pipeline.versions import ASYNCHRONOUS, ASYNCHRONOUS_RULES
from braid.programs.schedule.pipeline.vocabulary import (
    PIPELINE,
    PIPELINE_RULES,
    stage_ranks,
)
from braid.programs.schedule.pipeline.zero_bubble import zb_h1, zb_h2, zbv

__all__ = [
    "ALL_SCHEDULES",
    "ASYNCHRONOUS",
    "ASYNCHRONOUS_RULES",
    "LOOPED",
    "PIPELINE",
    "PIPELINE_RULES",
    "RECOMPUTE_MODES",
    "SCHEDULES",
    "TRAINING",
    "Schedule",
    "StageCosts",
    "StageWork",
    "VersionRule",
    "asynchronous",
    "breadth_first",
    "bubble",
    "find_schedule",
    "forward_only",
    "from_csv",
    "gpipe",
    "interleaved",
    "list_schedule",
    "looped",
    "measures_text",
    "most_held",
    "num_of_step",
    "oldest_ages",
    "one_f_one_b",
    "peak_activations",
    "pipedream",
    "pipeline_program",
    "placement_of",
    "stage_ranks",
    "staleness",
    "to_csv",
    "v_half",
    "v_min",
    "vee",
    "with_recompute",
    "with_steps",
    "zb_h1",
    "zb_h2",
    "zbv",
]
