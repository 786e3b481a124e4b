"""All environment variables of braid are in one table, and in its page."""

from __future__ import annotations

import re
from pathlib import Path

import braid
from braid.runtime.variables import VARIABLES

SOURCE = Path(braid.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "environment.md"


def test_all_variables_are_in_the_table():
    texts = (path.read_text() for path in SOURCE.rglob("*.py") if path.name != "variables.py")
    named = {name for text in texts for name in re.findall(r'"(BRAID_[A-Z_]*[A-Z])"', text)}
    rows = set(re.findall(r"\bBRAID_NODE\b", (SOURCE / "launch/engines/kubernetes.py").read_text()))
    shared = set(re.findall(r'= "(BRAID_\w+)"', (SOURCE / "runtime/variables.py").read_text()))
    assert named | rows | shared == VARIABLES.keys()


def test_the_page_has_the_table():
    rows = [f"| `{name}` | {meaning} |" for name, meaning in VARIABLES.items()]
    assert "\n".join(rows) in PAGE.read_text()
