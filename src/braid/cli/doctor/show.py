"""Shows findings as a table on a terminal, and as plain lines elsewhere."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from braid.cli.doctor.examination import Examination

__all__ = ["show"]

STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}
CHECK_WIDTH = 16  # the longest name is process_vm_readv
VERDICT_WIDTH = 7


def show(examination: Examination, console: Console) -> None:
    """Print the findings and a summary."""
    if console.is_terminal:
        table = Table(box=None, show_header=False, padding=(0, 1))
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")  # paths and addresses may exceed a narrow line
        for finding in examination.findings:
            text = Text(finding.fact)
            if finding.advice:
                text.append(f"\n-> {finding.advice}", style=STYLES[finding.verdict])
            verdict = Text(finding.verdict, style=STYLES[finding.verdict])
            table.add_row(verdict, Text(finding.check), text)
        console.print(table)
    else:
        indent = " " * (CHECK_WIDTH + VERDICT_WIDTH + 2)
        for finding in examination.findings:
            line = (
                f"{finding.verdict:<{VERDICT_WIDTH}} {finding.check:<{CHECK_WIDTH}} {finding.fact}"
            )
            console.print(Text(line), soft_wrap=True)
            if finding.advice:
                console.print(Text(f"{indent}-> {finding.advice}"), soft_wrap=True)
    console.print(Text(_summary(examination)), soft_wrap=True)


def _summary(examination: Examination) -> str:
    notes, problems = examination.count("note"), examination.count("problem")
    counts = [f"{notes} note{'s' if notes != 1 else ''}"] if notes else []
    if problems:
        counts.append(f"{problems} problem{'s' if problems > 1 else ''}")
        return f"braid: does not work here: {', '.join(counts)}"
    return f"braid: works here{f', {counts[0]}' if counts else ''}"
