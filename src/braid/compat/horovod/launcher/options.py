"""Table of horovodrun's options: help, configuration file and variables of ranks. Pure.

    --cycle-time-ms 3.5      params:                     HOROVOD_CYCLE_TIME=3.5
                               cycle-time-ms: 3.5

Problem: an option that is parsed, named in the file and passed to ranks in three places is easily
missing in one of them. Idea: one table row for all three.

Source: the documentation of horovodrun, in different words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from braid.compat.horovod.variables import LEVELS

__all__ = ["BY_NAME", "GROUPS", "Option", "megabytes"]


class Option(NamedTuple):
    """One option of horovodrun, as a row of the table of options.

    Attributes:
        flags: Flags as typed; the first long one is the option's name.
        help: Effect of the option.
        metavar: Placeholder of the value in the help; empty for a switch.
        variable: HOROVOD_* variable that the option sets.
        section: Section in the configuration file; the top level when empty.
        key: Key in the section; the option's name when empty.
        negated: Whether the option is a switch with a `--no-` form.
        convert: Function from the option's value (`1` or `0` for a switch) to the variable's.
        use: `here` for options with an effect, `none` for options without, `ask` for options that
            print something and exit.
        num_values: Number of values that the option takes.
    """

    flags: tuple[str, ...]
    help: str
    metavar: str = ""
    variable: str = ""
    section: str = ""
    key: str = ""
    negated: bool = False
    convert: Callable[[str], str] = str
    use: Literal["here", "none", "ask"] = "here"
    num_values: int = 1

    @property
    def name(self) -> str:
        """First long flag, without dashes."""
        return next(flag for flag in self.flags if flag.startswith("--"))[2:]

    @property
    def path(self) -> tuple[str, str]:
        """Section and key in the configuration file."""
        return self.section, self.key or self.name


def megabytes(text: str) -> str:
    """Return megabytes as bytes; return invalid text unchanged, to be refused later."""
    try:
        return str(round(float(text) * (1 << 20)))
    except (ValueError, OverflowError):
        return text


GROUPS: Mapping[str, tuple[Option, ...]] = {
    "information": (
        Option(("-h", "--help"), "show this help and exit", use="ask"),
        Option(("-v", "--version"), "show the version and exit", use="ask"),
        Option(("-cb", "--check-build"), "show the available frameworks and exit", use="ask"),
    ),
    "ranks and hosts": (
        Option(("-np", "--num-proc"), "number of ranks (default: all slots of the hosts)", "N"),
        Option(("-H", "--hosts"), "hosts with their slots, such as a:2,b:2", "HOSTS"),
        Option(("--hostfile", "-hostfile"), "file that names hosts in lines such as `a "
                                            "slots=2`", "FILE"),
        Option(("-p", "--ssh-port"), "port of ssh on the hosts", "PORT"),
        Option(("-i", "--ssh-identity-file"), "key for ssh", "FILE"),
        Option(
            ("--network-interfaces", "--network-interface", "--nics"),
            "interfaces (eth0) or networks (10.0.0.0/8) that ranks of several hosts may use, with "
            "commas",
            "NAMES",
        ),
        Option(("--start-timeout",), "how long hosts may take to answer (default: 60)", "SECONDS"),
        Option(("--mpi", "--use-mpi"), "start ranks with mpirun (Open MPI or MPICH)"),
        Option(("--mpi-args",), "options of mpirun", "ARGS", section="library-options"),
        Option(("--disable-cache",), "check the hosts in each run, which is always done here"),
    ),
    "output": (
        Option(("--verbose",), "show the equivalent `braid run` command first"),
        Option(("--output-filename",), "directory for logs and the record of the run", "DIR"),
        Option(("--prefix-output-with-timestamp", "-prefix-timestamp"), "prefix lines with the "
                                                                        "time"),
        Option(("--config-file",), "YAML file with options; the command line takes "
                                   "precedence", "FILE"),
    ),
    "tensor fusion": (
        Option(
            ("--fusion-threshold-mb",), "largest batch of tensors that are sent together; 0 for "
                                        "none (default: 128)",
            "MB", "HOROVOD_FUSION_THRESHOLD", "params", convert=megabytes,
        ),
        Option(
            ("--cycle-time-ms",), "how long to collect tensors (default: 1, or if all cores "
                                  "compute, until a rank waits for one)",
            "MS", "HOROVOD_CYCLE_TIME", "params",
        ),
        Option(
            ("--cache-capacity",), "number of tensors that ranks remember (default: 1024)",
            "N", "HOROVOD_CACHE_CAPACITY", "params",
        ),
        Option(
            ("--hierarchical-allreduce",), "hierarchical all-reduce (default: by measured cost)",
            variable="HOROVOD_HIERARCHICAL_ALLREDUCE", section="params", negated=True,
        ),
        Option(
            ("--hierarchical-allgather",), "hierarchical allgather, which is always used here",
            variable="HOROVOD_HIERARCHICAL_ALLGATHER", section="params", negated=True,
        ),
    ),
    "autotune": (
        Option(
            ("--autotune",), "search for the best threshold and cycle time",
            variable="HOROVOD_AUTOTUNE", section="autotune", key="enabled", negated=True,
        ),
        Option(
            ("--autotune-log-file",), "CSV file for the settings that the search has tried",
            "FILE", "HOROVOD_AUTOTUNE_LOG", "autotune", "log-file",
        ),
        Option(
            ("--autotune-warmup-samples",), "first samples to discard (default: 3)",
            "N", "HOROVOD_AUTOTUNE_WARMUP_SAMPLES", "autotune", "warmup-samples",
        ),
        Option(
            ("--autotune-steps-per-sample",), "steps per sample (default: 10)",
            "N", "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", "autotune", "steps-per-sample",
        ),
        Option(
            ("--autotune-bayes-opt-max-samples",), "samples of the search (default: 20)",
            "N", "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "autotune", "bayes-opt-max-samples",
        ),
        Option(
            ("--autotune-gaussian-process-noise",), "noise that the search expects (default: 0.8)",
            "X", "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "autotune", "gaussian-process-noise",
        ),
    ),
    "timeline": (
        Option(
            ("--timeline-filename",), "file for the timeline of all tensors, on rank 0's host",
            "FILE", "HOROVOD_TIMELINE", "timeline", "filename",
        ),
        Option(
            ("--timeline-mark-cycles",), "show exchanges as well",
            variable="HOROVOD_TIMELINE_MARK_CYCLES", section="timeline", key="mark-cycles",
            negated=True,
        ),
    ),
    "stall check": (
        Option(
            ("--stall-check",), "report ranks that have not submitted a tensor (default: yes)",
            variable="HOROVOD_STALL_CHECK_DISABLE", section="stall-check", key="enabled",
            negated=True, convert=lambda text: "0" if text == "1" else "1",
        ),
        Option(
            ("--stall-check-warning-time-seconds",), "time that a tensor may be missing on a rank "
                                                     "before the report (default: 60)",
            "SECONDS", "HOROVOD_STALL_CHECK_TIME_SECONDS", "stall-check", "warning-time-seconds",
        ),
        Option(
            ("--stall-check-shutdown-time-seconds",), "time that a tensor may be missing on a rank "
                                                      "before the job is ended; 0 for never "
                                                      "(default: 0)",
            "SECONDS", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "stall-check",
            "shutdown-time-seconds",
        ),
    ),
    "messages of ranks": (
        Option(
            ("--log-level",), f"one of {', '.join(LEVELS)} (default: warning)",
            "LEVEL", "HOROVOD_LOG_LEVEL", "logging", "level",
        ),
        Option(
            ("--log-hide-timestamp", "--log-without-timestamp"), "messages never have a timestamp "
                                                                 "here",
            variable="HOROVOD_LOG_HIDE_TIME", section="logging", key="hide-timestamp", negated=True,
        ),
        Option(("--log-with-timestamp",), "see --prefix-output-with-timestamp", use="none"),
    ),
    "accepted without effect": (
        Option(("--gloo", "--use-gloo"), "there is only one kind of connection", use="none"),
        Option(("--jsrun", "--use-jsrun"), "jsrun is not used", use="none"),
        Option(("--tcp",), "for MPI", section="library-options", use="none"),
        Option(
            ("--binding-args",), "cores of ranks, for MPI", "ARGS",
            section="library-options", use="none",
        ),
        Option(
            ("--mpi-threads-disable",), "for MPI",
            section="library-options", negated=True, use="none",
        ),
        Option(
            ("--num-nccl-streams",), "streams of NCCL", "N",
            "HOROVOD_NUM_NCCL_STREAMS", "library-options", use="none",
        ),
        Option(
            ("--thread-affinity",), "cores of the background thread", "CORES",
            "HOROVOD_THREAD_AFFINITY", "library-options", use="none",
        ),
        Option(
            ("--gloo-timeout-seconds",), "every operation has a deadline", "SECONDS",
            "HOROVOD_GLOO_TIMEOUT_SECONDS", "library-options", use="none",
        ),
        Option(
            ("--ccl-bgt-affinity",), "for oneCCL", "CORES", section="library-options", use="none",
        ),
    ),
    "elastic runs": (
        Option(("--min-np", "--min-num-proc"), "fewest ranks to continue with (default: -np)", "N"),
        Option(("--max-np", "--max-num-proc"), "most ranks (default: all slots)", "N"),
        Option(("--host-discovery-script",), "program that prints lines `HOST:SLOTS`; it runs "
                                             "every second", "FILE"),
        Option(("--slots", "--slots-per-host"), "slots of a host without a number", "N"),
        Option(
            ("--elastic-timeout",), "how long to wait for --min-np ranks (default: 600)",
            "SECONDS", "HOROVOD_ELASTIC_TIMEOUT",
        ),
        Option(
            ("--reset-limit",), "changes of the ranks after which a dead one ends the run "
                                "(default: none)",
            "N", "HOROVOD_RESET_LIMIT",
        ),
        Option(
            ("--blacklist-cooldown-range",), "first and longest delay until the host of a "
                                             "dead rank is used again; it doubles each time "
                                             "(default: never)",
            "SECONDS", num_values=2,
        ),
    ),
}  # fmt: skip

BY_NAME: Mapping[str, Option] = {
    option.name: option for options in GROUPS.values() for option in options
}
