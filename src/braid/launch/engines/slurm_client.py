"""The client of Slurm: one step with an agent on each node of an allocation.

    braid run ── slurm_client ── salloc ── slurm_client ── srun ──> agent of n1 ──> ranks 0, 1
                 (log-in node)             (allocation)         └─> agent of n2 ──> ranks 2, 3

Inside of an allocation (sbatch, salloc) its nodes are used; elsewhere `salloc` makes one, which
ends with the agents. srun broadcasts the invitation to its tasks' stdin. `--no-kill` keeps the
other nodes after the failure of one: the launcher decides whether the run continues.

Words: options of salloc, such as --partition=gpu, --time=60, --gres=gpu:4.

Source: the manual pages srun(1), salloc(1), sinfo(1) of Slurm 22.05.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

from braid.errors import ConfigError
from braid.launch.cluster.rank_assignment import Host
from braid.launch.engines.client_words import ClientWords, FromClient, run_client
from braid.launch.engines.starting import AGENT, Command, run_commands
from braid.runtime.rendezvous.slurm_names import expand_counts, expand_hostlist

__all__ = ["allocated", "lost_task", "main"]

SELF = "braid.launch.engines.slurm_client"
ENDED = re.compile(r"srun: error: (\S+): tasks? ([\d,-]+): (.+)")
GONE = re.compile(r"srun: error: Node failure on (\S+)")
TEST_LIMIT_S = 20.0
# sizes of the enclosing step or script, which srun would prefer to its own options
SIZES = (
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    *("SLURM_NNODES", "SLURM_STEP_NUM_TASKS", "SLURM_DISTRIBUTION", "SLURM_CPU_BIND"),
)


def allocated(environ: Mapping[str, str], num_ranks: int = 0) -> tuple[Host, ...]:
    """Return the nodes of the allocation that a job needs, with the ranks of each.

    Args:
        environ: Environment of a process in the allocation.
        num_ranks: Number of ranks; the number of tasks of the allocation when 0.

    Raises:
        ConfigError: The allocation is too small.

    >>> job = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "4(x2)"}
    >>> [str(host) for host in allocated(job, 6)]
    ['n1:4', 'n2:2']
    """
    names = expand_hostlist(environ.get("SLURM_JOB_NODELIST", ""))
    tasks = expand_counts(environ.get("SLURM_TASKS_PER_NODE", ""))
    cpus = expand_counts(environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
    slots = tasks if len(tasks) == len(names) else [1] * len(names)
    if num_ranks > sum(slots) and len(cpus) == len(names):
        slots = cpus  # an allocation by nodes, such as -N 2
    wanted = num_ranks or sum(slots)
    if not names or wanted > sum(slots):
        has = ", ".join(map(str, map(Host, names, slots))) or "no nodes"
        msg = (
            f"the allocation has {sum(slots)} tasks on {has}, but the job needs {wanted}: lower -n "
            "or --max-ranks"
        )
        raise ConfigError(msg)
    hosts = []
    for name, count in zip(names, slots, strict=True):
        share = min(count, wanted)
        wanted -= share
        if share:
            hosts.append(Host(name, share))
    return tuple(hosts)


def lost_task(hosts: Sequence[Host], line: str) -> tuple[int, str] | None:
    """Return the lost node and the reason that a line of srun names; None for other lines.

    >>> lost_task([Host("n1"), Host("n2")], "srun: error: n2: task 1: Killed")
    (1, 'was ended by Slurm: Killed')
    """
    names = [host.name for host in hosts]
    ended, gone = ENDED.match(line), GONE.match(line)
    if ended is not None and ended[1] in names:
        return names.index(ended[1]), f"was ended by Slurm: {ended[3]}"
    if gone is not None and gone[1] in names:
        return names.index(gone[1]), "is lost to Slurm: node failure"
    return None


def main(words: Sequence[str]) -> int:
    """Allocate nodes, start agents, and wait for their end; return the exit code.

    `words` are the arguments of this program.
    """
    options = ClientWords.parse(words, (), others=True)
    if "SLURM_JOB_ID" not in os.environ:
        _allocate(options.num_ranks or 1, options.rest)
    elif options.rest:
        msg = (
            f"inside of Slurm job {os.environ['SLURM_JOB_ID']} braid uses the nodes of this job: "
            f"leave {' '.join(options.rest)} out"
        )
        raise ConfigError(msg)
    hosts = allocated(os.environ, options.num_ranks)
    FromClient(hosts=tuple((host.name, host.slots) for host in hosts)).send()
    line = sys.stdin.buffer.readline()
    if not line:  # the launcher has given up
        return 0
    count = str(len(hosts))
    argv = [
        *("srun", "--nodes", count, "--ntasks", count, "--ntasks-per-node", "1"),
        *("--nodelist", ",".join(host.name for host in hosts), "--overlap"),
        *("--cpu-bind", "none", "--no-kill", "--kill-on-bad-exit=0"),
        *("--quiet", *AGENT),
    ]
    environ = {name: value for name, value in os.environ.items() if name not in SIZES}
    return run_commands([Command(argv, line, lambda text: lost_task(hosts, text))], environ)


def _allocate(num_ranks: int, words: Sequence[str]) -> None:
    """Become `salloc`, which runs this program in the allocation.

    Raises:
        ConfigError: Slurm is not installed here, or can never satisfy the request.
    """
    asked = [f"--ntasks={num_ranks}", *words]
    if shutil.which("salloc") is None:
        msg = "Slurm is not installed here: no salloc on PATH. Run on a log-in node of the cluster"
        raise ConfigError(msg)
    try:
        test = subprocess.run(
            ["srun", "--test-only", *asked, "true"],
            capture_output=True,
            text=True,
            timeout=TEST_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        msg = (
            f"Slurm does not answer within {TEST_LIMIT_S:g} s: check with `sinfo` that slurmctld "
            "runs"
        )
        raise ConfigError(msg) from exc
    if test.returncode:
        why = (test.stderr.strip().splitlines() or ["it gives no reason"])[-1]
        msg = f"Slurm refused {' '.join(asked)}: {why}. Ask for less. Free are {_free()}"
        raise ConfigError(msg)
    argv = ["salloc", "--no-kill", *asked, sys.executable, "-m", SELF, f"--num-ranks={num_ranks}"]
    os.execvp(argv[0], argv)  # noqa: S606 - salloc gives the nodes back when its command ends


def _free() -> str:
    """Return the idle processors of each node, in Slurm's words."""
    argv = ["sinfo", "-h", "-N", "-o", "%N %C %t"]
    try:
        answer = subprocess.run(
            argv, capture_output=True, text=True, timeout=TEST_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown: sinfo does not answer"
    lines = [line.split() for line in sorted(set(answer.stdout.splitlines()))]
    free = [
        f"{name} {processors.split('/')[1]} of {processors.split('/')[3]} ({state})"
        for name, processors, state in (line for line in lines if len(line) == 3)
        if processors.count("/") == 3
    ]
    return ", ".join(free) or "no nodes"


if __name__ == "__main__":
    sys.exit(run_client("slurm", main))
