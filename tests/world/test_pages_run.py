"""Pages of docs: what they show runs, and the commands that they name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from program_jobs import run_program

from braid.cli import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
SNIPPET = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
CONSOLE = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)
SKIPPED = "# skip: "  # first line of a snippet that needs what a test has not, with the reason
ROLES = re.compile(
    r"# braid run --servers (\d+) --workers (\d+)\n"
)  # first line, for ranks with roles
# pages whose snippets run as they stand; those of older pages are parts of programs
WHOLE = {
    "reports",
    "checkpoints",
    "from-megatron",
    "from-fsdp2-and-deepspeed",
    "from-torchgpipe",
    "from-torch-pipelining",
    "from-pygloo",
}
RUNNABLE = [p for p in PAGES if p.parent.name == "handbook" or p.stem in WHOLE]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.procs
@pytest.mark.parametrize("page", [p for p in RUNNABLE if SNIPPET.search(p.read_text())], ids=_name)
def test_the_snippets_of_a_page_run_on_two_ranks(procs, page, tmp_path):
    for number, snippet in enumerate(SNIPPET.findall(page.read_text())):
        if snippet.startswith(SKIPPED):
            continue
        script = tmp_path / f"snippet{number}.py"
        script.write_text(snippet)
        ranks, environ = 2, {}
        if roles := ROLES.match(snippet):
            ranks, environ = 1 + int(roles[1]) + int(roles[2]), {"BRAID_SERVERS": roles[1]}
        run_program(procs, ranks, script, directory=tmp_path, **environ)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_command_of_a_page_exists(page):
    lines = [line for block in CONSOLE.findall(page.read_text()) for line in block.splitlines()]
    commands = [line for line in lines if line.startswith("$ braid ")]
    known = [c for c in commands if any(c.startswith(f"$ braid {name}") for name in COMMANDS)]
    assert commands == known
