"""The pages for readers: links lead somewhere, the front page stays short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page
    for where in (ROOT, ROOT / "docs", ROOT / "src", ROOT / "packages")
    for page in (where.glob("*.md") if where == ROOT else where.rglob("*.md"))
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_that_a_page_links_to_exists(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\((?!http)([^)#\s]+)(?:#[^)]*)?\)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_readme_has_at_most_150_lines():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


QUOTE = re.compile(r'^```python title="(src/[^"]+)"\n(.*?)^```', re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_quoted_lines_are_those_of_the_file(page):
    """Lines `...` stand for lines that are left out."""
    for file, quoted in QUOTE.findall(page.read_text()):
        source = dedented((ROOT / file).read_text())
        for part in re.split(r"^ *\.\.\.\n", quoted, flags=re.MULTILINE):
            assert dedented(part).strip() in source, f"{file} has not these lines:\n{part}"


def dedented(text: str) -> str:
    """Return a text without the indentation of its lines: quotes may begin inside of a class."""
    return "\n".join(line.strip() for line in text.splitlines())
