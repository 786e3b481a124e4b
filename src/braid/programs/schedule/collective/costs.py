"""Costs of a collective's actions: blocks of equal size, and additions at a cost per byte."""

from __future__ import annotations

from braid.programs.schedule.program import Program
from braid.programs.schedule.simulate import Costs

__all__ = ["collective_costs"]


def collective_costs(program: Program, nbytes: float, sum_s_per_byte: float = 0.0) -> Costs:
    """Return the costs of a collective for `simulate`.

    Args:
        program: Program of a collective.
        nbytes: l, bytes of the largest full buffer of a rank; of one of the two of all_to_all.
        sum_s_per_byte: c, seconds per byte that is added up.
    """
    header = program.header
    blocks = program.num_ranks if header.operation == "all_to_all" else header.num_units
    size = nbytes / blocks
    return Costs(
        nbytes=lambda _rank, _action: size,
        seconds=lambda _rank, action: size * sum_s_per_byte * (action.kind == "reduce"),
    )
