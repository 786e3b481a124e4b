"""After a death that the run survived, real runs name the fault that ended them."""

from __future__ import annotations

from pathlib import Path

import pytest

from braid.launch import JobSpec, QuietConsole, Supervisor
from survived_deaths import STORIES, Story

pytestmark = [pytest.mark.procs, pytest.mark.launcher]
JOBS = str(Path(__file__).with_name("launch_jobs.py"))
ALWAYS = {  # the others cost a second each
    Story("server", "kill", "raise"),
    Story("worker", "exit", "kill"),
    Story("spare", "stop", "SIGTERM"),
    Story("expendable", "kill", "timeout"),
}


@pytest.mark.parametrize(
    "story",
    [
        pytest.param(s, id="-".join(s), marks=() if s in ALWAYS else pytest.mark.proof)
        for s in STORIES
    ],
)
def test_after_a_survived_death_the_later_fault_is_the_cause(tmp_path, story):
    console = QuietConsole()
    job = JobSpec(
        command=(JOBS, "survive", *story[1:], str(story.victim), str(story.culprit)),
        num_ranks=story.num_ranks,
        expendable=story.expendable,
        log_dir=str(tmp_path / "run"),
        grace_s=0.2,
        stopped_limit_s=0.2,
        timeout_s=6.0 if story.later == "timeout" else 60.0,
    )
    outcome = Supervisor(console).run(job)
    verdict = outcome.verdict
    causes = [end.rank for end in verdict.cause]
    told = (verdict.kind, causes, verdict.certain, outcome.exit_code)
    assert told == story.verdict, str(outcome)
    assert [end.rank for end in verdict.survived] == [story.victim]
    assert f"  survived rank {story.victim} (pid {verdict.survived[0].pid})" in str(outcome)
    named = [text for text in console.notices if f"rank {story.culprit} " in text]
    assert bool(named) == bool(causes)  # the cause is announced, though a death was before
