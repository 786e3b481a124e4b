"""Programs of tests that run under the launcher."""

from __future__ import annotations

from pathlib import Path

from braid.launch import JobSpec, QuietConsole, Supervisor


def last_line(folder: Path, program: str, *arguments: str, ranks: int = 2) -> str:
    """Run a program on some ranks; return the last line of rank 0."""
    script = folder / "program.py"
    script.write_text(program)
    command, log_dir = (str(script), *arguments), folder / "run"
    outcome = Supervisor(QuietConsole()).run(
        JobSpec(command=command, num_ranks=ranks, log_dir=str(log_dir))
    )
    assert outcome.ok, outcome
    return (log_dir / "rank0.log").read_text().splitlines()[-1]
