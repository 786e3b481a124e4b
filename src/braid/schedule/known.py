"""The vocabularies of braid and their rules, for parsers and validators."""

from __future__ import annotations

from collections.abc import Mapping

from braid.schedule.collective import COLLECTIVE, check_contributions, check_slots
from braid.schedule.pipeline import PIPELINE, check_data, check_work
from braid.schedule.program import Vocabulary
from braid.schedule.validate import Rules

__all__ = ["RULES", "VOCABULARIES"]

VOCABULARIES: Mapping[str, Vocabulary] = {v.name: v for v in (COLLECTIVE, PIPELINE)}
RULES: Mapping[str, Rules] = {
    COLLECTIVE.name: Rules(check_slots, check_contributions),
    # sends of a pipeline do not wait for their receives: see the engine
    PIPELINE.name: Rules(check_work, check_data, ("buffered",)),
}
