"""Numbers that a training logs for each step: `braid.log`, and the files that keep them."""

from __future__ import annotations

from braid.metrics.files import FOLDER, MetricsFiles, has_writer
from braid.metrics.reading import MetricRows, MetricsReader, average_rows, read_metrics
from braid.metrics.rows import MEASURED, Row, row_of
from braid.metrics.run_metrics import RunMetrics

__all__ = [
    "FOLDER",
    "MEASURED",
    "MetricRows",
    "MetricsFiles",
    "MetricsReader",
    "Row",
    "RunMetrics",
    "average_rows",
    "has_writer",
    "read_metrics",
    "row_of",
]
