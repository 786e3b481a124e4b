"""Claims of braid.compat.horovod: from a command line of horovodrun to a job of braid's launcher."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.compat.horovod.launcher.check_build import build_table
from braid.compat.horovod.launcher.config_file import with_config
from braid.compat.horovod.launcher.elastic_plan import hosts_of_script
from braid.compat.horovod.launcher.flags import Flags, help_text, parse_flags
from braid.compat.horovod.launcher.job_plan import (
    Launch,
    plan,
    program,
    rsh_command,
    with_rank_variables,
)
from braid.compat.horovod.launcher.options import BY_NAME, GROUPS
from braid.compat.horovod.variables import VARIABLES, WITHOUT_MEANING
from braid.errors import ConfigError
from braid.launch import RANK_VARIABLES, Host, Hosts, JobSpec
from braid.launch.cluster.rank_assignment import used_slots
from braid.launch.engines.options import EngineOptions
from braid.launch.process.job import ElasticLimits

TRAIN = ("python", "train.py", "--lr", "0.1")


def planned(*arguments: str, environ: dict[str, str] | None = None, **options: object) -> Launch:
    return plan(parse_flags(arguments), environ or {}, **options)


def test_a_line_on_one_host_is_a_job_of_that_many_ranks():
    assert planned("-np", "4", *TRAIN, environ={"HOME": "/root"}) == Launch(
        job=JobSpec(command=TRAIN[1:], num_ranks=4, environ={"HOME": "/root"}),
        hosts=None,
        variables={},
        notes=(),
    )


@pytest.mark.parametrize(
    ("words", "slots", "num_ranks", "least", "most"),
    [
        ("-np 3 --min-np 2", 0, 3, 2, 3),
        ("--min-np 2 --max-np 4", 0, 2, 2, 4),
        ("-np 3 --min-np 2 --max-np 4 --host-discovery-script d", 8, 4, 2, 4),
        ("-np 3 --min-np 2 --max-np 4 --host-discovery-script d", 2, 2, 2, 4),
        ("-np 3 --host-discovery-script d", 3, 3, 3, 4096),
        ("-np 3 --min-np 1", 2, 2, 1, 2),
    ],
)
def test_elastic_options_are_limits_of_a_run_on_this_host(words, slots, num_ranks, least, most):
    hosts = (Host("localhost", slots),) if slots else ()
    found = planned(*words.split(), "train.py", hosts=hosts)
    assert (found.hosts, found.job.num_ranks) == (None, num_ranks)
    is_open = "script" in words
    limits = ElasticLimits(min_ranks=least, max_ranks=most, restarts=0, gains_slots=is_open)
    assert found.job.elastic == limits
    again = f"-n {num_ranks} --min-ranks {least} --restarts 0 train.py"
    assert str(found) == f"braid run {again}"


def test_elastic_options_are_limits_of_a_run_on_several_hosts():
    hosts = (Host("far", 2), Host("empty", 0), Host("localhost", 3))
    line = "-np 4 --min-np 2 --max-np 4 --host-discovery-script d train.py"
    found = planned(*line.split(), hosts=hosts)
    assert found.hosts is not None
    assert (found.hosts.hosts, found.hosts.num_ranks) == ((hosts[0], hosts[2]), 4)
    assert str(found) == ("braid run -n 4 -H far:2,localhost:3 --min-ranks 2 --restarts 0 train.py")


@pytest.mark.parametrize(
    ("words", "host", "is_local"),
    [
        ("--host-discovery-script d", "localhost", True),
        ("--host-discovery-script d", "here", False),  # hosts that come later must reach it
        ("", "here", True),
    ],
)
def test_only_a_run_on_localhost_has_no_agents(words, host, is_local):
    line = ["--min-np", "1", *words.split(), "train.py"]
    flags, hosts = parse_flags(line), (Host(host, 2),)
    found = plan(flags, {}, hosts=hosts, is_here=lambda name: name in {"localhost", "here"})
    assert (found.hosts is None) == is_local


@pytest.mark.parametrize(
    ("listed", "blocked", "current", "used"),
    [
        ({"": 4}, {"": 2}, {"": 3}, {"": 2}),
        ({"": 1}, {"": 2}, {"": 1}, {}),
        ({"": 8}, {"": 1}, {"": 4}, {"": 4}),
        ({"a": 2, "b": 2, "c": 2}, {}, {}, {"a": 2, "b": 2}),
        ({"a": 2, "b": 2, "c": 2}, {"a": 9}, {"a": 2, "b": 2}, {"b": 2, "c": 2}),
        ({"a": 2, "b": 2, "c": 2}, {}, {"b": 2, "c": 2}, {"b": 2, "c": 2}),
        ({"a": 4, "b": 2}, {}, {"a": 2, "b": 2}, {"a": 2, "b": 2}),
        ({"b": 1, "c": 9}, {}, {"a": 2, "b": 2}, {"b": 1, "c": 3}),
        ({"a": 2}, {"a": 9}, {"a": 2}, {}),
    ],
)
def test_ranks_stay_on_the_hosts_that_they_have(listed, blocked, current, used):
    assert used_slots(listed, blocked, current, max_ranks=4) == used


def test_elastic_limits_of_ranks_are_their_variables():
    found = planned(
        "-np", "2", "--min-np", "1", "--reset-limit", "5", "--elastic-timeout", "9", "x"
    )
    assert found.variables == {"HOROVOD_RESET_LIMIT": "5", "HOROVOD_ELASTIC_TIMEOUT": "9"}
    rests = planned("--min-np", "1", "--blacklist-cooldown-range", "1", "2.5", "x").elastic
    assert rests is not None
    assert (rests.cooldown_s, rests.limits.gains_slots) == ((1.0, 2.5), True)


@pytest.mark.parametrize(
    ("text", "per_host", "found"),
    [
        ("localhost:2\n", 0, [("localhost", 2)]),
        (" localhost \n\n[::1]:3\n", 4, [("localhost", 4), ("[::1]", 3)]),
        ("\n", 0, "has listed no host"),
        ("localhost:0", 0, [("localhost", 0)]),
        ("localhost", 0, "(or NAME, with --slots-per-host), each host once, got 'localhost'"),
        ("a:2\na:3\nb: 2", 1, "NAME:SLOTS, each host once, got 'a:3' and 1 more"),
        ("Traceback (most recent call last):", 1, "got 'Traceback (most recent call last):'"),
        ("a:-1", 1, "got 'a:-1'"),
        ("a:99999", 1, "got 'a:99999'"),
    ],
)
def test_lines_of_a_discovery_script(text, per_host, found):
    if isinstance(found, list):
        assert hosts_of_script(text, per_host) == tuple(Host(*each) for each in found)
        return
    with pytest.raises(ConfigError) as caught:
        hosts_of_script(text, per_host)
    assert found in str(caught.value)


def test_a_line_on_several_hosts_takes_its_variables_there():
    found = planned(
        "-np", "3", "-H", "a:2,b:2", "-p", "2222", "-i", "my key", "--nics", "eth0,ib0",
        "--start-timeout", "5", "--output-filename", "out", "--cycle-time-ms", "2.5", *TRAIN,
        environ={"HOROVOD_CACHE_CAPACITY": "7"},
    )  # fmt: skip
    rsh = "ssh -o BatchMode=yes -o ConnectTimeout=8 -o ServerAliveInterval=10 -p 2222 -i 'my key' {host}"
    names = ("HOROVOD_CACHE_CAPACITY", "HOROVOD_CYCLE_TIME")
    assert found == Launch(
        job=JobSpec(
            command=TRAIN[1:],
            num_ranks=3,
            log_dir="out",
            where=(
                "-n", "3", "-H", "a:2,b:2", "--rsh", rsh, "--network-interface", "eth0,ib0",
                "--env", ",".join(names),
            ),
            environ={"HOROVOD_CACHE_CAPACITY": "7", "HOROVOD_CYCLE_TIME": "2.5"},
        ),
        hosts=Hosts(
            hosts=(Host("a", 2), Host("b", 2)),
            num_ranks=3,
            rsh=rsh,
            interfaces=("eth0", "ib0"),
            environ=names,
            start_limit_s=5.0,
        ),
        variables={"HOROVOD_CYCLE_TIME": "2.5"},
        notes=(),
    )  # fmt: skip


def test_hosts_of_a_file_give_all_their_slots():
    found = planned("--hostfile", "f", *TRAIN, hosts=(Host("a", 4), Host("b", 1)))
    assert (found.job.num_ranks, found.hosts and found.hosts.num_ranks) == (5, None)


def test_every_option_of_the_engine_becomes_its_variable():
    found = planned(
        "-np", "1", "--fusion-threshold-mb", "32", "--cycle-time-ms", "3.5", "--cache-capacity", "0",
        "--hierarchical-allreduce", "--no-hierarchical-allgather", "--no-autotune",
        "--autotune-log-file", "a.csv", "--autotune-warmup-samples", "1", "--autotune-steps-per-sample", "2",
        "--autotune-bayes-opt-max-samples", "3", "--autotune-gaussian-process-noise", "0.5",
        "--timeline-filename", "t.json", "--timeline-mark-cycles", "--no-stall-check",
        "--stall-check-warning-time-seconds", "5", "--stall-check-shutdown-time-seconds", "9",
        "--log-level", "INFO", "--log-without-timestamp", *TRAIN,
    )  # fmt: skip
    assert found.variables == {
        "HOROVOD_FUSION_THRESHOLD": str(32 << 20),
        "HOROVOD_CYCLE_TIME": "3.5",
        "HOROVOD_CACHE_CAPACITY": "0",
        "HOROVOD_HIERARCHICAL_ALLREDUCE": "1",
        "HOROVOD_HIERARCHICAL_ALLGATHER": "0",
        "HOROVOD_AUTOTUNE": "0",
        "HOROVOD_AUTOTUNE_LOG": "a.csv",
        "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1",
        "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "2",
        "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "3",
        "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "0.5",
        "HOROVOD_TIMELINE": "t.json",
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "5",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "9",
        "HOROVOD_LOG_LEVEL": "INFO",
        "HOROVOD_LOG_HIDE_TIME": "1",
    }
    assert found.notes == ()


def test_an_option_goes_before_the_environment():
    environ = {"HOROVOD_CYCLE_TIME": "9", "HOROVOD_LOG_LEVEL": "info"}
    found = planned("-np", "1", "--cycle-time-ms", "1", *TRAIN, environ=environ)
    assert found.job.environ == {"HOROVOD_CYCLE_TIME": "1", "HOROVOD_LOG_LEVEL": "info"}


def test_what_stands_behind_the_command_is_its_own():
    command = ("python", "train.py", "--", "-np", "9", "--cycle-time-ms", "--nope")
    assert parse_flags(["-np", "2", *command]) == Flags(values={"num-proc": "2"}, command=command)
    assert parse_flags(["-np", "2", "--", *command]).command == command


@pytest.mark.parametrize(
    ("command", "own", "expected"),
    [
        ("python train.py --lr 1", True, ("script", "train.py --lr 1")),
        ("/venv/bin/python3.11 -u train.py", True, ("script", "train.py")),
        ("python -u -m pkg.train -m x", True, ("module", "pkg.train -m x")),
        ("python -O train.py", True, ("program", "python -O train.py")),
        ("python -c pass", True, ("program", "python -c pass")),
        ("python3 train.py", False, ("program", "python3 train.py")),
        ("train.py --lr 1", True, ("script", "train.py --lr 1")),
        ("./train.sh a", True, ("program", "./train.sh a")),
        ("pythonista x", True, ("program", "pythonista x")),
    ],
)
def test_an_interpreter_of_our_own_is_left_out(command, own, expected):
    kind, words = program(tuple(command.split()), lambda _word: own)
    assert (kind, " ".join(words)) == expected


def test_the_hostfile_has_a_short_name_too():
    assert parse_flags(["-hostfile", "h", *TRAIN]) == parse_flags(["--hostfile", "h", *TRAIN])


def test_an_interpreter_without_a_program_is_refused():
    with pytest.raises(ConfigError, match="python is followed by no program"):
        program(("python",), lambda _word: True)


def test_another_interpreter_is_told():
    found = planned("-np", "1", *TRAIN, is_own_python=lambda _word: False)
    assert found.notes == (
        "python train.py ...: runs unchanged, in an interpreter that must also have braid",
    )


def test_what_has_no_meaning_here_is_said_once():
    found = planned(
        "-np", "2", "--gloo", "--tcp", "--mpi-args=-x A", "--start-timeout", "5", *TRAIN,
        environ={"HOROVOD_CYCEL_TIME": "1", "HOROVOD_CONTROLLER": "mpi"},
    )  # fmt: skip
    assert found.notes == (
        "--gloo, --tcp: no effect here",
        "--start-timeout: these options have no effect, as no hosts are named",
        "--mpi-args: no effect without --mpi",
        "HOROVOD_CYCEL_TIME is not a variable of Horovod and has no effect: did you mean HOROVOD_CYCLE_TIME?",
    )


def test_mpi_starts_the_ranks_with_its_options_and_the_variables_of_horovod():
    found = with_rank_variables(
        planned(
            "-np", "3", "-H", "a:2,b:2", "--mpi", "--mpi-args=-x A --mca btl self", "--cycle-time-ms", "3",
            "--nics", "eth0", "--start-timeout", "5", *TRAIN,
        )
    )  # fmt: skip
    assert found.hosts is None
    assert found.notes == ()
    assert found.engine == EngineOptions(
        engine="mpi",
        num_ranks=3,
        words=("--hosts=a:2,b:2", "-x", "A", "--mca", "btl", "self"),
        interfaces=("eth0",),
        environ=("HOROVOD_CYCLE_TIME", RANK_VARIABLES),
        start_limit_s=5.0,
    )
    assert str(found) == (
        "HOROVOD_CYCLE_TIME=3 braid run --on mpi --engine-options '-x A --mca btl self' -n 3 -H a:2,b:2 "
        "--network-interface eth0 --env HOROVOD_CYCLE_TIME train.py --lr 0.1"
    )


def test_mpi_starts_no_elastic_ranks():
    with pytest.raises(ConfigError, match="mpirun starts a fixed number of ranks: leave --mpi"):
        planned("-np", "2", "--min-np", "1", "-H", "localhost:2", "--mpi", *TRAIN)


def test_all_values_that_are_wrong_are_said_at_once():
    with pytest.raises(ConfigError) as caught:
        planned(
            "-np", "0", "-H", "a:1", "--hostfile", "f", "-p", "70000", "--start-timeout", "nan",
            "--fusion-threshold-mb", "x", "--log-level", "loud",
        )  # fmt: skip
    assert str(caught.value) == (
        "--fusion-threshold-mb must be megabytes, 0 or more, got 'x'; "
        "--log-level must be one of trace, debug, info, warning, error, fatal, got 'loud'; "
        "--num-proc must be a whole number, 1 or more, got '0'; --ssh-port must be a port, 1 to 65535, got '70000'; "
        "--start-timeout must be seconds, more than 0, got 'nan'; --hosts and --hostfile both name the hosts: leave one of them out; "
        "the command is missing: end with one such as `python train.py`"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.py"], "number of ranks is missing: add -np N"),
        (["-np"], "argument -np/--num-proc: expected one argument"),
        (["--cycle-tme-ms", "3"], "--cycle-tme-ms: did you mean --cycle-time-ms?"),
        (
            ["--no-hierarchical=1"],
            "--no-hierarchical: did you mean --no-hierarchical-allreduce?",
        ),
        (["-np", "2", "-H", "", "x.py"], "--hosts needs a value, HOSTS (hosts with their slots"),
        (["-np", "2", "--hostfile", "", "x.py"], "--hostfile needs a value, FILE"),
        (["-np", "", "x.py"], "--num-proc needs a value, N"),
        (["--xyzzy"], "--xyzzy (see --help)"),
        (["-np", "2", "-H", "a:1", "x.py"], "-n 2 does not match a:1, with slots for 1 to 1 ranks"),
        (
            ["-np", "2", "--slots", "1", "x.py"],
            "--slots are for elastic runs only: add --min-np or",
        ),
        (["-np", "2", "--min-np", "3", "x.py"], "-np 2 gives 2 slots on this host, but --min-np"),
        (
            ["-np", "4", "--min-np", "3", "--max-np", "2", "x.py"],
            "--min-np 3 is more than --max-np 2: lower --min-np, or raise --max-np; -np 4 is more",
        ),
        (["-np", "2", "--min-np", "x", "x.py"], "--min-np must be a whole number, 1 to 4096"),
        (
            ["--min-np", "2", "--blacklist-cooldown-range", "5", "2", "x.py"],
            "must be two numbers of seconds above 0, the smaller one first, got '5 2'",
        ),
        (
            ["--min-np", "5", "-H", "localhost:2,far:2", "x.py"],
            "the list of hosts gives 4 slots, but --min-np asks for 5: give more slots",
        ),
        (
            ["-H", "localhost:2", "--host-discovery-script", "./d.sh", "x.py"],
            "--hosts and --host-discovery-script both name the hosts: leave one of them out",
        ),
    ],
)
def test_a_line_that_cannot_work_says_why(arguments, message):
    with pytest.raises(ConfigError) as caught:
        planned(*arguments)
    assert message in str(caught.value)


def test_a_variable_that_cannot_work_is_refused_before_the_start():
    with pytest.raises(
        ConfigError, match="HOROVOD_CYCLE_TIME must be milliseconds, 0 or more, got 'x'"
    ):
        planned("-np", "1", *TRAIN, environ={"HOROVOD_CYCLE_TIME": "x"})


def test_the_start_timeout_of_the_environment_stands_below_that_of_the_line():
    environ = {"HOROVOD_START_TIMEOUT": "7"}
    line = ["-np", "1", "-H", "a"]
    found = [
        planned(*line, *more, *TRAIN, environ=environ).hosts
        for more in ([], ["--start-timeout", "8"])
    ]
    assert [where and where.start_limit_s for where in found] == [7.0, 8.0]
    with pytest.raises(
        ConfigError, match="HOROVOD_START_TIMEOUT must be seconds, more than 0, got 'soon'"
    ):
        planned(*line, *TRAIN, environ={"HOROVOD_START_TIMEOUT": "soon"})


def test_a_configuration_file_stands_below_the_command_line():
    content = {
        "verbose": True,
        "num-proc": 4,
        "params": {"fusion_threshold_mb": 32, "cycle-time-ms": 9, "hierarchical-allreduce": False},
        "autotune": {"enabled": False, "log-file": None},
        "timeline": {"filename": "t.json", "mark-cycles": True},
        "stall-check": {"enabled": False, "warning-time-seconds": 5},
        "logging": {"level": "DEBUG"},
        "library_options": {"mpi_args": "-x A", "tcp": True},
    }
    flags = with_config(parse_flags(["--cycle-time-ms", "1", *TRAIN]), content, "c.yaml")
    assert flags == Flags(
        values={
            "verbose": "1",
            "num-proc": "4",
            "fusion-threshold-mb": "32",
            "cycle-time-ms": "1",
            "hierarchical-allreduce": "0",
            "autotune": "0",
            "timeline-filename": "t.json",
            "timeline-mark-cycles": "1",
            "stall-check": "0",
            "stall-check-warning-time-seconds": "5",
            "log-level": "DEBUG",
            "mpi-args": "-x A",
            "tcp": "1",
        },
        command=TRAIN,
    )
    assert plan(flags, {}).variables["HOROVOD_STALL_CHECK_DISABLE"] == "1"


def test_all_that_is_wrong_with_a_configuration_file_is_said_at_once():
    content = {
        "parms": {"cycle-time-ms": 1},
        "params": {"cycle-time": 1, "cache-capacity": [1]},
        "timeline": {"mark-cycles": "yes"},
        "autotune": True,
        "help": True,
        "config-file": "d.yaml",
    }
    with pytest.raises(ConfigError) as caught:
        with_config(Flags(), content, "c.yaml")
    assert str(caught.value) == (
        "c.yaml cannot be used: parms is not known: did you mean params?; "
        "params.cycle-time is not known: did you mean cycle-time-ms?; params.cache-capacity must be one value, got [1]; "
        "timeline.mark-cycles must be true or false, got 'yes'; autotune must contain keys, such as enabled, got True; "
        "help is not known; config-file is not known"
    )


def test_a_configuration_file_may_be_empty_but_not_a_list():
    assert with_config(Flags(), None, "c.yaml") == Flags()
    with pytest.raises(ConfigError, match=r"c.yaml must have sections such as `params:`, got list"):
        with_config(Flags(), [1], "c.yaml")


def test_the_line_of_braid_run_is_shown():
    found = planned("-np", "2", "--cycle-time-ms", "3", "python", "-m", "pkg", "a b")
    assert str(found) == "HOROVOD_CYCLE_TIME=3 braid run -n 2 -m pkg 'a b'"


def test_a_key_with_braces_is_refused():
    with pytest.raises(ConfigError, match="must not contain braces"):
        rsh_command(None, "{host}")


def test_the_table_of_options_is_whole():
    variables = {option.variable for option in BY_NAME.values() if option.variable}
    assert variables <= {*VARIABLES, *WITHOUT_MEANING}
    flags = [flag for options in GROUPS.values() for option in options for flag in option.flags]
    assert len(flags) == len(set(flags))
    shown = help_text()
    assert all(flag in shown and title in shown for title in GROUPS for flag in flags)


def test_the_build_table_marks_only_what_is_there():
    told = {"torch": "2.13.0", "nccl": True, "cuda": False}
    lines = build_table(told, has_front=True).splitlines()
    assert [line.strip() for line in lines if "[X]" in line] == [
        "[X] PyTorch 2.13.0",
        "[X] braid: shared memory and sockets",
        "[X] NCCL (no GPU is seen here)",
        "[X] braid: shared memory and sockets",
    ]
    assert "[X] PyTorch" not in build_table({}, has_front=True)
    assert "[X] PyTorch" not in build_table(told, has_front=False)


def test_the_launcher_does_without_torch():
    code = "import braid.compat.horovod.launcher.horovodrun, sys; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


@given(
    st.lists(st.text(max_size=8) | st.sampled_from([f for o in BY_NAME.values() for f in o.flags]))
)
def test_any_line_is_read_or_refused(arguments):
    try:
        flags = parse_flags(arguments)
    except ConfigError:
        return
    assert flags.command == tuple(arguments[len(arguments) - len(flags.command) :])


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: st.dictionaries(
            st.sampled_from(["params", "timeline", "verbose", "cycle-time-ms", "mark-cycles", "x"]),
            inner,
        ),
    )
)
def test_any_configuration_is_read_or_refused(content):
    try:
        flags = with_config(Flags(), content, "c.yaml")
    except ConfigError:
        return
    assert set(flags.values) <= set(BY_NAME)
