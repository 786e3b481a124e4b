"""Programs as the CSV of torch's pipeline schedules: a row per rank, a cell per work.

    0F0,0F1,,,3F0,3I0,3W0,(0F2;3B1)OVERLAP_F_B,...
    1F0,2F0,...

A cell is stage, kind (F, B, I or W) and micro-batch; an empty one is idle time, which follows from
the order. Work that torch does overlapped, `(...)OVERLAP_F_B`, becomes the parts in the order in
which torch does them. The file has no messages (`format="compute_only"`): they follow from the
work, so that the program is valid with them or is refused. Errors name row, column and cell.

Source: `_PipelineScheduleRuntime._load_csv` of torch 2.13, torch/distributed/pipelining/schedules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from braid.errors import ConfigError
from braid.programs.schedule.pipeline.linear import StageWork, pipeline_program
from braid.programs.schedule.pipeline.vocabulary import (
    PIPELINE,
    PIPELINE_RULES,
    TRAIN,
    WORK,
    check_work,
    stage_ranks,
)
from braid.programs.schedule.program import Action, Header, Program
from braid.programs.schedule.validate import Rules, Violation, validate

__all__ = ["from_csv", "to_csv"]

MOST_RANKS = 4096  # the text may come from anywhere
MOST_REPORTED = 3  # mistakes in one error

_WORK = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})", re.ASCII)
_OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_NO_WORK = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB]\d+)", re.ASCII)


class _Cell(NamedTuple):
    row: int
    column: int
    text: str

    def __str__(self) -> str:
        return f"row {self.row}, column {self.column}, cell {self.text!r}"


def to_csv(program: Program) -> str:
    """Convert a pipeline program to CSV for torch's schedules; messages are left out.

    Raises:
        ConfigError: The program is not a pipeline that trains.
    """
    if program.vocabulary.name != PIPELINE.name or program.header.operation != TRAIN:
        msg = (
            f"only training pipelines can be written as torch's CSV, got {program}: choose a "
            "pipeline schedule"
        )
        raise ConfigError(msg)
    rows = (
        ",".join(f"{a.unit}{a.kind}{a.index}" for a in actions if a.kind in WORK)
        for actions in program.ranks
    )
    return "".join(f"{row}\n" for row in rows)


def from_csv(text: str, name: str = "csv") -> Program:
    """Parse a pipeline program from torch's CSV, and add messages.

    Args:
        text: A row for each rank.
        name: Name of the program.

    Returns:
        A valid program with the stages and micro-batches that the cells contain.

    Raises:
        ConfigError: A cell is not an action such as `0F1`, or the program is not valid; the message
            names row, column and cell.
    """
    rows = text.rstrip().split("\n")
    if len(rows) > MOST_RANKS:
        msg = f"a program has at most {MOST_RANKS} rows, one for each rank, got {len(rows)}"
        raise ConfigError(msg)
    cells = [list(_parsed(row, number)) for number, row in enumerate(rows, 1)]
    work = [[item for item, _ in row] for row in cells]
    if not any(work):
        msg = (
            "row 1, column 1: a schedule must begin with work such as 0F0, but the file has no work"
        )
        raise ConfigError(msg)
    local = _without_messages(name, work)
    _check(validate(local, {PIPELINE.name: Rules(check_work, lambda *_: [])}), local, cells)
    homes = stage_ranks(local)
    placement = [homes[stage] for stage in range(local.header.num_units)]
    program = pipeline_program(name, work, placement, local.header.num_indices)
    _check(validate(program, {PIPELINE.name: PIPELINE_RULES}), program, cells)
    return program


def _parsed(row: str, number: int) -> Iterator[tuple[StageWork, _Cell]]:
    for column, raw in enumerate(row.split(","), 1):
        cell = _Cell(number, column, raw.strip())
        overlapped = _OVERLAPPED.fullmatch(cell.text)
        for part in overlapped[1].split(";") if overlapped else [cell.text]:
            match = _WORK.fullmatch(part.strip())
            if match:
                yield StageWork(match[2], int(match[1]), int(match[3])), cell
            elif _NO_WORK.fullmatch(part.strip()):
                msg = (
                    f"{cell} is a message or reduction, which braid adds itself. Write the file "
                    'with _dump_csv(file, format="compute_only")'
                )
                raise ConfigError(msg)
            elif cell.text:
                msg = (
                    f"{cell} must be stage, F, B, I or W, and micro-batch, such as 2F0, or several "
                    "as in (0F2;3B1)OVERLAP_F_B"
                )
                raise ConfigError(msg)


def _without_messages(name: str, work: Sequence[Sequence[StageWork]]) -> Program:
    stages = max(item.stage for items in work for item in items) + 1
    microbatches = max(item.microbatch for items in work for item in items) + 1
    ranks = tuple(tuple(Action(*item) for item in items) for items in work)
    return Program(PIPELINE, Header(name, TRAIN, stages, microbatches), ranks)


def _check(
    violations: Sequence[Violation],
    program: Program,
    cells: Sequence[Sequence[tuple[StageWork, _Cell]]],
) -> None:
    """Raise ConfigError with the places of violations in the file."""
    if not violations:
        return
    texts = [
        f"{_place(violation, program, cells)}: {violation.text}"
        for violation in violations[:MOST_REPORTED]
    ]
    more = len(violations) - len(texts)
    msg = f"not a valid schedule: {'; '.join(texts)}{f'; and {more} more' if more else ''}"
    raise ConfigError(msg)


def _place(
    violation: Violation, program: Program, cells: Sequence[Sequence[tuple[StageWork, _Cell]]]
) -> str:
    if violation.rank < 0:
        return "file"
    row = cells[violation.rank]
    if violation.position < 0:
        return f"row {violation.rank + 1}"
    before = program.ranks[violation.rank][: violation.position]
    work_before = sum(action.kind in WORK for action in before)
    # messages stand before the work that needs them, or at the end
    return str(row[min(work_before, len(row) - 1)][1])
