"""Checks whether braid can work on this machine, and what would make it work better."""

from __future__ import annotations

from braid.cli.doctor.checks import Finding
from braid.cli.doctor.examination import Examination, examine
from braid.cli.doctor.show import show

__all__ = ["Examination", "Finding", "examine", "show"]
