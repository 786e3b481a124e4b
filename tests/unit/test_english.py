"""Text is plain English: phrases that readers stumble over are rare, and get rarer.

Docstrings, other strings, comments and pages are counted, package by package. A phrase may come as
as often as its budget in 10,000 words, or as often as in `english_counts.json`. After a rewrite,
`python tests/unit/test_english.py` writes the smaller counts into that file;
`python tests/unit/test_english.py PACKAGE` lists where the phrases of a package are.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
COUNTS = Path(__file__).with_name("english_counts.json")
DOCSTRING = "\N{START OF TEXT}"  # before the first word of a docstring
LOCAL = f"{DOCSTRING}local name"  # stands for one that is not a noun
BUDGETS = {  # phrase -> its pattern, and how often it may come in 10,000 words
    "those of": (r"\b(?:those|that) of\b", 1.0),
    "what is": (r"\bwhat (?:is|has|it|the)\b", 3.0),
    "Let": (rf"{DOCSTRING}Let\b", 0.3),
    "of which": (r"\bof (?:which|whom)\b", 1.0),
    "is no": (r"\bis no (?!longer|more)\w", 2.0),
    "whose": (r"\bwhose\b", 4.0),
    "of its own": (r"\bof (?:its|their) own\b", 0.5),
    "as many": (r"\b(?:as many|so many|so long as)\b", 1.0),
    "in place of": (r"\bin place of\b", 0.5),
    "says": (r"\b(?:says?|said|tells?|told)\b", 1.0),
    "at once": (r"\bat once\b", 1.0),
    "whoever": (r"\bwhoever\b", 0.2),
    "nobody": (r"\bnobody\b", 0.2),
    "anew": (r"\banew\b", 0.2),
    "likewise": (r"\blikewise\b", 0.2),
    "for ever": (r"\bfor ever\b", 0.2),
    "one after the other": (r"\bone after the other\b", 0.2),
    "local name": (f"^{LOCAL}$", 0.0),
}
LOCAL_NAMES = {"own", "done", "given", "each", "told", "left"}


class Text(NamedTuple):
    """A text, and where it begins."""

    path: Path
    line: int
    text: str


def package_of(path: Path) -> str:
    """Return the package of a file: that below `src/braid`, or the directory at the top."""
    parts = path.relative_to(ROOT).parts
    if parts[0] != "src":
        return parts[0] if len(parts) > 1 else "pages"
    return parts[2] if len(parts) > 3 else "braid"


def _files() -> Iterator[Path]:
    for folder in ("src", "benchmarks", "examples", "docs"):
        yield from sorted(p for p in (ROOT / folder).rglob("*") if p.suffix in {".py", ".md"})
    yield from sorted(ROOT.glob("*.md"))


def _page(path: Path) -> Iterator[Text]:
    """Yield the lines of a page outside of its code."""
    is_code = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield Text(path, number, re.sub(r"`[^`]*`", "", line))


def _program(path: Path) -> Iterator[Text]:
    """Yield docstrings, other strings of several words, comments, and local names in `LOCAL`."""
    source = path.read_text()
    docs = set()
    for node in ast.walk(ast.parse(source)):  # parents come first
        match node:
            case (
                ast.FunctionDef(body=[ast.Expr(ast.Constant(str())) as doc, *_])
                | ast.ClassDef(body=[ast.Expr(ast.Constant(str())) as doc, *_])
                | ast.Module(body=[ast.Expr(ast.Constant(str())) as doc, *_])
            ):
                docs.add(doc.value)
            case ast.Constant(str(text)) if " " in text:
                yield Text(path, node.lineno, DOCSTRING * (node in docs) + text)
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) if name in LOCAL_NAMES:
                yield Text(path, node.lineno, LOCAL)
    for number, line in enumerate(source.splitlines(), 1):
        if comment := re.search(r"(?:^|  )# (.*)", line):
            yield Text(path, number, comment[1])


def found() -> tuple[dict[str, int], dict[str, dict[str, list[Text]]]]:
    """Return the number of words of each package, and where its phrases are."""
    words: Counter[str] = Counter()
    places: dict[str, dict[str, list[Text]]] = defaultdict(lambda: defaultdict(list))
    patterns = {name: re.compile(pattern) for name, (pattern, _) in BUDGETS.items()}
    for path in _files():
        package = package_of(path)
        for text in _program(path) if path.suffix == ".py" else _page(path):
            words[package] += len(text.text.split())
            for name, pattern in patterns.items():
                places[package][name] += [text] * len(pattern.findall(text.text))
    return words, places


def allowed(name: str, num_words: int) -> int:
    """Return how often a phrase may come in so many words."""
    return int(BUDGETS[name][1] * num_words / 10_000)


def test_phrases_that_are_hard_to_read_get_rarer():
    words, places = found()
    limits = json.loads(COUNTS.read_text())
    problems = []
    for package, of_package in places.items():
        for name, texts in of_package.items():
            limit = limits.get(package, {}).get(name, 0)
            if len(texts) > max(limit, allowed(name, words[package])):
                problems.append(
                    f"{package}: {name!r} comes {len(texts)} times, and may come {limit}: see "
                    f"python tests/unit/test_english.py {package}"
                )
    assert problems == []


def test_a_phrase_is_found_and_code_is_not(tmp_path):
    page = tmp_path / "a.md"
    page.write_text("The rank, of which\n```\nof which\n```\n`of which` is code\n")
    assert [text.line for text in _page(page) if "of which" in text.text] == [1]
    program = tmp_path / "a.py"
    program.write_text('"""Let a rank."""\nown = "whose rank"  # as many ranks\nx = "whose"\n')
    texts = [text.text for text in _program(program)]
    assert texts == [f"{DOCSTRING}Let a rank.", LOCAL, "whose rank", "as many ranks"]


def main() -> None:
    """Write smaller counts, or list the phrases of a package."""
    words, places = found()
    if len(sys.argv) > 1:
        for name, texts in places[sys.argv[1]].items():
            budget = allowed(name, words[sys.argv[1]])
            print(f"{name}: {len(texts)}, budget {budget}")
            for text in texts if len(texts) > budget else ():
                print(f"  {text.path.relative_to(ROOT)}:{text.line}")
        return
    before = json.loads(COUNTS.read_text()) if COUNTS.exists() else None
    counts = {
        package: {
            name: min(len(texts), before.get(package, {}).get(name, 0) if before else len(texts))
            for name, texts in sorted(of_package.items())
            if len(texts) > allowed(name, words[package])
        }
        for package, of_package in sorted(places.items())
    }
    COUNTS.write_text(json.dumps(counts, indent=1) + "\n")


if __name__ == "__main__":
    main()
