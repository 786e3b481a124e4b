"""`python -m benchmarks tp` measures all engines and judges the figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.tp import BENCH, CASES, TpBench, tp_verdicts
from benchmarks.workers.tp import VARIANTS, Case
from braid.cli.bench.harness.options import read_fields
from braid.errors import ConfigError

pytestmark = [pytest.mark.frameworks, pytest.mark.proof]
pytest.importorskip("transformers")


def test_all_engines_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = Case("llama", 32, 1, 1, 8)
    report = BENCH.measure(TpBench(cases=(case,), rounds=2, budget_s=1.0, out=tmp_path))
    (row,) = report.rows
    assert set(row.step_s) == set(row.speedup) == set(VARIANTS)
    assert row.collectives == row.sent > 0
    assert row.largest_gap < 1e-5
    assert len(tp_verdicts(report)) == 6
    BENCH.show(report, tmp_path)
    assert "parallelize_module" in capsys.readouterr().out
    assert (tmp_path / "tp.json").exists()


def test_wrong_options_are_all_named() -> None:
    assert read_fields(Case, "llama:128:4:2:64") == CASES[0]
    with pytest.raises(ConfigError, match="expected model:width:layers:batch:length, got"):
        read_fields(Case, "llama:128")
    with pytest.raises(ConfigError) as raised:
        TpBench(ranks=3, cases=(Case("gpt", 12, 0, 1, 1),), rounds=0)
    text = str(raised.value)
    for part in ("no model gpt", "3 ranks", "no multiple of 8 heads", "rounds", "layers of gpt"):
        assert part in text
