"""`braid plan` on described clusters: tables, files, and mistakes that are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from braid.cli import main

CLUSTER = """\
[[level]]
name = "host"
size = 4
latency_s = 3e-6
bytes_per_s = 300e9
[[level]]
name = "rack"
size = 2
latency_s = 1e-5
bytes_per_s = 1e9
"""
DEVICE = '\n[device]\nname = "a100-40gb"\n'
MODEL = ("--model", "mini", "--context", "32")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.toml").write_text(CLUSTER + DEVICE)
    (tmp_path / "bare.toml").write_text(CLUSTER)
    return "cluster.toml"


def test_the_fastest_split_is_shown_explained_and_written(
    cluster: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ("--plan", "plan.json", "--picture", "c.svg", "--timeline", "t.svg", "--export", "out")
    failing = ("--steps", "1000", "--rank-mean-hours", "1000")
    assert main(["plan", *MODEL, "--cluster", cluster, "--batch", "16", *files, *failing]) == 0
    shown = capsys.readouterr().out
    assert "mini, batch 16 in fp32, 8 ranks: layers estimated, machines estimated" in shown
    assert shown.count("why         ") >= 2
    assert "would flip  with " in shown
    assert "splits were considered" in shown
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert (plan["kind"], plan["ranks"], plan["context"]) == ("split", 8, 32)
    assert plan["predicted"]["machines"] == "estimated"
    assert "braid train -n 8 --model mini --plan plan.json" in shown
    for name in ("c.svg", "t.svg"):
        assert (tmp_path / name).read_text().startswith("<svg")
    assert (tmp_path / "out" / "megatron.txt").is_file()
    assert main(["train", "--plan", "plan.json", "--model", "mini", "-n", "2"]) == 2
    assert "is for 8 ranks, got -n 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([*MODEL], "give --cluster FILE, or --profile FILE"),
        (["--cluster", "cluster.toml"], "no model is named"),
        (["--model", "gpt9", "--cluster", "cluster.toml"], "must be one of gpt2-tiny"),
        ([*MODEL, "--cluster", "missing.toml"], "cannot be read"),
        ([*MODEL, "--cluster", "bare.toml"], "does not name a device"),
        ([*MODEL, "--cluster", "bare.toml", "--device", "abacus"], "--device must be one of"),
        ([*MODEL, "--cluster", "cluster.toml", "-n", "9"], "the cluster has 8 ranks"),
        ([*MODEL, "--cluster", "cluster.toml", "-n", "0"], "-n must be at least 1"),
        ([*MODEL, "--cluster", "cluster.toml", "--batch", "0"], "must be at least 1"),
        ([*MODEL, "--cluster", "cluster.toml", "--memory", "1M"], "does not fit on 8 ranks"),
        ([*MODEL, "--cluster", "cluster.toml", "--plan", "/nowhere/p"], "cannot be written"),
        (["--profile", "cluster.toml"], "is not a profile"),
    ],
)
def test_mistakes_are_named(
    cluster: str, arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cluster
    assert main(["plan", *arguments]) == 2
    assert problem in " ".join(capsys.readouterr().err.split())


def test_a_device_may_be_given_beside_the_cluster(
    cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cluster
    options = ["--cluster", "bare.toml", "--device", "t4", "--batch", "8", "-n", "2"]
    assert main(["plan", *MODEL, *options, "--dtype", "fp16", "--top", "3"]) == 0
    assert "2 ranks" in capsys.readouterr().out


def test_a_profile_of_one_process_does_not_say_what_ranks_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = [
        "profile",
        "--model",
        "tiny",
        "--context",
        "8",
        "--seconds",
        "0.02",
        "--out",
        "p.json",
    ]
    assert main(command) == 0
    assert main(["plan", "--profile", "p.json", "-n", "2"]) == 2
    assert "make it with braid profile -n 2" in " ".join(capsys.readouterr().err.split())
