"""How a run ended, in the words and the form in which `braid run` said it, read back from its record."""

from __future__ import annotations

from braid.diagnose import Ending, rank_list, render_block
from braid.observe.run_directory import RankEnding, RunRecord
from braid.observe.units import duration_text

__all__ = ["NO_END", "outcome_block", "status"]

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
        gap = "      " if first.where or first.reason.startswith("raised ") else " "
        text += f"{gap}{first.where or first.testimony}".rstrip()
        text += "".join(f"\n{line}" for line in first.details)
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
        groups.setdefault((end.testimony, _how_it_ended(end)), []).append(end.rank)
    lines = []
    for (doing, ending), ranks in groups.items():
        were = "was" if len(ranks) == 1 else "were"
        who = rank_list(ranks)
        lines.append(f"{who} {were} {doing} - {ending}" if doing else f"{who} {ending}")
    return lines


def _how_it_ended(end: RankEnding) -> str:
    """Symptoms say at length what the guilty rank said already."""
    if end.ending == Ending.CAUSE.value:
        return f"also failed: {end.reason}"
    if end.ending == Ending.STOPPED_BY_US.value:
        return "ended by braid"
    return "finished" if end.ending == Ending.FINISHED.value else "stopped cleanly"
