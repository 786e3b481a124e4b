"""A batch script for Slurm that saves and goes on when its time is over or others come first.

    time limit     Slurm sends USR1 to the script 2 minutes before -> SIGTERM to braid -> ranks save
                   -> `scontrol requeue` -> the next run resumes
    preemption     Slurm sends SIGTERM to the agents, and a grace time later to the script -> ranks
                   save -> `scontrol requeue`, since the script has ended before Slurm ends it
    scancel        the same signals, but the job is over
    node failure   the job ends and is requeued; with --min-ranks it keeps its other nodes

Source: sbatch(1) of Slurm 22.05, options --signal, --requeue and --no-kill.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from braid.errors import raise_all
from braid.runtime.option_types import Command, Module, Ranks, Text

__all__ = ["BatchScript"]

SAVE_S = 120  # seconds before the time limit; Slurm may be a minute early
FOLLOW = """\
braid run {words} &
braid=$!
reason=
trap 'reason=limit; kill -TERM "$braid"' USR1
trap 'kill -TERM "$braid"' TERM
wait "$braid"
code=$?
while kill -0 "$braid" 2>/dev/null; do  # a signal has ended the wait, and ranks save
    wait "$braid"
    code=$?
done
if [ "$code" -eq 143 ] && scontrol show job "$SLURM_JOB_ID" | grep -q 'PreemptTime=[0-9]'; then
    reason=preempted
fi
if [ -n "$reason" ] && [ "$code" -ne 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchScript:
    """Batch script for `sbatch` that runs a training.

    Attributes:
        command: Script and its arguments: everything after SCRIPT belongs to it.
        num_ranks: Number of ranks.
        min_ranks: Continue while this many ranks live, with braid.elastic; 0 to end with the first
            one that dies.
        nodes: Number of nodes; 0 for Slurm's choice.
        cpus: Processors of each rank.
        gpus: GPUs of each rank.
        time: Time limit, such as 4:00:00 (default: the partition's).
        partition: Partition (default: the cluster's).
        name: Name of the job.
        is_module: SCRIPT is the name of a Python module.
        options: Further options of sbatch, such as "--account=physics --exclusive".
    """

    command: Command = ()
    num_ranks: Ranks = 1
    min_ranks: int = 0
    nodes: int = 0
    cpus: int = 1
    gpus: int = 0
    time: Text = ""
    partition: Text = ""
    name: str = "braid"
    is_module: Module = False
    options: Text = ""

    def __post_init__(self) -> None:
        problems = []
        if not self.command:
            problems.append("there is no program to run: give a script, or -m and a module")
        if self.num_ranks < 1 or self.cpus < 1:
            problems.append(
                f"-n and --cpus must be at least 1, got {self.num_ranks} and {self.cpus}"
            )
        if not 0 <= self.min_ranks <= self.num_ranks:
            problems.append(f"--min-ranks must be 0 to -n {self.num_ranks}, got {self.min_ranks}")
        if self.nodes < 0 or self.gpus < 0:
            problems.append(
                f"--nodes and --gpus must not be negative, got {self.nodes} and {self.gpus}"
            )
        options = shlex.split(self.options)
        texts = (self.time, self.partition, self.name, *options)
        if any("\n" in text for text in texts):
            problems.append("options must be on one line")
        if not re.fullmatch(r"[\w.-]+", self.name):
            problems.append(
                f"the name may contain only letters, digits, dots and dashes, got {self.name!r}"
            )
        problems += [f"{word!r} is not an option of sbatch" for word in options if word[:1] != "-"]
        raise_all(problems)

    def text(self) -> str:
        """Return the script."""
        options = [
            f"--job-name={self.name}",
            f"--ntasks={self.num_ranks}",
            f"--cpus-per-task={self.cpus}",
            *([f"--nodes={self.nodes}"] if self.nodes else []),
            *([f"--gpus-per-task={self.gpus}"] if self.gpus else []),
            *([f"--time={self.time}"] if self.time else []),
            *([f"--partition={self.partition}"] if self.partition else []),
            f"--output={self.name}-%j.out",
            "--open-mode=append",
            "--requeue",
            *(["--no-kill"] if self.min_ranks else []),
            f"--signal=B:USR1@{SAVE_S}",
            *map(_quoted, shlex.split(self.options)),
        ]
        lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in options), ""]
        return "\n".join(lines) + "\n" + FOLLOW.format(words=self._words())

    def _words(self) -> str:
        """Return the words of `braid run`; a requeued job gets the same directory again."""
        fixed: Sequence[str] = ("--on", "slurm", "-n", str(self.num_ranks), "--resume", "auto")
        limits = ("--min-ranks", str(self.min_ranks)) if self.min_ranks else ()
        threads = ("--threads", str(self.cpus)) if self.cpus > 1 else ()
        command = (*(("-m",) if self.is_module else ()), *self.command)
        log_dir = '--log-dir "runs/slurm-$SLURM_JOB_ID"'
        return f"{shlex.join((*fixed, *limits, *threads))} {log_dir} {shlex.join(command)}"


def _quoted(option: str) -> str:
    """Return an option with its value quoted, so that sbatch reads one word."""
    name, equals, value = option.partition("=")
    return f"{name}{equals}{shlex.quote(value)}" if equals else option
