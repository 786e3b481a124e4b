"""Pipeline schedules, as data: see the README of `schedule`."""

from braid.schedule.pipeline.one_f_one_b import gpipe, most_held, one_f_one_b
from braid.schedule.pipeline.vocabulary import PIPELINE, check_data, check_work

__all__ = ["PIPELINE", "check_data", "check_work", "gpipe", "most_held", "one_f_one_b"]
