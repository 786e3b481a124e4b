"""Claims of `braid schedule`: what it prints can be read back, and mistakes are named."""

from __future__ import annotations

import json
from xml.etree import ElementTree as ET

import pytest

from braid.cli import main

BROKEN = """\
program collective handmade broadcast units 1 indices 2 root 0
rank 0
  send0.0>1
rank 1
  recv0.0<0
rank 2
"""
CLUSTER = """\
[[level]]
name = "host"
size = 4
latency_s = 1e-6
bytes_per_s = 100e9
[[level]]
name = "spine"
size = 16
latency_s = 1e-5
bytes_per_s = 10e9
"""


def ends(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["schedule", *arguments])
    found = capsys.readouterr()
    return code, found.out + found.err


@pytest.mark.parametrize("name", ["ring", "bruck", "hierarchical", "tree", "1f1b", "gpipe"])
def test_what_show_prints_is_valid(name, tmp_path, capsys):
    code, text = ends(capsys, "show", name, "--ranks", "6", "--row", "3")
    (tmp_path / "program").write_text(text)
    checked = ends(capsys, "check", str(tmp_path / "program"))
    assert (code, checked[0], checked[1].startswith("valid: ")) == (0, 0, True)


def test_csv_of_torch_is_shown_checked_and_simulated(tmp_path, capsys):
    file = tmp_path / "plan.csv"
    code, text = ends(capsys, "show", "v_half", "--ranks", "2", "--microbatches", "4", "--csv")
    file.write_text(text)
    assert (code, text.split("\n")[0][:23]) == (0, "0F0,0F1,0F2,3F0,3I0,3W0")
    assert ends(capsys, "show", str(file), "--csv") == (0, text)
    assert ends(capsys, "check", str(file))[1].startswith("valid: csv train on 2 ranks")
    code, drawn = ends(capsys, "simulate", str(file))
    assert (code, drawn.startswith("csv train on 2 ranks")) == (0, True)
    file.write_text("0F0\n1F0,1B0")
    code, text = ends(capsys, "check", str(file))
    assert (code, "plan.csv, not a valid schedule: row 1: ends without B0.0" in text) == (2, True)


def test_a_program_that_does_not_keep_its_promise_fails_the_check(tmp_path, capsys):
    (tmp_path / "program").write_text(BROKEN)
    assert ends(capsys, "check", str(tmp_path / "program")) == (
        1,
        "contributions: rank 2, at the end: block 0 ends without block 0 of rank 0\n",
    )


def test_a_typing_error_is_found_with_its_place(tmp_path, capsys):
    (tmp_path / "program").write_text(BROKEN.replace("recv0.0", "reecv0.0"))
    code, text = ends(capsys, "check", str(tmp_path / "program"))
    where = "line 5, column 3: expected a kind out of send, recv, reduce, copy, got 'reecv0.0<0'"
    assert (code, where in text) == (2, True)


def test_a_simulation_is_drawn_three_times(tmp_path, capsys):
    svg, trace = tmp_path / "a.svg", tmp_path / "a.json"
    files = ("--svg", str(svg), "--trace", str(trace))
    code, text = ends(capsys, "simulate", "1f1b", "--ranks", "2", "--microbatches", "3", *files)
    rows = [line for line in text.split("\n") if line.startswith("rank ")]
    assert (code, [f"B{i}" in rows[1] for i in range(3)]) == (0, [True] * 3)
    assert ET.parse(svg).getroot().tag.endswith("svg")
    known = "peak activations 2, 1 micro-batches on ranks 0 to 1"
    texts = [node.text for node in ET.parse(svg).getroot().iter() if node.tag.endswith("text")]
    assert (texts[-3:-1], texts[-1] in text, known in texts[-1]) == (
        ["peak 2", "peak 1"],
        True,
        True,
    )
    assert {event["pid"] for event in json.loads(trace.read_text())["traceEvents"]} == {0, 1}


def test_a_program_of_ones_own_can_be_simulated(tmp_path, capsys):
    code, text = ends(capsys, "show", "ring", "--ranks", "2")
    (tmp_path / "mine").write_text(text)
    code, text = ends(capsys, "simulate", str(tmp_path / "mine"), "--nbytes", "1G")
    assert (code, text.split("\n")[0]) == (0, "ring all_reduce on 2 ranks, 4 sends: 100 ms")


def test_a_program_whose_message_nobody_receives_is_not_simulated(tmp_path, capsys):
    (tmp_path / "mine").write_text(BROKEN.replace("recv0.0<0", ""))
    code, text = ends(capsys, "simulate", str(tmp_path / "mine"))
    words = "rank 0, action 0: send of block 0 in round 0 to rank 1 has no receive there"
    assert (code, words in " ".join(text.split())) == (2, True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("send0.0>1 recv0.0<1", "rank 1, action 0: the peer must be another rank from 0 to 1"),
        ("recv0.0<0", "contributions: rank 0, at the end"),
    ],
)
def test_a_program_that_is_not_valid_is_not_simulated(text, words, tmp_path, capsys):
    head = "program collective x all_reduce units 1 indices 1\nrank 0\n send0.0>1\nrank 1\n"
    (tmp_path / "mine").write_text(head + text)
    code, said = ends(capsys, "simulate", str(tmp_path / "mine"))
    assert (code, words in " ".join(said.split())) == (2, True)


def test_options_that_a_file_answers_itself_are_refused(tmp_path, capsys):
    (tmp_path / "mine").write_text(ends(capsys, "show", "ring")[1])
    code, text = ends(capsys, "simulate", str(tmp_path / "mine"), "--operation", "reduce")
    assert (code, "which defines the operation" in " ".join(text.split())) == (2, True)


def test_a_file_with_the_name_of_an_algorithm_is_in_nobodys_way(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ring").write_text("nothing of the kind")
    assert ends(capsys, "simulate", "ring", "--ranks", "2")[0] == 0


def test_nothing_is_computed_for_a_picture_that_cannot_be_written(capsys):
    code, text = ends(capsys, "simulate", "ring", "--svg", "/nowhere/a.svg")
    assert (code, "ring all_reduce" in text) == (2, False)


def test_what_is_refused_leaves_no_file_behind(capsys, tmp_path):
    picture = tmp_path / "a.svg"
    code, _ = ends(capsys, "simulate", "ring", "--ranks", "300", "--svg", str(picture))
    assert (code, picture.exists()) == (2, False)
    assert ends(capsys, "simulate", "ring", "--svg", str(tmp_path))[0] == 2


def test_a_host_that_holds_all_ranks_makes_no_hierarchy(capsys):
    code, text = ends(capsys, "compare", "all_reduce", "--ranks", "8", "--sizes", "1Ti")
    left_out = "left out: hierarchical, is a ring where one switch holds all ranks"
    assert (code, left_out in text) == (0, True)


def test_the_fastest_algorithm_is_marked_for_each_size(tmp_path, capsys):
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    given = ("--ranks", "64", "--cluster", str(tmp_path / "cluster.toml"), "--sizes", "1Ki", "16Mi")
    code, text = ends(capsys, "compare", "all_reduce", *given)
    marked = {line.split()[0] for line in text.split("\n") if "* " in line}
    assert (code, marked) == (0, {"doubling", "hierarchical"})
    assert "links to the spine are oversubscribed 40 : 1" in text


def test_many_ranks_are_computed_without_writing_them_out(capsys):
    code, text = ends(capsys, "simulate", "tree", "--ranks", "100000", "--nbytes", "0")
    assert (code, text.split("\n")[0]) == (
        0,
        "tree all_reduce on 100000 ranks, 34 rounds: 170 us",
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("show", "rong"), "rong is not an algorithm or a file"),
        (("show", "1f1b", "--csv", "--table"), "--table, --csv and --svg are forms"),
        (("show", "ring", "--csv"), "only training pipelines can be written as torch's CSV"),
        (("show", "none.csv"), "none.csv cannot be read"),
        (("show", "ring", "--operation", "scatter"), "choose one of naive, tree"),
        (("show", "ring", "--ranks", "0"), "at least 1 rank is needed, got 0"),
        (("show", "hierarchical", "--ranks", "6", "--row", "4"), "rows of 4"),
        (("show", "tree", "--operation", "reduce", "--root", "9"), "root must be 0 to 3"),
        (("show", "1f1b", "--microbatches", "0"), "at least 1 stage and 1 micro-batch"),
        (("show", "ring", "--ranks", "1000"), "at most 512 ranks"),
        (("check", "/nowhere/at/all"), "No such file"),
        (
            ("simulate", "ring", "--nbytes", "5Q"),
            "a number of bytes must be written like 1000, 64Ki or 1.5G, got",
        ),
        (("simulate", "ring", "--svg", "/nowhere/a.svg"), "/nowhere/a.svg cannot be written"),
        (("simulate", "ring", "--ranks", "300", "--svg", "a.svg"), "at most 256 ranks"),
        (("simulate", "ring", "--gbytes-per-s", "0"), "bytes_per_s must be above 0, got 0.0"),
        (("compare", "all_redooce"), "unknown operation 'all_redooce'"),
        (("compare", "all_reduce", "--sizes"), "--sizes lists no size"),
        (
            ("simulate", "1f1b", "--forward-ms", "nan"),
            "--forward-ms must be a number of milliseconds of at least 0, got nan",
        ),
        (
            ("simulate", "1f1b", "--backward-ms", "-5"),
            "--backward-ms must be a number of milliseconds of at least 0, got -5",
        ),
        (
            ("simulate", "1f1b", "--root", "7"),
            "--operation and --root do not apply to the pipeline 1f1b",
        ),
        (("simulate", "ring", "--root", "1"), "all_reduce has no root, got root 1"),
        (("simulate", "ring", "--ranks", "1000000000"), "may have at most 1,000,000 ranks"),
        (("simulate", "x" * 3000), "is not an algorithm or a file"),
    ],
)
def test_mistakes_are_named(arguments, words, capsys):
    code, text = ends(capsys, *arguments)
    assert (code, words in " ".join(text.split())) == (2, True)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("[[level]", "not the levels of a cluster as TOML"),
        (CLUSTER.replace("size = 16", "size = 'x'"), "level"),
        (CLUSTER.replace("size = 16", "sizes = 16"), "sizes"),
        (CLUSTER.replace("spine", "host"), "each with a different name, got host, host"),
        (CLUSTER.replace("size = 16", "size = 1"), "the cluster has 4 ranks"),
    ],
)
def test_mistakes_in_a_cluster_are_named(file, words, tmp_path, capsys):
    path = tmp_path / "cluster.toml"
    path.write_text(file)
    code, text = ends(capsys, "compare", "all_reduce", "--ranks", "8", "--cluster", str(path))
    assert (code, words in " ".join(text.split())) == (2, True)
