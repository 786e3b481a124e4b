"""observe: what a run did, as a page, as a trace and in three sentences; see README.md."""

from __future__ import annotations
