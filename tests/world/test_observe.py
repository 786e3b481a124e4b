"""`braid report` of what `braid run` left: real ranks, real rings."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from braid import cli
from braid.launch import JobSpec, QuietConsole, Supervisor
from braid.launch.observe import build_story, read_run

pytestmark = [pytest.mark.procs, pytest.mark.launcher]

JOB = """
import os, signal, sys, torch, braid
group = braid.init()
events = group.context.events
model = torch.nn.Linear(64, 64)
wrapped = braid.DistributedDataParallel(model, process_group=group)
for step in range(5):
    with events.span("step", seq=step):
        with events.span("forward", seq=step):
            loss = wrapped(torch.ones(4, 64)).sum()
        if sys.argv[1:] == ["die"] and step == 3 and group.rank == 1:
            events.span("load <shard>")
            os.kill(os.getpid(), signal.SIGKILL)
        with events.span("backward", seq=step):
            loss.backward()
    braid.log(step=step, loss=loss / (1 + group.rank), samples=4, best=step)
"""
# the same without steps of its own
OWN_LOOP = JOB.replace('with events.span("step", seq=step)', "if True").replace(
    "step=step", "step=step + 10"
)


def _run(tmp_path: Path, *arguments: str, text: str = JOB) -> Path:
    script = tmp_path / "<b>.py"
    script.write_text(text)
    command = (str(script), *arguments)
    job = JobSpec(command=command, num_ranks=2, log_dir=str(tmp_path / "run"), grace_s=2.0)
    Supervisor(QuietConsole()).run(job)
    return tmp_path / "run"


def test_a_run_becomes_a_page_and_a_trace(tmp_path, capsys):
    run = _run(tmp_path)
    assert cli.main(["report", str(run)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for text in ("run finished at step 4", "rank 0", "rank 1", "compute", "ranks waited"):
        assert text in printed, text
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    steps = [(e["pid"], e["name"]) for e in events if e.get("cat") == "step"]
    assert steps == [(rank, f"step {step}") for rank in (0, 1) for step in range(5)]
    arrows = [e["ph"] for e in events if e.get("cat") == "flow"]
    assert arrows.count("s") == arrows.count("f") >= 5
    page = (run / "report.html").read_text()
    assert "&lt;b&gt;.py" in page
    assert "<b>" not in page
    assert "all_reduce(float32[" in page
    assert re.search(r"<th>bucket 1 of 1.*?</td><td>4 of 4</td>", page, re.DOTALL)


def test_a_loop_without_steps_of_its_own_has_those_of_its_averagings_and_what_it_logs(
    tmp_path, capsys
):
    run = _run(tmp_path, text=OWN_LOOP)
    story = build_story(read_run(run))
    assert [row["step"] for row in story.run.metrics] == [10, 11, 12, 13, 14]
    by_rank = [rows[-1]["loss"] for rows in story.run.rank_metrics.values()]
    assert story.run.metrics[-1]["loss"] == pytest.approx(sum(by_rank) / 2)
    assert by_rank[0] == pytest.approx(2 * by_rank[1])
    assert (story.num_steps, [row.num_steps for row in story.rank_rows]) == (5, [5, 5])
    assert [picture.title.split(",")[0] for picture in story.pictures][
        -1
    ] == "The first step: step 10"
    titles = [title for title, _ in story.charts]
    assert titles == ["Loss", "Throughput", "Step time", "Memory", "best"]
    assert not any(row.name.startswith("init(") for row in story.operations)
    assert story.run.record.packages["torch"]
    assert "at step 14" in str(story.outcome)


def test_a_killed_rank_is_shown_inside_of_what_it_did(tmp_path, capsys):
    run = _run(tmp_path, "die")
    assert cli.main(["report", str(run), "--out", str(tmp_path / "page.html")]) == 0
    assert "killed by signal 9 (SIGKILL)" in capsys.readouterr().out
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    unfinished = {e["name"] for e in events if e["pid"] == 1 and "unfinished" in e.get("args", ())}
    assert unfinished == {"step 3 (unfinished)", "load <shard> (unfinished)"}
    page = (tmp_path / "page.html").read_text()
    assert page.index("The end of the run") < page.index("All steps")


def test_what_is_no_run_is_refused_with_exit_code_2(tmp_path, capsys):
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "has no run.json: give the directory of a run" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
