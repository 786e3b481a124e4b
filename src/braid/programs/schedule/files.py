"""Files of programs: braid's text, or torch's CSV where the name ends with `.csv`.

This is the only module of `schedule` that reads files. A pipeline's schedule may be a file wherever
it may be a name; a file is of one number of ranks and micro-batches, and refuses other ones.
"""

from __future__ import annotations

from pathlib import Path

from braid.errors import ConfigError
from braid.programs.schedule.known import RULES, VOCABULARIES
from braid.programs.schedule.pipeline import PIPELINE, TRAINING, Schedule, find_schedule, from_csv
from braid.programs.schedule.pipeline.vocabulary import TRAIN
from braid.programs.schedule.program import Program
from braid.programs.schedule.text import from_text
from braid.programs.schedule.validate import validate

__all__ = [
    "check_schedule",
    "is_file",
    "read_program",
    "read_text",
    "schedule_named",
    "valid_program",
]

CSV = ".csv"


def is_file(name: str) -> bool:
    """Return whether a name is a file, not an algorithm: it exists, or ends with .csv."""
    try:
        return name.endswith(CSV) or Path(name).is_file()
    except OSError:  # no name of a file
        return False


def read_text(file: str) -> str:
    """Read a text file.

    Raises:
        ConfigError: The file cannot be read.
    """
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        msg = f"the text file {file} cannot be read: {exc}"
        raise ConfigError(msg) from exc


def read_program(file: str) -> Program:
    """Read a program without checking its rules; only a program in CSV is checked.

    Raises:
        ConfigError: The file cannot be read, or is not a program; the message has the position.
    """
    text = read_text(file)
    try:
        return from_csv(text) if file.endswith(CSV) else from_text(text, VOCABULARIES)
    except ConfigError as exc:
        msg = f"{file}, {exc}"
        raise ConfigError(msg) from exc


def valid_program(file: str) -> Program:
    """Read a program, and check that it breaks no rule.

    Raises:
        ConfigError: The file cannot be read, is not a program, or breaks a rule.
    """
    program = read_program(file)
    violations = validate(program, RULES)
    if violations:
        msg = (
            f"the program in {file} is not valid: {'; '.join(map(str, violations[:3]))}. See braid "
            "schedule check"
        )
        raise ConfigError(msg)
    return program


def check_schedule(name: str) -> str:
    """Return an error message if a name is neither a training schedule nor a file; else no text."""
    if _known(name) is not None or is_file(name):
        return ""
    return (
        f"unknown schedule {name!r}: choose one of {', '.join(TRAINING)}; interleaved:4 or "
        "breadth_first:4 for four stages on each rank; or a file such as plan.csv"
    )


def schedule_named(name: str) -> Schedule:
    """Return the schedule of a name or file: a function (ranks, micro-batches) -> program.

    Raises:
        ConfigError: The name is unknown and not a file, or the file does not contain a valid
            pipeline that trains.
    """
    if problem := check_schedule(name):
        raise ConfigError(problem)
    if (known := _known(name)) is not None:
        return known
    program = valid_program(name)
    if program.vocabulary.name != PIPELINE.name or program.header.operation != TRAIN:
        msg = (
            f"the schedule in {name} does not train a pipeline, it is {program}: name a file "
            "with a pipeline schedule"
        )
        raise ConfigError(msg)

    def of_size(num_ranks: int, num_microbatches: int) -> Program:
        sizes = program.num_ranks, program.header.num_indices
        if sizes != (num_ranks, num_microbatches):
            msg = (
                f"the schedule in {name} is for {sizes[0]} ranks and {sizes[1]} micro-batches, "
                f"got {num_ranks} and {num_microbatches} micro-batches: use the numbers of the "
                f"schedule, and batches of at least {sizes[1]} rows"
            )
            raise ConfigError(msg)
        return program

    return of_size


def _known(name: str) -> Schedule | None:
    """Return the schedule of a name, if it trains."""
    return find_schedule(name) if name.partition(":")[0] in TRAINING else None
