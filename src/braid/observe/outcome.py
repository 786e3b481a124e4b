"""How a run ended, in the words and the form in which `braid run` said it, read back from its record."""

from __future__ import annotations

from braid.diagnose import rank_list, render_block
from braid.observe.run_directory import RankEnding, RunRecord
from braid.observe.units import duration_text

__all__ = ["outcome_block", "status"]

NO_END = "no end recorded"


def status(record: RunRecord) -> str:
    """One or two words: finished, stopped, interrupted, timed out, or that no end is recorded."""
    if not record.kind:
        return NO_END
    return {"finished": "finished", "interrupted": "interrupted", "timeout": "timed out"}.get(
        record.kind, "stopped"
    )


def outcome_block(record: RunRecord) -> str:
    """The block that `braid run` printed at the end: what happened, who is guilty, how the others ended."""
    if not record.kind:
        return "braid: the run goes on, or its launcher was killed: what follows is what it has written so far"
    headline = f"run {status(record)}"
    if record.step is not None:
        headline += f" at step {record.step}"
    headline += f" after {duration_text(record.elapsed_s * 1e9)} (exit {record.exit_code})"
    rows = [("braid:", headline)]
    guilty = [end for end in record.ranks if end.rank in record.guilty]
    if guilty:
        first = guilty[0]
        who = rank_list(end.rank for end in guilty)
        text = f"{who} (pid {first.pid})" if len(guilty) == 1 else who
        text += f": {first.reason.removeprefix('raised ')}"
        text += f"      {first.where}" if first.where else f" {first.testimony}".rstrip()
        if not record.certain:
            text += "\nuncertain: every rank failed because of another one; this is the likeliest"
        rows.append(("guilty", text))
    if record.exit_code:
        others = _others([end for end in record.ranks if end.rank not in record.guilty])
        rows += [("others" if index == 0 else "", text) for index, text in enumerate(others)]
    if record.saved_step is not None:
        rows.append(("saved", f"checkpoint step {record.saved_step}"))
    return render_block(rows)


def _others(ends: list[RankEnding]) -> list[str]:
    """One line for all ranks that did and ended the same."""
    groups: dict[tuple[str, str], list[int]] = {}
    for end in ends:
        groups.setdefault((end.testimony, end.reason or end.ending), []).append(end.rank)
    return [
        " ".join(
            part for part in (rank_list(ranks), doing, f"- {ending}" if ending else "") if part
        )
        for (doing, ending), ranks in groups.items()
    ]
