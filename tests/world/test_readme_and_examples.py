"""What the README and the examples show runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from braid.launch import JobSpec, QuietConsole, Supervisor

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()

pytestmark = [pytest.mark.procs, pytest.mark.launcher]


def _run(script: Path, ranks: int, log_dir: Path) -> str:
    job = JobSpec(command=(str(script),), num_ranks=ranks, log_dir=str(log_dir))
    outcome = Supervisor(QuietConsole()).run(job)
    assert outcome.ok, outcome
    return (log_dir / "rank0.log").read_text()


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_an_example_runs_with_the_command_in_its_docstring(example, tmp_path):
    ranks = re.search(r"braid run -n (\d+) (examples/\S+)", example.read_text())
    assert ranks is not None
    assert ROOT / ranks[2] == example
    assert "bit by bit" in _run(example, int(ranks[1]), tmp_path / "run")


@pytest.mark.parametrize("snippet", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_a_snippet_of_the_readme_runs(snippet, tmp_path):
    script = tmp_path / "snippet.py"
    script.write_text(snippet)
    _run(script, 2, tmp_path / "run")


def test_the_diff_of_the_readme_makes_a_loop_that_trains(tmp_path):
    (diff,) = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
    loop = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "class Model(torch.nn.Linear):\n"
        "    def __init__(self): super().__init__(3, 1)\n"
        "    def forward(self, x): return super().forward(x).square().mean()\n"
        "torch.manual_seed(0)\n"
        "batches = torch.randn(3, 4, 3)\n"
        f"{loop}\n"
        "print('loss', loss.item())\n"
    )
    assert _run(script, 2, tmp_path / "run").startswith("loss ")
