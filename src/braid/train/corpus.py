"""Text to train on: the user's files, or the sources of Python's standard library.

Problem: a demonstration that downloads a data set fails behind a firewall, and one with random
numbers shows nothing. Idea: every Python installation has 10 MB of source code (the standard
library) and 700 kB of prose about it (`pydoc_data.topics`). Tokens are bytes: there are 256 of
them, without a vocabulary file or a tokenizer to train.

The hash of a file's contents decides whether it is held out for evaluation. So the choice is the
same on every machine, does not change when files are added, and copies of a file are on the same
side. Few files (below `MIN_FILES_TO_SPLIT`) are cut instead: the last tenth of each is held out.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data import topics
from typing import NamedTuple

from braid.errors import ConfigError

__all__ = ["Corpus", "from_files", "standard_library"]

VOCABULARY = 256
SEPARATOR = b"\0"  # begins each document; text files do not contain it
HELD_OUT_ONE_IN = 20
MIN_FILES_TO_SPLIT = 40  # below this, whole files would make a bad sample
MIN_FILE_BYTES = 64
MIN_HELD_OUT_BYTES = 256
NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests"})


class _Document(NamedTuple):
    name: str
    text: bytes
    digest: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Text to train on and text to evaluate with.

    Attributes:
        name: Name of the text, for messages.
        train: Bytes to train on.
        held_out: Bytes that are never trained on.
        num_files: Number of files.
        digest: SHA-256 over both parts, so that a run can refuse to continue on other data.
    """

    name: str
    train: bytes = field(repr=False)
    held_out: bytes = field(repr=False)
    num_files: int
    digest: str


def standard_library() -> Corpus:
    """Read the sources of the standard library (without its tests) and the prose of `help()`.

    Raises:
        ConfigError: This Python was installed without its sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = []
    for folder, names, files in os.walk(root):
        names[:] = set(names) - NOT_LIBRARY
        paths += [Path(folder, file) for file in files if file.endswith(".py")]
    texts = {str(path.relative_to(root)): _text_or_reason(path) for path in paths}
    prose = "\n\n".join(topics.topics[name] for name in sorted(topics.topics)).encode()
    documents = [_document("pydoc_data.topics", prose)]
    # Files that are empty or in another encoding are skipped: the user cannot change them.
    documents += [_document(name, text) for name, text in texts.items() if isinstance(text, bytes)]
    if len(documents) < MIN_FILES_TO_SPLIT:
        msg = (
            f"the sources of Python's standard library are not in {root}, only "
            f"{len(documents) - 1} files: pass text files with --data"
        )
        raise ConfigError(msg)
    return _corpus("Python's standard library", documents)


def from_files(paths: Iterable[str | Path]) -> Corpus:
    """Read text files of the user, in UTF-8.

    Args:
        paths: Files; their order does not matter.

    Raises:
        ConfigError: Some files cannot be used; the message lists all of them with the reason.
    """
    texts = {str(path): _text_or_reason(Path(path)) for path in paths}
    problems = [f"{name}: {reason}" for name, reason in texts.items() if isinstance(reason, str)]
    if problems or not texts:
        listed = "\n  ".join(problems) or "no files were given"
        msg = f"cannot train on these files, which must be readable text (UTF-8):\n  {listed}"
        raise ConfigError(msg)
    documents = [_document(name, text) for name, text in texts.items() if isinstance(text, bytes)]
    name = Path(documents[0].name).name if len(documents) == 1 else f"{len(documents)} files"
    corpus = _corpus(name, documents)
    if len(corpus.held_out) < MIN_HELD_OUT_BYTES:
        total = len(corpus.train) + len(corpus.held_out)
        msg = (
            f"{total} bytes of text are too few to hold out {MIN_HELD_OUT_BYTES} for "
            f"evaluation: give at least {10 * MIN_HELD_OUT_BYTES} bytes"
        )
        raise ConfigError(msg)
    return corpus


def _text_or_reason(path: Path) -> bytes | str:
    """Return the contents of a text file, or why it cannot be used."""
    try:
        text = path.read_bytes()
    except IsADirectoryError:
        return "is a directory; name the files in it"
    except FileNotFoundError:
        return "does not exist"
    except OSError as exc:
        return f"cannot be read: {exc.strerror}"
    if not text:
        return "is empty"
    if SEPARATOR in text:
        return f"is binary: byte {text.index(SEPARATOR)} is 0"
    try:
        text.decode()
    except UnicodeDecodeError as exc:
        return f"is not UTF-8: byte {exc.start} is 0x{text[exc.start]:02x}"
    if len(text) < MIN_FILE_BYTES:
        return f"is too short: {len(text)} bytes, at least {MIN_FILE_BYTES} are needed"
    return text


def _document(name: str, text: bytes) -> _Document:
    return _Document(name, text, hashlib.sha256(text).digest())


def _corpus(name: str, documents: Sequence[_Document]) -> Corpus:
    ordered = sorted(documents, key=lambda document: document.digest)
    train, held_out = [], []
    for document in ordered:
        cut = len(document.text)
        if len(ordered) < MIN_FILES_TO_SPLIT:
            cut -= cut // 10
        elif int.from_bytes(document.digest[:8], "big") % HELD_OUT_ONE_IN == 0:
            cut = 0
        train += [SEPARATOR, document.text[:cut]] if cut else []
        held_out += [SEPARATOR, document.text[cut:]] if cut < len(document.text) else []
    parts = [b"".join(train), b"".join(held_out)]
    digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts))
    return Corpus(
        name=name,
        train=parts[0],
        held_out=parts[1],
        num_files=len(ordered),
        digest=digest.hexdigest(),
    )
