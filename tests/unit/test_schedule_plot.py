"""Pictures of programs and timelines, compared with files that people have looked at; BRAID_RECORD=1 writes them anew."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.errors import ConfigError
from braid.programs.schedule import (
    Action,
    Costs,
    Header,
    Interval,
    Program,
    Timeline,
    simulate,
    to_text,
)
from braid.programs.schedule.bars import draw
from braid.programs.schedule.blocks import blocks_svg
from braid.programs.schedule.collective import COLLECTIVE, algorithm, program
from braid.programs.schedule.collective.contributions import held_by_round
from braid.programs.schedule.collective.vocabulary import held_at_end
from braid.programs.schedule.pipeline import gpipe, one_f_one_b
from braid.programs.schedule.plot import lanes, table, to_svg, to_trace
from braid.programs.topology import flat
from braid.runtime.text import seconds_text

GOLDEN = Path(__file__).parent.parent / "golden"
SVG = "{http://www.w3.org/2000/svg}"


def same_as_golden(name: str, text: str) -> None:
    path = GOLDEN / f"schedule_{name}.txt"
    if os.environ.get("BRAID_RECORD") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def drawn(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines) + "\n"


def pipelined(written: Program, nbytes: float = 0.0) -> Timeline:
    seconds = {"F": 1.0, "B": 2.0}
    work = Costs(lambda _, __: nbytes, lambda _, action: seconds.get(action.kind, 0.0))
    return simulate(written, work, flat(written.num_ranks, 0.0, 1.0))


def ring() -> Timeline:
    work = Costs(lambda _, __: 10.0, lambda _, a: 2.0 if a.kind == "reduce" else 0.0)
    return simulate(program(algorithm("ring", "all_reduce", 4)), work, flat(4, 1.0, 2.0))


# Text.


PIPELINES = pytest.mark.parametrize("make", [one_f_one_b, gpipe])


@PIPELINES
def test_lanes_of_pipelines_show_warm_up_turns_and_bubble(
    make: Callable[[int, int], Program],
) -> None:
    done = pipelined(make(4, 8))
    work = done._replace(intervals=[i for i in done.intervals if not i.is_message])
    rows = lanes(work, 4, 66)
    assert {len(row) for row in rows} == {len("rank 0    ") + 66}
    same_as_golden(f"{make.__name__}_lanes", "".join(f"{row.rstrip()}\n" for row in rows))


@PIPELINES
def test_messages_that_take_no_time_take_no_room(make: Callable[[int, int], Program]) -> None:
    done = pipelined(make(4, 8))
    work = done._replace(intervals=[i for i in done.intervals if not i.is_message])
    assert lanes(done, 4, 66) == lanes(work, 4, 66)


def test_lanes_of_a_ring_show_messages_and_sums() -> None:
    rows = lanes(ring(), 4, 60)
    same_as_golden("ring_lanes", "".join(f"{row.rstrip()}\n" for row in rows))


def test_lanes_of_nothing_are_empty() -> None:
    assert lanes(Timeline([], [0.0, 0.0], {}), 2, 5) == ["rank 0         ", "rank 1         "]


@pytest.mark.parametrize(
    ("name", "operation", "num_ranks"),
    [
        ("ring", "all_reduce", 4),
        ("tree", "scatter", 5),
        ("halving_doubling", "all_reduce", 4),
        ("bruck", "all_to_all", 4),
    ],
)
def test_tables_and_texts_of_collectives(name: str, operation: str, num_ranks: int) -> None:
    written = program(algorithm(name, operation, num_ranks))
    same_as_golden(f"{name}_{operation}_table", drawn(table(written)))
    same_as_golden(f"{name}_{operation}_text", to_text(written))


def test_table_and_text_of_a_pipeline() -> None:
    same_as_golden("one_f_one_b_table", drawn(table(one_f_one_b(2, 4))))
    same_as_golden("one_f_one_b_text", to_text(one_f_one_b(3, 4)))


def test_all_that_a_middle_stage_does_is_named() -> None:
    rows = table(one_f_one_b(3, 1))
    assert rows[2] == ["rank 1", "1<0 F 1>2 1<2 B 1>0"]


def test_from_five_blocks_on_they_are_counted_instead_of_named() -> None:
    sends = tuple(Action("send", block, 0, 1) for block in range(5))
    adds = tuple(Action("reduce", block, 0, 0) for block in range(5))
    copies = tuple(Action("copy", block, 0, edge=0) for block in range(5))
    written = Program(COLLECTIVE, Header("some", "all_reduce", 5, 1), (sends, adds, copies))
    assert [row[1] for row in table(written)] == ["0", "5x>1", "+5x<0", "5 copies"]


def test_a_table_is_cut_where_nobody_reads_on() -> None:
    rows = table(program(algorithm("ring", "all_gather", 80)))
    assert [(len(row), row[-1]) for row in rows] == [(66, "...")] * 81


def test_a_table_of_a_program_of_nothing_has_its_ranks() -> None:
    rows = table(program(algorithm("ring", "all_reduce", 1)))
    assert rows == [["round"], ["rank 0"]]


# SVG.


def test_an_svg_has_a_bar_for_everything_with_words_under_the_pointer() -> None:
    done = ring()
    root = ET.fromstring(to_svg(done, 4))
    titles = [title.text for title in root.iter(f"{SVG}title")]
    assert len(titles) == len(done.intervals)
    assert titles[0] == "send 0, 0, rank 1: 0 ns to 6 s"
    assert [text.text for text in root.iter(f"{SVG}text")] == [
        *("recv", "reduce", "send"),
        *("0", "10 s", "20 s", "30 s", "40 s"),
        *(f"rank {rank}" for rank in range(4)),
    ]


@pytest.mark.parametrize(
    "done", [ring(), pipelined(one_f_one_b(3, 4), 0.5), Timeline([], [0.0] * 3, {})]
)
def test_all_bars_of_an_svg_are_inside_the_picture(done: Timeline) -> None:
    root = ET.fromstring(to_svg(done, len(done.end_s)))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for bar in root.iter(f"{SVG}rect"):
        x, y, wide, high = (float(bar.attrib[key]) for key in ("x", "y", "width", "height"))
        assert 0 <= x <= x + wide <= width
        assert 0 <= y <= y + high <= height


@given(st.floats(1e-9, 1e6))
def test_a_time_axis_has_a_few_round_times_in_one_unit(seconds: float) -> None:
    root = ET.fromstring(draw([], [], seconds))
    zero, *times = [text.text for text in root.iter(f"{SVG}text")]
    numbers, units = zip(*(time.split() for time in times), strict=True)
    step = float(numbers[0])
    assert zero == "0"
    assert 2 <= len(times) <= 6
    assert len(set(units)) == 1
    assert f"{step:e}"[:8] in {"1.000000", "2.000000", "5.000000"}
    assert [float(number) for number in numbers] == pytest.approx(
        [step * (place + 1) for place in range(len(times))]
    )


def test_a_legend_continues_on_the_next_line_and_nothing_is_wider_than_the_picture() -> None:
    legend = {f"a kind of work {number}": "red" for number in range(9)}
    root = ET.fromstring(draw(["rank 0"], [], 1.0, legend=legend))
    places = [(float(t.attrib["x"]), float(t.attrib["y"])) for t in root.iter(f"{SVG}text")][:9]
    assert len({y for _, y in places}) > 1
    assert max(x for x, _ in places) + 7 * len("a kind of work 8") <= float(root.attrib["width"])


@pytest.mark.parametrize(
    ("name", "operation", "ranks"),
    [("ring", "all_reduce", 4), ("tree", "reduce", 5), ("bruck", "all_to_all", 3)],
)
def test_a_picture_of_blocks_has_the_messages_and_ends_with_the_result(
    name: str, operation: str, ranks: int
) -> None:
    made = program(algorithm(name, operation, ranks, root=0 if operation == "reduce" else None))
    root = ET.fromstring(blocks_svg(made))
    sends = sum(action.kind == "send" for actions in made.ranks for action in actions)
    assert sum("marker-end" in path.attrib for path in root.iter(f"{SVG}path")) == sends
    header = made.header
    result = held_by_round(made)[-1]
    required = held_at_end(operation, ranks, header.num_units, header.root)
    assert all(
        result[rank][block] == held
        for rank, blocks in enumerate(required)
        for block, held in blocks.items()
    )
    titles = [text.text for text in root.iter(f"{SVG}text") if "round" in (text.text or "")]
    assert titles == [f"round {number}" for number in range(header.num_indices)]


def test_a_picture_with_too_many_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most 28 blocks per rank, got 32"):
        blocks_svg(program(algorithm("ring", "all_reduce", 32)))


def test_names_with_signs_of_markup_are_escaped() -> None:
    odd = Timeline([Interval(0, 0.0, 1.0, Action("<F&>", 0, 0))], [1.0], {})
    root = ET.fromstring(to_svg(odd, 1))
    assert [title.text for title in root.iter(f"{SVG}title")] == ["<F&> 0, 0: 0 ns to 1 s"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ns"),
        (1.5e-8, "15 ns"),
        (15.12e-6, "15.1 us"),
        (2.3e-3, "2.3 ms"),
        (1.0, "1 s"),
        (41.96, "42 s"),
        (12345.0, "3 h 26 min"),
        (0.9996e-3, "1 ms"),
        (0.9996, "1 s"),
        (999.6, "16 min 40 s"),
    ],
)
def test_times_are_written_with_three_digits_and_a_unit(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


# Trace events.


def test_trace_events_are_json_and_cover_the_whole_time() -> None:
    done = ring()
    events = to_trace(done)
    assert json.loads(json.dumps(events)) == events
    assert len(events) == len(done.intervals)
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in events]
    first, last = min(start for start, _ in spans), max(end for _, end in spans)
    assert (first, last) == (0.0, pytest.approx(done.seconds * 1e6))
    assert {event["pid"] for event in events} == {0, 1, 2, 3}


def test_a_trace_event_says_what_it_was() -> None:
    done = Timeline([Interval(2, 0.5, 2.0, Action("F", 2, 7))], [2.0], {})
    assert to_trace(done) == [
        {
            "name": "F 2.7",
            "cat": "simulated",
            "ph": "X",
            "pid": 2,
            "tid": "F",
            "ts": 0.5e6,
            "dur": 1.5e6,
        }
    ]
