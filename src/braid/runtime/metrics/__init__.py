"""Numbers that a training logs for each step: `braid.log`, and the files that keep them."""

from __future__ import annotations

from braid.runtime.metrics.backlog import Backlog
from braid.runtime.metrics.files import FOLDER, MetricsFiles, has_writer
from braid.runtime.metrics.reading import MetricRows, MetricsReader, average_rows, read_metrics
from braid.runtime.metrics.rows import DIGESTS, MEASURED, row_of
from braid.runtime.metrics.run_metrics import RunMetrics, memory_bytes

__all__ = [
    "DIGESTS",
    "FOLDER",
    "MEASURED",
    "Backlog",
    "MetricRows",
    "MetricsFiles",
    "MetricsReader",
    "RunMetrics",
    "average_rows",
    "has_writer",
    "memory_bytes",
    "read_metrics",
    "row_of",
]
