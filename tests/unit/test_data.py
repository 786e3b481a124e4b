"""Corpora: deterministic, split by contents, and clear about files that cannot be used."""

from __future__ import annotations

import pytest
import torch

from braid.errors import ConfigError
from braid.train.corpus import from_files, standard_library
from braid.train.windows import Windows


def text(seed: int, size: int = 400) -> bytes:
    line = f"line {seed} of a text that is about nothing in particular\n".encode()
    return (line * (size // len(line) + 1))[:size]


@pytest.fixture
def files(tmp_path):
    def make(count: int, prefix: str = "") -> list[str]:
        paths = [tmp_path / f"{prefix}{i:03}.txt" for i in range(count)]
        for i, path in enumerate(paths):
            path.write_bytes(text(i))
        return [str(path) for path in paths]

    return make


def test_names_and_order_of_files_do_not_matter(files):
    ours, theirs = from_files(files(50)), from_files(reversed(files(50, "other")))
    assert ours.digest == theirs.digest
    assert ours.train == theirs.train
    assert ours.held_out == theirs.held_out


def test_adding_files_moves_nothing_across_the_split(files):
    def documents(tokens: bytes) -> set[bytes]:
        return set(tokens.split(b"\0")) - {b""}

    few, many = from_files(files(60)), from_files(files(90))
    assert documents(few.held_out) <= documents(many.held_out)
    assert documents(few.train) <= documents(many.train)
    assert documents(many.train) | documents(many.held_out) == {text(i) for i in range(90)}
    assert not documents(many.train) & documents(many.held_out)


def test_few_files_give_their_last_tenth(tmp_path):
    path = tmp_path / "one.txt"
    path.write_bytes(bytes(range(1, 101)) * 30)
    corpus = from_files([path])
    whole = bytes(range(1, 101)) * 30
    assert corpus.train == b"\0" + whole[:2700]
    assert corpus.held_out == b"\0" + whole[2700:]
    assert (corpus.name, corpus.num_files) == ("one.txt", 1)


def test_every_bad_file_is_listed_with_its_reason(tmp_path, files):
    good = files(2)
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "binary").write_bytes(b"\x7fELF\0\0")
    (tmp_path / "latin").write_bytes(b"caf\xe9 " * 40)
    (tmp_path / "short").write_bytes(b"hello")
    (tmp_path / "folder").mkdir()
    names = ["empty", "binary", "latin", "short", "folder", "missing"]
    with pytest.raises(ConfigError) as caught:
        from_files([*good, *(tmp_path / name for name in names)])
    assert str(caught.value).split("\n")[1:] == [
        f"  {tmp_path / name}: {reason}"
        for name, reason in {
            "empty": "is empty",
            "binary": "is binary: byte 4 is 0",
            "latin": "is not UTF-8: byte 3 is 0xe9",
            "short": "is too short: 5 bytes, at least 64 are needed",
            "folder": "is a directory; name the files in it",
            "missing": "does not exist",
        }.items()
    ]


def test_no_files_and_too_little_text_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no files were given"):
        from_files([])
    (tmp_path / "little").write_bytes(text(1, 100))
    with pytest.raises(ConfigError, match="at least 2560 bytes"):
        from_files([tmp_path / "little"])


def test_the_standard_library_is_there():
    corpus = standard_library()
    assert corpus.num_files > 100
    assert len(corpus.train) > 5 * len(corpus.held_out) > 5 * 50_000


def test_targets_are_the_inputs_one_token_later():
    windows = Windows(bytes(range(8)), 3)
    inputs, targets = windows.batch([1, 0])
    assert len(windows) == 2
    assert inputs.tolist() == [[3, 4, 5], [0, 1, 2]]
    assert targets.tolist() == [[4, 5, 6], [1, 2, 3]]
    assert inputs.dtype == torch.int64


@pytest.mark.parametrize("context", [0, 8, 100])
def test_a_context_longer_than_the_text_is_refused(context):
    with pytest.raises(ConfigError, match=f"1 to 7 tokens for this text of 8, got {context}"):
        Windows(bytes(range(8)), context, name="text")
