"""Runs examples under `braid run`, as users do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def run_example(
    example: str,
    log_dir: Path,
    *options: str,
    script: Sequence[str] = (),
    timeout_s: float = 120.0,
) -> str:
    """Return what an example prints with options of `braid run` and its own; it must end well."""
    command = [sys.executable, "-m", "braid", "run", *options, "--log-dir", str(log_dir)]
    done = subprocess.run(
        [*command, str(EXAMPLES / example), *script],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
