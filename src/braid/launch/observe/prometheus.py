"""Gives the state of a run to Prometheus: a file for node_exporter, or a port on loopback.

A process beside the run reads the run's directory, so an exporter costs the run nothing.

Source: Prometheus, "Exposition formats", text format version 0.0.4.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from braid.errors import ConfigError
from braid.launch.observe.live_run import LiveRun
from braid.launch.observe.publish import write_page
from braid.launch.observe.status import RunStatus, status_of
from braid.runtime.clock import Clock
from braid.runtime.metrics import DIGESTS, MEASURED

__all__ = ["export", "prometheus_text"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def export(run: LiveRun, place: str, clock: Clock, *, every_s: float) -> None:
    """Publish the state of a run for Prometheus until the run has ended.

    Args:
        run: The run.
        place: Path of a file, which is replaced atomically, or a port on 127.0.0.1.
        clock: Waits between two looks.
        every_s: Seconds between two looks; 0 for the state now.

    Raises:
        ConfigError: The file cannot be written, or the port is taken.
    """
    if place.isdecimal():
        with _Server(int(place)) as server:
            for text in _texts(run, clock, every_s):
                server.text = text
        return
    for text in _texts(run, clock, every_s):
        try:
            write_page(text, Path(place))
        except OSError as exc:
            msg = f"cannot write {place} for Prometheus: {exc.strerror}; choose another file"
            raise ConfigError(msg) from exc


def _texts(run: LiveRun, clock: Clock, every_s: float) -> Iterator[str]:
    while True:
        yield prometheus_text(status_of(run))
        if not every_s or not run.is_live:
            return
        clock.sleep(every_s)
        run.refresh()


class _Server:
    """Serves a text on a port of 127.0.0.1, in a thread, while the context lasts.

    Args:
        port: The port.

    Attributes:
        text: The text.
    """

    def __init__(self, port: int) -> None:
        self.text = ""
        try:
            self._http = HTTPServer(("127.0.0.1", port), self._handler())
        except (OSError, OverflowError) as exc:
            msg = f"cannot listen on 127.0.0.1:{port} for Prometheus: {exc}; choose another port"
            raise ConfigError(msg) from exc
        self._thread = threading.Thread(target=self._http.serve_forever, name="braid-prometheus")

    def __enter__(self) -> _Server:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = server.text.encode()
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Log nothing: a scrape is not worth a line."""

        return Handler


def prometheus_text(status: RunStatus) -> str:
    """Return the state of a run in Prometheus' text format."""
    run = {"run": status.name}
    ranks = [
        ({**run, "rank": str(rank.rank), "host": rank.host}, rank)
        for rank in sorted(status.ranks.values(), key=lambda rank: rank.rank)
    ]
    faults = [(event.kind, event.unix_s) for event in status.faults]
    kinds = ("stopped", "left", "lost", "failed")
    hidden = {*MEASURED, *DIGESTS, "members"}
    families: list[tuple[str, str, str, list[tuple[Mapping[str, str], float]]]] = [
        ("run_up", "gauge", "1 while the launcher runs.", [(run, status.state == "running")]),
        ("step", "gauge", "Number of finished steps.", [(run, status.step)]),
        ("steps_per_second", "gauge", "Rate over the last 50 steps.", [(run, status.rate)]),
        ("epoch", "gauge", "Epoch of members; -1 if they are fixed.", [(run, status.epoch)]),
        ("members", "gauge", "Number of ranks that train.", [(run, len(status.members))]),
        (
            "restarts_left",
            "gauge",
            "Processes that may still be started for lost ranks; -1 with fixed members.",
            [(run, status.restarts_left)],
        ),
        (
            "rank_faults_total",
            "counter",
            "Ranks that were stopped, left, lost or failed.",
            [({**run, "kind": kind}, sum(k == kind for k, _ in faults)) for kind in kinds],
        ),
        (
            "last_fault_timestamp_seconds",
            "gauge",
            "Time of the last fault.",
            [(run, seconds) for _, seconds in faults[-1:]],
        ),
        (
            "rank_state",
            "gauge",
            "1 for the state of each rank.",
            [({**labels, "state": rank.state}, 1) for labels, rank in ranks],
        ),
        (
            "rank_step",
            "gauge",
            "Number of steps that a rank has finished.",
            [(labels, rank.step) for labels, rank in ranks if rank.step >= 0],
        ),
        (
            "logged",
            "gauge",
            "Last numbers of braid.log, as averages over ranks.",
            [
                ({**run, "name": name}, value)
                for name, value in sorted(status.values.items())
                if name not in hidden
            ],
        ),
    ]
    return "".join(line for family in families for line in _family(*family))


def _family(
    name: str, kind: str, text: str, samples: Sequence[tuple[Mapping[str, str], float]]
) -> Iterator[str]:
    if samples:
        yield f"# HELP braid_{name} {text}\n# TYPE braid_{name} {kind}\n"
    for labels, value in samples:
        pairs = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels.items())
        yield f"braid_{name}{{{pairs}}} {_number(value)}\n"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(int(value) if value == int(value) else float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
