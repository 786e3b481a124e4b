"""What the README and the examples show runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from program_jobs import run_program

from braid.launch import JobSpec, QuietConsole, Supervisor
from example_runs import run_example

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()

pytestmark = pytest.mark.procs


def _run(script: Path, ranks: int, log_dir: Path) -> str:
    job = JobSpec(command=(str(script),), num_ranks=ranks, log_dir=str(log_dir))
    outcome = Supervisor(QuietConsole()).run(job)
    assert outcome.ok, outcome
    return (log_dir / "rank0.log").read_text()


# their ranks die, so the processes of the pool cannot be their ranks
LAUNCHED = {"57_elastic", "58_elastic_mesh"}
EXAMPLES = [
    path for path in sorted((ROOT / "examples").glob("[0-9]*.py")) if path.stem not in LAUNCHED
]


def _command(example: Path) -> tuple[int, dict[str, str]]:
    """Number of ranks in the command of its docstring, and the environment that it gives them."""
    plain = re.search(r"braid run -n (\d+) (examples/\S+)", example.read_text())
    roles = re.search(
        r"braid run --servers (\d+) --workers (\d+) (examples/\S+)", example.read_text()
    )
    named = re.findall(r"--role (\w+):(\d+)", example.read_text())
    if named:
        total = sum(int(count) for _, count in named)
        return total, {"BRAID_ROLES": ",".join(map(":".join, named))}
    found = roles or plain
    assert found is not None
    assert ROOT / found[found.lastindex] == example
    if roles is None:
        return int(found[1]), {}
    return 1 + int(roles[1]) + int(roles[2]), {"BRAID_SERVERS": roles[1]}


@pytest.mark.launcher
def test_the_first_example_runs_with_the_command_in_its_docstring(tmp_path):
    assert "bit by bit" in _run(EXAMPLES[0], _command(EXAMPLES[0])[0], tmp_path / "run")


@pytest.mark.parametrize("example", EXAMPLES[1:], ids=lambda p: p.stem)
def test_an_example_runs_on_as_many_ranks_as_its_docstring_says(procs, example):
    ranks, environ = _command(example)
    texts = run_program(procs, ranks, example, **environ)
    assert "bit by bit" in texts[0] + texts[-1]  # of the first rank, or of a worker


@pytest.mark.launcher
@pytest.mark.parametrize(
    ("deaths", "rank"), [((), 0), (("1:5", "0:20"), 2)], ids=["one death", "two deaths"]
)
def test_the_example_that_kills_its_ranks_has_the_bits_of_one_process(tmp_path, deaths, rank):
    options = ("-n", "3", "--min-ranks", "2")
    text = run_example("57_elastic.py", tmp_path / "run", *options, script=deaths)
    assert f"[rank {rank}] parameters equal one process bit by bit" in text


@pytest.mark.launcher
def test_the_example_whose_mesh_loses_a_rank_has_the_bits_of_one_process(tmp_path):
    options = ("-n", "4", "--min-ranks", "3", "--restarts", "0")
    text = run_example("58_elastic_mesh.py", tmp_path / "run", *options)
    assert "the last mesh is dp=3" in text
    assert "[rank 0] parameters equal one process bit by bit" in text


def test_the_diff_of_the_readme_makes_a_loop_that_trains(procs, tmp_path):
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
    assert run_program(procs, 2, script)[0].startswith("loss ")
