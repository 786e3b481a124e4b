"""The vocabularies of braid and their rules, for parsers and validators."""

from __future__ import annotations

from collections.abc import Mapping

from braid.programs.schedule.collective import COLLECTIVE, check_contributions, check_slots
from braid.programs.schedule.pipeline import (
    ASYNCHRONOUS,
    ASYNCHRONOUS_RULES,
    PIPELINE,
    PIPELINE_RULES,
)
from braid.programs.schedule.program import Vocabulary
from braid.programs.schedule.validate import Rules

__all__ = ["RULES", "VOCABULARIES"]

VOCABULARIES: Mapping[str, Vocabulary] = {v.name: v for v in (COLLECTIVE, PIPELINE, ASYNCHRONOUS)}
RULES: Mapping[str, Rules] = {
    COLLECTIVE.name: Rules(check_slots, check_contributions),
    PIPELINE.name: PIPELINE_RULES,
    ASYNCHRONOUS.name: ASYNCHRONOUS_RULES,
}
