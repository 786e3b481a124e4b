"""The page shows the right figures, escapes everything, and can be made of any directory that is a run."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from observe_job import (
    RecordedRank,
    build,
    failed_report,
    late_job,
    record_of,
    train,
    write_run,
)
from rich.console import Console

from braid.errors import ConfigError
from braid.launch.observe import build_story, print_summary, publish, read_run, render_page
from braid.launch.observe.figures import line_chart, ticks
from braid.runtime.diagnose.block import error_block, render_block
from braid.runtime.diagnose.tracebacks import ParsedError
from braid.runtime.diagnose.verdict import MemoryKill, RankEnd, judge

METRICS = [
    {"step": step, "loss": 5.0 - 0.5 * step, "tokens_per_s": 1000.0 + step, "mfu": 0.25}
    for step in range(6)
]


class Page(HTMLParser):
    """Tags and text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        self.text = re.sub(r"\s+", " ", self.text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += f" {data}"


def _page(path) -> Page:
    return Page(_html(path))


def _html(path) -> str:
    return render_page(build_story(read_run(path)), trace="trace.json", machine="host m: 2 cores")


def test_a_report_shows_shares_facts_curves_operations_and_logs(tmp_path):
    start = {"kind": "start", "model": "tiny", "num_params": 123200}
    start |= {"device": "NVIDIA H200", "dtype": "bf16", "peak_flops_per_s": 989e12}
    start |= {"peak_source": "a data sheet, bf16"}
    path = write_run(
        tmp_path / "run",
        late_job(),
        metrics=[start, *METRICS, {"step": 5, "eval_loss": 2.25}],
        logs={0: "step 5 done\n", 1: ""},
    )
    page = _page(path)
    for text in (
        "braid run -n 2 train.py --lr 0.1",
        "finished 3.23 s, 2 ranks, 6 recorded steps, started 2026-11-20 23:57:22 UTC",
        "job model tiny, on NVIDIA H200 in bf16, 123k parameters",
        "989T FLOP/s peak per rank (a data sheet, bf16)",
        "rank 1 was 12 ms late in forward of step 4",
        "training 2.5 at step 5",
        "held out 2.25 at step 5",
        "tokens/s 1k at step 5",
        "MFU 25 at step 5",
        "rank 0 compute 70 %",  # 6 steps: (6 * 7) of (6 * 8 + 12) ms
        "The slowest step: step 4, 20 ms",
        "The median step: step ",
        "The first step: step 0, 8 ms",
        "all_reduce(float32[1000], avg) train.py:6 in <module> 12 46.9 KiB 24 ms 1 ms 13 ms 50 %",
        "step 5 done",
        "The log is empty.",
        "host m: 2 cores",
    ):
        assert text in page.text, text


def test_a_page_loads_nothing_and_is_well_formed(tmp_path):
    html = _html(write_run(tmp_path / "run", late_job(), metrics=METRICS))
    tags = Page(html).tags
    assert {tag for tag, _ in tags} & {"script", "link", "img", "iframe", "object"} == set()
    links = [value for _, attrs in tags for name, value in attrs.items() if name in {"src", "href"}]
    assert links == ["trace.json"]
    assert not re.search(r"url\(|@import|https?:", html)
    assert "default-src 'none'" in html
    for drawing in re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL):
        ET.fromstring(drawing)


def test_every_text_of_a_run_is_escaped(tmp_path):
    evil = "<b onmouseover='x()'>\"&.py"

    def names(rank):
        with rank.recorder.span("step"), rank.recorder.span(evil):
            rank.work(5)
            site = rank.recorder.intern(f"{evil}:3 in <lambda>")
            with rank.recorder.span(f"all_reduce({evil})", site=site):
                rank.work(1)

    path = write_run(
        tmp_path / evil.replace("/", ""),
        build(names),
        metrics=[{"model": evil}, *METRICS],
        logs={0: f"\x1b[31m{evil}\x1b[0m"},
        command=[evil],
        threads=evil,
        outcome=failed_report(doing=evil),
    )
    page = _page(path)
    assert "b" not in {tag for tag, _ in page.tags}
    assert all("onmouseover" not in attrs for _, attrs in page.tags)
    assert page.text.count(evil) >= 6
    assert "\x1b" not in page.text


def test_a_long_argument_is_left_out_of_the_title_and_stands_below(tmp_path):
    config = '{"lr": ' + "1" * 100 + "}"
    page = _page(write_run(tmp_path / "run", [], command=["train.py", config]))
    assert " braid run -n 1 train.py ... " in page.text
    assert page.text.count(config) == 1


def test_a_failed_run_begins_with_its_outcome_and_shows_its_end(tmp_path):
    def survivor(rank):
        with rank.recorder.span("step"):
            rank.phase("forward", 2)
            rank.reduce(1, wait_ms=0, transfer_ms=4)

    def victim(rank):
        rank.recorder.span("step")
        rank.phase("forward", 2)
        rank.recorder.span("load <shard>")

    path = write_run(
        tmp_path / "run",
        build(survivor, victim),
        logs={0: "lost a peer", 1: "loading"},
        outcome=failed_report(),
    )
    story = build_story(read_run(path))
    assert story.outcome.splitlines() == [
        "braid: run stopped at step 3 after 3.2 s (exit 137)",
        "  cause    rank 1 (pid 812): killed by signal 9 (SIGKILL) in load <shard>, at step 0",
        "  affected rank 0 was waiting in all_reduce(float32[1000], avg)#1, at step 0 - stopped cleanly",
        "  saved    checkpoint step 2 (sha256 ok), 1 step not saved",
        "  resume   braid run --resume auto -n 2 train.py",
        "  logs     ./runs/x/rank1.log   timeline: braid report ./runs/x",
    ]
    assert [picture.title for picture in story.pictures] == ["The end of the run"]
    victims_lane = story.pictures[0].lanes[1]
    assert [(box.label, box.open) for box in victims_lane.phases] == [
        ("forward", False),
        ("load <shard>", True),
    ]
    page = _page(path)
    assert "stopped 3.23 s" in page.text
    assert page.text.index("cause rank1.log") < page.text.index("rank0.log")


def test_the_report_shows_the_block_that_the_run_printed(tmp_path):
    error = ParsedError(
        type="MismatchError",
        message="found",
        where="train.py:2 in step",
        details=("  rank 0  all_reduce(float32[3], sum)", "  rank 1  barrier()"),
    )
    kill = MemoryKill(64_000_000, 63_000_000)
    ends = [RankEnd(rank=rank, ended_ns=1, exit_code=1, error=error) for rank in (0, 1)]
    ends += [RankEnd(rank=2, ended_ns=2, signal=9, memory_kill=kill)]
    ends += [RankEnd(rank=3, ended_ns=2, signal=9, asked_to_stop=True, stopped_s=2.5)]
    printed = replace(failed_report(), verdict=judge(ends))
    story = build_story(read_run(write_run(tmp_path / "run", [], outcome=printed)))
    assert story.outcome == render_block(error_block(printed))
    assert "  rank 1  barrier()" in story.outcome


def test_a_run_without_events_and_metrics_says_what_would_be_there(tmp_path):
    page = _page(write_run(tmp_path / "run", []))
    assert "No events recorded." in page.text
    assert "the program has logged no numbers" in page.text
    assert "No logs." in page.text


def test_a_run_that_has_not_ended_is_reported_as_far_as_it_came(tmp_path):
    path = write_run(tmp_path / "run", [], metrics=METRICS, outcome=None)
    page = _page(path)
    assert "no end recorded 1 rank" in page.text
    assert "the run goes on, or its launcher was killed" in page.text


@pytest.mark.parametrize("num_ranks", [1, 8, 17])
def test_every_world_size_gives_a_page(tmp_path, num_ranks):
    ranks = [RecordedRank(rank) for rank in range(num_ranks)]
    for rank in ranks:
        train(rank, 2)
    page = _page(write_run(tmp_path / "run", [rank.ring for rank in ranks]))
    assert page.text.count("compute 88 %") == num_ranks
    assert ("16 of 17 ranks are shown" in page.text) == (num_ranks == 17)


def test_only_collectives_still_give_a_timeline(tmp_path):
    def bare(rank):
        rank.reduce(1, wait_ms=3, transfer_ms=1)

    story = build_story(read_run(write_run(tmp_path / "run", build(bare))))
    assert [picture.title for picture in story.pictures] == ["The whole recording"]
    assert [state.role for state in story.pictures[0].lanes[0].states] == [
        "compute", "transfer", "wait",
    ]  # fmt: skip


def test_overwritten_events_are_counted(tmp_path):
    rank = RecordedRank(0, capacity=32)
    train(rank, 10)
    story = build_story(read_run(write_run(tmp_path / "run", [rank.ring])))
    assert story.notices == (
        "rank 0: the 38 oldest events were overwritten; the figures show the last 32",
    )


def test_what_is_torn_is_named_and_the_rest_is_shown(tmp_path):
    path = write_run(tmp_path / "run", late_job(), metrics=METRICS)
    torn = path / "events" / "rank1.ring"
    torn.write_bytes(torn.read_bytes()[:5000])
    (path / "events" / "rank2.ring").write_bytes(b"BRAID")
    (path / "events" / "rank3.ring").write_bytes(bytes(9000))
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    run = read_run(path)
    assert run.notices == (
        "rank1.ring is left out: 4,096 records have 528,384 bytes, but the file only 5,000: the file is incomplete",
        "rank2.ring is left out: 5 bytes are less than the header of an event ring",
        "rank3.ring is left out: 9000 bytes of memory are not a braid event ring, its mark is missing: open a ring that a launcher or Recorder wrote",
    )
    assert [ring.rank for ring in run.rings] == [0]
    assert [row["step"] for row in run.metrics] == [0, 1, 2, 3, 4, 5]


def test_a_damaged_table_of_names_is_named(tmp_path):
    path = write_run(tmp_path / "run", late_job())
    ring = path / "events" / "rank0.ring"
    raw = bytearray(ring.read_bytes())
    names = 4096 + 4096 * 64
    raw[names:] = (1 << 40).to_bytes(8, "little") + bytes(len(raw) - names - 8)
    ring.write_bytes(raw)
    (notice,) = read_run(path).notices
    assert notice.startswith(
        "rank0.ring is left out: the table of names after the records is damaged"
    )


def _missing(path):
    return path / "nowhere"


def _empty(path):
    return path


def _not_a_run(path):
    (path / "notes.txt").write_text("x")
    return path


def _a_file(path):
    (path / "file").write_text("x")
    return path / "file"


def _empty_record(path):
    (path / "run.json").write_bytes(b"")
    return path


def _other_json(path):
    (path / "run.json").write_text('{"name": "npm"}')
    return path


def _newer(path):
    return write_run(path / "run", [], braid="99.1.0", ranks={"format": "new"})


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (_missing, "nowhere does not exist: give the directory of a run"),
        (_empty, "has no run.json: give the directory of a run"),
        (_not_a_run, "has no run.json: give the directory of a run"),
        (_a_file, "run.json: Not a directory"),
        (_empty_record, "run.json is empty"),
        (_other_json, "missing required field `braid`"),
        (_newer, "is a run of braid 99.1.0, but this is"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path, make, problem):
    with pytest.raises(ConfigError) as caught:
        read_run(make(tmp_path))
    assert problem in str(caught.value)


def test_publishing_writes_the_page_and_the_trace_beside_it(tmp_path):
    path = write_run(tmp_path / "run", late_job())
    found = publish(path, tmp_path / "monday.html")
    assert (found.report, found.trace) == (tmp_path / "monday.html", tmp_path / "trace.json")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["monday.html", "run", "trace.json"]
    assert publish(path).report == path / "report.html"


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    path = write_run(tmp_path / "run", late_job())
    with pytest.raises(ConfigError, match="choose another path with --out"):
        publish(path, tmp_path / "missing" / "page.html")


def test_the_terminal_gets_bars_facts_and_paths(tmp_path):
    found = publish(write_run(tmp_path / "run", late_job()))
    console = Console(width=200, no_color=True, record=True, quiet=False, file=_Nowhere())
    print_summary(found.story, console, report=found.report, trace=found.trace)
    text = console.export_text()
    assert "rank 0   #################=====..  compute 70 %  wait 20 %  transfer 10 %" in text
    assert "step 4 took longest" in text
    assert str(found.report) in text
    assert str(found.trace) in text


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass


def test_a_curve_breaks_where_values_are_missing():
    values = [1.0, 2.0, float("nan"), 4.0, float("inf"), 6.0, 7.0]
    rows = [{"step": float(i), "loss": value} for i, value in enumerate(values)]
    chart = line_chart(rows, {"loss": ("training", "compute")}, y_label="loss")
    (line,) = chart.lines
    assert [len(piece.split()) for piece in line.pieces] == [2, 2]
    assert line.dots == ((50.0, 50.0),)
    assert chart.note == "2 values are not finite and not drawn"


def test_a_long_curve_is_thinned_to_means():
    rows = [{"step": float(i), "loss": float(i % 2)} for i in range(4000)]
    chart = line_chart(rows, {"loss": ("training", "compute")}, y_label="loss")
    assert len(chart.lines[0].pieces[0].split()) == 400
    assert chart.note == "each point is the mean of 10 steps"


def test_there_is_no_chart_of_nothing():
    assert line_chart([{"step": 1.0}], {"loss": ("training", "compute")}, y_label="loss") is None
    assert (
        line_chart(
            [{"step": 1.0, "loss": float("nan")}], {"loss": ("a", "compute")}, y_label="loss"
        )
        is None
    )


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 10.0, [0, 2, 4, 6, 8, 10]),
        (2.3, 5.42, [2, 3, 4, 5, 6]),
        (3.0, 3.0, [0, 1, 2, 3]),
        (0.0, 0.0, None),
        (-2.0, -2.0, None),
        (1e-9, 3e9, None),
    ],
)
def test_ticks_are_round_and_enclose_the_values(low, high, expected):
    found = ticks(low, high)
    assert found[0] <= low
    assert found[-1] >= high
    assert len(found) >= 2
    if expected is not None:
        assert found == expected


def test_record_defaults_allow_what_older_runs_did_not_write(tmp_path):
    minimal = {key: record_of(1)[key] for key in ("braid", "command", "num_ranks")}
    (tmp_path / "run.json").write_text(json.dumps(minimal))
    assert "no end recorded" in _page(tmp_path).text
