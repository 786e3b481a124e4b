"""Claims of braid status: the state of a run from its directory, and Prometheus' text format."""

from __future__ import annotations

import io
import os
import re
import socket
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from braid.errors import ConfigError
from braid.launch.observe.live_run import LiveRun, latest_run
from braid.launch.observe.prometheus import export, prometheus_text
from braid.launch.observe.status import RankStatus, RunStatus, status_of, status_view
from braid.launch.supervise.journal import EventLog
from braid.launch.supervise.run_record import write_record
from braid.runtime.clock import VirtualClock
from braid.runtime.diagnose.run_events import EVENTS_FILE, RunEvent
from braid.runtime.diagnose.run_record import RunHost, RunRecord
from braid.runtime.metrics import MetricsFiles

LABEL = r'[a-zA-Z_]\w*="(?:[^"\\\n]|\\\\|\\"|\\n)*"'
SAMPLE = re.compile(
    rf"(?P<name>[a-zA-Z_:][\w:]*)\{{(?P<labels>{LABEL}(?:,{LABEL})*)\}} "
    r"(?P<value>[-+]?(?:\d+(?:\.\d+)?(?:e[-+]?\d+)?|Inf|NaN))"
)
COMMENT = re.compile(r"# HELP ([a-z_]+) .+|# TYPE ([a-z_]+) (?:gauge|counter)")


def _write_run(path: Path) -> EventLog:
    path.mkdir(exist_ok=True)
    write_record(path, RunRecord(braid="0.0", command=("train.py",), num_ranks=3))
    log = EventLog(path)
    for rank in range(3):
        log.append("started", rank=rank, pid=100 + rank, restarts_left=3)
    log.append("epoch", epoch=0, members=(0, 1, 2), num_steps=0)
    with MetricsFiles(path, VirtualClock()) as metrics:
        for step in range(1, 11):
            for rank in range(3):
                row = {"step": step, "unix_s": 1000 + step / 4, "members": 3, "loss": float(rank)}
                metrics.append(rank, row)
    return log


def test_the_state_follows_the_log_while_the_run_goes_on(tmp_path):
    with _write_run(tmp_path) as log:
        run = LiveRun(tmp_path)
        status = status_of(run)
        assert (status.state, status.epoch, status.members) == ("running", 0, (0, 1, 2))
        assert (status.step, status.rate, status.values["loss"]) == (10, 4.0, 1.0)
        log.append("lost", rank=1, text="was killed by signal 9 (SIGKILL)")
        log.append("started", rank=3, pid=103, restarts_left=2)
        log.append("started", rank=4, pid=104, restarts_left=1)
        log.append("waiting", rank=3)
        log.append("epoch", epoch=1, members=(0, 2), num_steps=10)
        log.append("stopped", rank=2, text="was stopped by SIGSTOP")
        run.refresh()
        status = status_of(run)
        states = {rank.rank: rank.state for rank in status.ranks.values()}
        assert states == {0: "training", 1: "lost", 2: "stopped", 3: "waiting", 4: "starting"}
        assert (status.members, status.restarts_left) == ((0, 2), 1)
        assert [event.rank for event in status.faults] == [1, 2]
        log.append("continued", rank=2)
        run.refresh()
        assert status_of(run).ranks[2].state == "training"
    run.refresh()
    assert status_of(run).state == "launcher lost"


def test_the_view_has_members_rate_and_the_last_fault(tmp_path):
    with _write_run(tmp_path) as log:
        log.append("left", rank=1, text="was asked to end")
        log.append("finished", rank=1)
        run = LiveRun(tmp_path)
    console = Console(width=120, file=io.StringIO())
    console.print(status_view(status_of(run), run.events[-1].unix_s))
    text = console.file.getvalue()
    assert "running, step 10, 4 steps/s, epoch 0, 2 members, restarts left: 3" in text
    assert "last fault: rank 1 was asked to end" in text
    assert re.search(r"1 +left +101 +10 ", text)


def test_ranks_that_ended_after_their_launcher_are_not_shown_as_training(tmp_path):
    here = RunHost(name=socket.gethostname(), address="", num_ranks=4)
    record = RunRecord(braid="0.0", command=("train.py",), num_ranks=4, hosts=(here,))
    write_record(tmp_path, record)
    with EventLog(tmp_path) as log:
        for rank, pid in {0: os.getpid(), 2: 1 << 22, 3: 1 << 22}.items():
            log.append("started", rank=rank, pid=pid, restarts_left=3, host="b" * (rank == 3))
        earlier = RunEvent(1.0, "started", 1, pid=os.getpid(), restarts_left=3)  # this number
        with (tmp_path / EVENTS_FILE).open("ab") as file:
            file.write(msgspec.json.encode(earlier) + b"\n")
        log.append("epoch", epoch=0, members=(0, 1, 2, 3), num_steps=0)
    with MetricsFiles(tmp_path, VirtualClock()) as metrics:
        metrics.append(2, {"step": 50, "unix_s": 2e9})
    (tmp_path / "checkpoints" / "step-00000051").mkdir(parents=True)
    (tmp_path / "checkpoints" / ".step-00000052.partial").mkdir()
    status = status_of(LiveRun(tmp_path))
    states = {rank.rank: rank.state for rank in status.ranks.values()}
    assert states == {0: "training", 1: "ended", 2: "ended", 3: "training"}
    assert (status.ranks[1].cause, status.ranks[2].changed_s) == ("after its launcher", 2e9)
    console = Console(width=120, file=io.StringIO())
    console.print(status_view(status, 2e9))
    assert ": launcher lost, step 50, last checkpoint at step 51" in console.file.getvalue()


def test_ranks_with_roles_run_though_they_have_no_epochs(tmp_path):
    write_record(tmp_path, RunRecord(braid="0.0", command=("train.py",), num_ranks=2))
    with EventLog(tmp_path) as log:
        for rank in range(2):
            log.append("started", rank=rank, pid=100 + rank, restarts_left=2, has_role=True)
        log.append("stopped", rank=0, text="was stopped by SIGSTOP")
        log.append("continued", rank=0)
        log.append("lost", rank=1, text="was killed by signal 9 (SIGKILL)")
        log.append("started", rank=2, pid=102, restarts_left=1, has_role=True, replaces=1)
        run = LiveRun(tmp_path)
        status = status_of(run)
    states = {rank.rank: (rank.state, rank.cause) for rank in status.ranks.values()}
    assert states == {
        0: ("running", ""),
        1: ("lost", "was killed by signal 9 (SIGKILL)"),
        2: ("running", "replaces rank 1"),
    }
    console = Console(width=120, file=io.StringIO())
    console.print(status_view(status, run.events[-1].unix_s))
    assert "running, restarts left: 1" in console.file.getvalue()


def test_a_rank_of_another_host_has_its_process_id_when_it_connects(tmp_path):
    with _write_run(tmp_path) as log:
        log.append("started", rank=3, host="b", restarts_left=2)
        log.append("connected", rank=3, pid=812)
        log.append("connected", rank=4, pid=813)  # a full disk has refused its start
        found = status_of(LiveRun(tmp_path)).ranks[3]
    assert (found.pid, found.host, found.state) == (812, "b", "starting")


def test_a_torn_line_is_read_when_it_has_ended(tmp_path):
    with _write_run(tmp_path):
        run = LiveRun(tmp_path)
        count = len(run.events)
        line = msgspec.json.encode({"unix_s": 1.0, "kind": "continued", "rank": 2}) + b"\n"
        with (tmp_path / "events/launcher.jsonl").open("ab", buffering=0) as file:
            file.write(line[:10])
            run.refresh()
            assert len(run.events) == count
            file.write(line[10:])
            run.refresh()
    assert len(run.events) == count + 1


def test_a_directory_without_the_log_is_refused(tmp_path):
    write_record(tmp_path, RunRecord(braid="0.0", command=("train.py",), num_ranks=3))
    with pytest.raises(ConfigError, match=r"launcher\.jsonl is missing or empty"):
        LiveRun(tmp_path)
    with pytest.raises(ConfigError, match="no run found in"):
        latest_run(tmp_path)
    assert latest_run(tmp_path.parent) == tmp_path


def _parsed(text: str) -> dict[tuple[str, tuple[str, ...]], str]:
    assert text.endswith("\n")
    samples = {}
    typed = set()
    for line in text.splitlines():
        if line.startswith("#"):
            match = COMMENT.fullmatch(line)
            assert match, line
            typed.add(match[2] or match[1])
            continue
        match = SAMPLE.fullmatch(line)
        assert match, line
        assert match["name"] in typed
        key = match["name"], tuple(re.findall(LABEL, match["labels"]))
        assert key not in samples
        samples[key] = match["value"]
    return samples


def test_the_text_for_prometheus_has_its_grammar_whatever_the_names():
    rank = RankStatus(rank=0, pid=7, host="a", state="training", started_s=0.0, changed_s=0.0)
    values: Mapping[str, float] = {"step": 4.0, 'a"\\\n{x}': float("inf"), "loss": 1e-9}
    status = RunStatus(name='odd "run"\\\n', state="running", ranks={0: rank}, values=values)
    samples = _parsed(prometheus_text(status))
    assert samples["braid_run_up", (r'run="odd \"run\"\\\n"',)] == "1"
    logged = {key[1][1]: value for key, value in samples.items() if key[0] == "braid_logged"}
    assert logged == {r'name="a\"\\\n{x}"': "+Inf", 'name="loss"': "1e-09"}
    assert samples["braid_steps_per_second", (r'run="odd \"run\"\\\n"',)] == "NaN"


class _Scraper(VirtualClock):
    """Clock that scrapes while the exporter waits, and then ends the run."""

    def __init__(self, url: str, log: EventLog) -> None:
        super().__init__()
        self.url = url
        self.log = log
        self.text = ""

    def sleep(self, duration_s: float) -> None:
        assert duration_s == 1.0
        with urllib.request.urlopen(self.url, timeout=5) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            self.text = answer.read().decode()
        self.log.close()


def test_a_file_and_a_port_give_the_same_state(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    log = _write_run(tmp_path / "run")
    run = LiveRun(tmp_path / "run")
    export(run, str(tmp_path / "run.prom"), _Scraper("", log), every_s=0.0)
    scraper = _Scraper(f"http://127.0.0.1:{port}/metrics", log)
    export(run, str(port), scraper, every_s=1.0)
    assert scraper.text == (tmp_path / "run.prom").read_text()
    assert _parsed(scraper.text)["braid_members", ('run="run"',)] == "3"
    with pytest.raises(ConfigError, match="cannot write"):
        export(run, str(tmp_path / "no" / "x.prom"), scraper, every_s=0.0)
