"""Public names use the words of docs/glossary.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
RETIRED = re.compile(
    r"(^|_)(settle|attend|hear|obey|told|spoiled|spoil|weigh|weighed|bequeath|heir|owe|muster|lobby|"
    r"warden|knock|guilty|testimony|abroad|twins|mates|found)(_|$)|"
    r"^(Standing|Crew|Muster\w*|Lobby|Volunteer|Switchboard|Beacons|Attendant|Remarks|Surroundings)$"
)


@pytest.mark.parametrize(
    "path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE))
)
def test_no_name_has_a_retired_word(path):
    tree = ast.parse(path.read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    names = [path.stem, *(node.name for node in ast.walk(tree) if isinstance(node, kinds))]
    assert [name for name in names if RETIRED.search(name)] == []
