"""Two runs side by side: their numbers, what was different about their starts, and their curves."""

from __future__ import annotations

import pytest
from observe_job import late_job, write_run
from rich.console import Console

from braid import cli
from braid.errors import ConfigError
from braid.launch.observe import compare_runs, publish_comparison, read_run
from braid.launch.observe.compare import print_comparison


def _metrics(scale: float) -> list[dict[str, float]]:
    return [{"step": step, "loss": scale * (5 - step), "acc": scale} for step in range(5)]


@pytest.fixture
def runs(tmp_path):
    one = write_run(tmp_path / "one", late_job(), metrics=_metrics(1.0), git="a" * 40)
    two = write_run(
        tmp_path / "two", late_job(by_ms=4.0), metrics=_metrics(2.0), command=["train.py"]
    )
    return one, two


def test_numbers_differences_and_curves_of_two_runs(runs):
    comparison = compare_runs([read_run(run) for run in runs])
    rows = {row.name: (row.texts, row.changes, row.verdicts) for row in comparison.figures}
    assert rows["loss, last"] == (("1", "2"), ("", "+100%"), ("", "bad"))
    assert rows["slowest later step"] == (("20 ms", "12 ms"), ("", "-40%"), ("", "good"))
    assert rows["steps"] == (("6", "6"), ("", "="), ("", ""))
    assert comparison.differences == (
        ("command", ("braid run -n 2 train.py --lr 0.1", "braid run -n 2 train.py")),
        ("commit", ("a" * 40, "unknown")),
    )
    assert [title for title, _ in comparison.charts] == ["loss", "step time", "acc"]
    assert [line.name for line in comparison.charts[0][1].lines] == ["one", "two"]


def test_the_page_and_the_terminal_show_the_same(runs):
    comparison, page = publish_comparison(runs)
    assert page == runs[1] / "compare.html"
    assert "one and two" in page.read_text()
    console = Console(record=True, width=100)
    print_comparison(comparison, console, page=page)
    printed = " ".join(console.export_text().split())
    assert "loss, last 1 2 +100%" in printed
    assert "commit one: aaaa" in printed


def test_the_command_compares_several_runs(runs, capsys, tmp_path):
    out = tmp_path / "page.html"
    assert cli.main(["report", *map(str, runs), str(runs[0]), "--out", str(out)]) == 0
    assert f"report {out}" in " ".join(capsys.readouterr().out.split())
    assert (
        str(runs[0]) in out.read_text()
    )  # two runs of the same name are told apart by their paths


def test_one_run_and_five_are_refused(runs):
    with pytest.raises(ConfigError, match="a comparison takes 2 to 4 runs, got 5"):
        compare_runs([read_run(runs[0])] * 5)
    with pytest.raises(ConfigError, match="got 1"):
        compare_runs([read_run(runs[0])])
