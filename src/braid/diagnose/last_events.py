"""What a dead or stuck rank was inside of, read from its black box.

Problem: "rank 2 died" does not say whether it was loading data, in backward or waiting for
somebody, and the rank cannot be asked. A profiler's file is not there yet; a stack dump needs a
living process.

Idea: the spans that have begun and not ended *are* the answer, from the outermost to the innermost.
A moment in the past can be asked for as well: survivors unwind (and so close their spans) within
milliseconds of the first death, and what matters is what they were doing when it happened.
"""

from __future__ import annotations

from braid.diagnose.tracebacks import short_site
from braid.events import Event, EventRing

__all__ = ["last_events", "last_operation_end", "last_step"]


def last_events(ring: EventRing, at_ns: int | None = None) -> str:
    """What the rank of `ring` is inside of, or was inside of at `at_ns`.

    `step` spans carry the step in `seq`; collectives are named by their `OpDesc` and carry number
    and call site; `wait` inside a collective means that it waits for others; every other name is a
    phase.

    Args:
        ring: The rank's black box; may still be written to.
        at_ns: Moment on the rank's clock; now when None.

    Returns:
        Such as `in backward, bucket 1 of 2, at step 213`, or `waiting in all_reduce(float32[4096],
        sum)#176 called at train.py:41 in step`; empty when the rank recorded nothing.
    """
    events = [event for event in ring.tail() if at_ns is None or event.t_ns <= at_ns]
    step = next((e for e in reversed(events) if ring.name(e.kind) == "step"), None)
    # A span that outlived its step was abandoned, by a thread or a generator that nobody closed.
    began_ns = step.t_ns if step is not None else 0
    inside = [e for e in events if _lasted_until(e, at_ns) and e.t_ns >= began_ns and e is not step]
    inside.sort(key=lambda event: event.t_ns)
    words, phases = _operation(ring, inside), _phases(ring, inside)
    if words and phases and words[0].endswith(f" {phases[0]}"):
        del phases[0]  # the function of the call site is named like the phase
    words += phases
    if step is not None:
        words.append(f"{'at' if _lasted_until(step, at_ns) else 'after'} step {step.seq}")
    return ", ".join(words)


def last_operation_end(ring: EventRing) -> int:
    """When the rank's last collective ended, or its last wait inside of it, on its clock; 0 when none has.

    A survivor that gave up did so there, whenever it had begun.
    """
    ended = [event for event in ring.tail() if not event.open]
    operations = [event for event in ended if "(" in ring.name(event.kind)]
    if not operations:
        return 0
    last = max(operations, key=lambda event: event.t_ns + event.dur_ns)
    waits = [
        e.t_ns + e.dur_ns for e in ended if ring.name(e.kind) == "wait" and e.t_ns >= last.t_ns
    ]
    return max(waits, default=last.t_ns + last.dur_ns)


def last_step(ring: EventRing) -> int | None:
    """Number of the last step that the rank began; None when it recorded none."""
    return next((e.seq for e in reversed(ring.tail()) if ring.name(e.kind) == "step"), None)


def _lasted_until(event: Event, at_ns: int | None) -> bool:
    if event.open:
        return True
    return at_ns is not None and event.dur_ns > 0 and event.t_ns + event.dur_ns >= at_ns


def _operation(ring: EventRing, inside: list[Event]) -> list[str]:
    """The innermost collective, with its number and its call site."""
    operations = [event for event in inside if "(" in ring.name(event.kind)]
    if not operations:
        return []
    operation = operations[-1]
    waits = any(ring.name(e.kind) == "wait" and e.t_ns >= operation.t_ns for e in inside)
    text = f"{'waiting in' if waits else 'in'} {ring.name(operation.kind)}"
    if operation.seq:
        text += f"#{operation.seq}"
    if operation.site:
        text += f" called at {short_site(ring.name(operation.site))}"
    return [text]


def _phases(ring: EventRing, inside: list[Event]) -> list[str]:
    names = [ring.name(event.kind) for event in inside]
    phases = [name for name in names if "(" not in name and name not in {"wait", "step"}]
    return [f"in {phases[0]}", *phases[1:]] if phases else []
