"""Reads the directory of a run that goes on: its record, the launcher's log, finished steps.

Every line is read once. A reader needs no connection to the run, and costs it nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from braid.errors import ConfigError
from braid.launch.observe.run_directory import read_record
from braid.runtime.diagnose.run_events import EVENTS_FILE, RunEvent
from braid.runtime.diagnose.run_record import RunRecord
from braid.runtime.metrics import FOLDER, MetricsReader, has_writer

__all__ = ["LiveRun", "latest_run"]

_DECODER = msgspec.json.Decoder(RunEvent)


class LiveRun:
    """State of a run, read from its directory.

    Args:
        path: Directory of the run.

    Raises:
        ConfigError: `path` is not the directory of a run, or its launcher keeps no log.

    Attributes:
        path: Directory of the run.
        record: Record of the run.
        events: Events of the launcher's log, in their order.
        rows: Logged numbers of each rank, in the order of steps.
        is_live: Whether the launcher runs.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record: RunRecord = read_record(path)
        self.events: list[RunEvent] = []
        self.rows: dict[int, tuple[Mapping[str, float], ...]] = {}
        self.is_live = True
        self._offset = 0
        self._readers: dict[int, MetricsReader] = {}
        self.refresh()
        if not self.events:
            msg = (
                f"{path / EVENTS_FILE} is missing or empty: the run was started without braid run, "
                f"or by an older braid; try braid report {path}"
            )
            raise ConfigError(msg)

    def refresh(self) -> None:
        """Read what was written since the last call.

        Raises:
            ConfigError: The directory is gone.
        """
        if self.record.outcome is None:
            self.is_live = has_writer(self.path / EVENTS_FILE)  # first: then all lines are there
            self.record = read_record(self.path)
        self.is_live = self.is_live and self.record.outcome is None
        with suppress(FileNotFoundError), (self.path / EVENTS_FILE).open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                with suppress(msgspec.MsgspecError):  # of a newer braid
                    self.events.append(_DECODER.decode(line))
        for path in (self.path / FOLDER).glob("rank*.jsonl"):
            rank = path.stem.removeprefix("rank")
            if rank.isdecimal():
                reader = self._readers.setdefault(int(rank), MetricsReader(path))
                if reader.refresh() or int(rank) not in self.rows:
                    rows = reader.rows()
                    self.rows[int(rank)] = rows.rows if rows is not None else ()


def latest_run(runs: Path) -> Path:
    """Return the directory of the run below `runs` that was started or ended last.

    Raises:
        ConfigError: There is no run below `runs`.
    """
    records = sorted(runs.glob("*/run.json"), key=lambda path: path.stat().st_mtime)
    if not records:
        msg = (
            f"no run found in {runs.resolve()}: give the directory that braid run printed when "
            "it started"
        )
        raise ConfigError(msg)
    return records[-1].parent
