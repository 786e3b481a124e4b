"""Describes what a dead or stuck rank was doing, from the events in its black box.

Problem: "rank 2 died" does not show whether the rank was loading data, in backward or waiting for
another rank. A profiler has not written its file yet, and a stack dump needs a living process.

Idea: the spans that have begun but not ended show it, from the outermost to the innermost. They can
also be computed for a moment in the past: surviving ranks unwind, and so close their spans, within
milliseconds of the first death.
"""

from __future__ import annotations

from braid.runtime.diagnose.tracebacks import short_site
from braid.runtime.events import Event, EventRing

__all__ = ["last_events", "last_operation_end", "last_step"]

STEPS = frozenset({"step", "log"})  # `log`: a step for which the rank has logged numbers


def last_events(ring: EventRing, at_ns: int | None = None) -> str:
    """Describe the spans of a rank that are open now, or were open at `at_ns`.

    A `step` span has the number of the step in `seq`. A collective is named by its description and
    has a number and a call site. A `wait` span inside it means that it waits for other ranks. Every
    other span is a phase.

    Args:
        ring: Event ring of the rank; the rank may still write to it.
        at_ns: Time on the rank's clock; None for now.

    Returns:
        Text such as `in backward, bucket 1 of 2, at step 213`, or `waiting in
        all_reduce(float32[4096], sum)#176 called at train.py:41 in step`; empty if the rank has not
        recorded anything.
    """
    events = [event for event in ring.tail() if at_ns is None or event.t_ns <= at_ns]
    step = next((e for e in reversed(events) if ring.name(e.kind) == "step"), None)
    # A span that outlives its step was abandoned by a thread or a generator that was not closed.
    began_ns = step.t_ns if step is not None else 0
    inside = [e for e in events if _lasted_until(e, at_ns) and e.t_ns >= began_ns and e is not step]
    inside.sort(key=lambda event: event.t_ns)
    parts, phases = _operation(ring, inside), _phases(ring, inside)
    if parts and phases and parts[0].endswith(f" {phases[0]}"):
        del phases[0]  # the function of the call site has the same name as the phase
    parts += phases
    if step is not None:
        parts.append(f"{'at' if _lasted_until(step, at_ns) else 'after'} step {step.seq}")
    return ", ".join(parts)


def last_operation_end(ring: EventRing) -> int:
    """Return the time at which the rank's last collective, or the last wait in it, ended; else 0.

    A surviving rank has detected a failure at this time.
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
    """Return the number of the last step that the rank began or logged; None if there was none."""
    return next((e.seq for e in reversed(ring.tail()) if ring.name(e.kind) in STEPS), None)


def _lasted_until(event: Event, at_ns: int | None) -> bool:
    if event.open:
        return True
    return at_ns is not None and event.dur_ns > 0 and event.t_ns + event.dur_ns >= at_ns


def _operation(ring: EventRing, inside: list[Event]) -> list[str]:
    """Describe the innermost collective, with its number and its call site."""
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
