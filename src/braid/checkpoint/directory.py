"""Directory of a run's checkpoints: names, creation, publication and removal.

    checkpoints/
        step-00000100/            complete: its manifest was written last, then it was renamed
        step-00000200/
        .step-00000300.partial/   being written, or interrupted; the next save removes it
        .step-00000200.old/       being replaced by a checkpoint of the same step; used until the
                                  replacement is complete
        .step-00000050.gone/      being removed

The last complete checkpoint is used. The names are the only index.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

__all__ = ["CheckpointDirectory"]

STEP_NAME = re.compile(r"step-(\d{8,18})")
WRITER_NAME = "writer"  # file that names the writer of a hidden directory
HIDDEN_NAME = re.compile(r"\.step-(\d{8,18})\.(partial|old|gone)")


class CheckpointDirectory:
    """Checkpoints of one run, on a file system shared by all ranks.

    Args:
        path: Directory; may be missing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def final(self, step: int) -> Path:
        """Return the path of the complete checkpoint of `step`."""
        return self.path / f"step-{step:08d}"

    def partial(self, step: int) -> Path:
        """Return the hidden path of the checkpoint of `step` while it is written."""
        return self._hidden(step, "partial")

    def steps(self) -> list[int]:
        """Return the steps that have a directory, complete or not, in ascending order."""
        steps = set()
        for entry in self._entries():
            match = STEP_NAME.fullmatch(entry.name)
            hidden = HIDDEN_NAME.fullmatch(entry.name)
            if hidden and hidden[2] == "old":
                match = hidden
            if match and entry.is_dir(follow_symlinks=False):
                steps.add(int(match[1]))
        return sorted(steps)

    def locate(self, step: int) -> Path:
        """Return the path from which the checkpoint of `step` can be read now.

        This is the final path, or a hidden one if a crash interrupted the checkpoint's replacement.
        """
        final, old = self.final(step), self._hidden(step, "old")
        return old if old.exists() and not final.exists() else final

    @staticmethod
    def step_of(path: Path) -> int | None:
        """Return the step in the name of a checkpoint's directory; None for any other name."""
        match = STEP_NAME.fullmatch(path.name) or HIDDEN_NAME.fullmatch(path.name)
        return None if match is None else int(match[1])

    def begin(self, step: int, writer: str = "") -> Path:
        """Create and return the hidden directory of a new checkpoint; remove remains of crashes.

        Args:
            step: Step of the checkpoint.
            writer: Name of this process, for the error message of another run that saves here.

        Raises:
            OSError: The directory cannot be created.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        for entry in self._entries():
            hidden = HIDDEN_NAME.fullmatch(entry.name)
            if hidden and (hidden[2] != "old" or self.final(int(hidden[1])).exists()):
                shutil.rmtree(entry.path)
        path = self.partial(step)
        path.mkdir()
        try:
            if writer:
                (path / WRITER_NAME).write_text(writer)
        except OSError:
            self.discard(step)  # the caller does not know that the directory exists
            raise
        return path

    def writers(self) -> list[str]:
        """Return the names of the processes that began a checkpoint in this directory.

        Includes crashed processes, and excludes processes that completed their checkpoints.
        """
        writers = []
        for entry in self._entries():
            if HIDDEN_NAME.fullmatch(entry.name):
                with contextlib.suppress(OSError, ValueError):
                    writers.append((self.path / entry.name / WRITER_NAME).read_text())
        return writers

    def publish(self, step: int) -> Path:
        """Rename the hidden directory to its final name, which makes it visible; return its path.

        Raises:
            OSError: The directory cannot be renamed.
        """
        final, partial = self.final(step), self.partial(step)
        (partial / WRITER_NAME).unlink(missing_ok=True)
        sync_directory(partial)
        old = self._hidden(step, "old")
        if final.exists():
            final.rename(old)
        partial.rename(final)
        sync_directory(self.path)
        shutil.rmtree(old, ignore_errors=True)
        return final

    def discard(self, step: int) -> None:
        """Remove the hidden directory of an incomplete checkpoint of `step`; ignore errors."""
        shutil.rmtree(self.partial(step), ignore_errors=True)

    def prune(self, keep: int, newest: int) -> None:
        """Remove all but the last `keep` checkpoints up to step `newest`; ignore errors.

        Checkpoints after `newest` belong to an earlier run with more steps, and stay.
        """
        for step in [step for step in self.steps() if step <= newest][:-keep]:
            gone = self._hidden(step, "gone")
            with contextlib.suppress(OSError):
                self.locate(step).rename(gone)  # atomic; the removal below is not
                shutil.rmtree(gone)

    def free_bytes(self) -> int:
        """Return the number of free bytes on the disk of the directory.

        Raises:
            OSError: The directory cannot be read.
        """
        return shutil.disk_usage(self.path).free

    def __repr__(self) -> str:
        return f"CheckpointDirectory({str(self.path)!r})"

    def _hidden(self, step: int, kind: str) -> Path:
        return self.path / f".step-{step:08d}.{kind}"

    def _entries(self) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self.path) as entries:
                return list(entries)
        except (FileNotFoundError, NotADirectoryError):
            return []


def sync_directory(path: Path) -> None:
    """Flush the names in a directory to disk.

    Raises:
        OSError: The directory cannot be flushed.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
