"""Vocabulary of asynchronous pipelines: the actions of a pipeline, with versions of weights.

    F~v B~v R~v   by version v of the stage's weights: what its first v steps have made of them
    STEP~v        makes version v of the gradients since the step before; replicas step together

A stage is on one rank, or on replicas that take turns. Each of them makes all steps of the stage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from braid.programs.schedule.pipeline.vocabulary import PIPELINE, PIPELINE_RULES, TRAIN, check_data
from braid.programs.schedule.program import Action, Program, Vocabulary
from braid.programs.schedule.validate import Rules, Violation

__all__ = ["ASYNCHRONOUS", "ASYNCHRONOUS_RULES"]

ASYNCHRONOUS = Vocabulary(
    name="asynchronous",
    kinds={
        name: kind._replace(has_version=name in {"F", "B", "R", "STEP"})
        for name, kind in PIPELINE.kinds.items()
        if name not in {"I", "W"}
    },
    unit_name=PIPELINE.unit_name,
    index_name=PIPELINE.index_name,
    posts=PIPELINE.posts,
)


class _RankVersions:
    """Steps and versions of a rank up to an action."""

    def __init__(self) -> None:
        self.steps: dict[int, int] = defaultdict(int)  # by stage
        self.versions: dict[tuple[int, int], int] = {}  # of forwards, by stage and micro-batch
        self.has_gradients: set[int] = set()  # stages with those that no step has used
        self.has_ended: set[int] = set()  # those with a step of other replicas' gradients alone

    def problem(self, action: Action) -> str:
        """Return the problem with the version of an action; empty if it is right."""
        steps = self.steps[action.unit]
        if action.unit in self.has_ended and action.kind in {"F", "B", "R", "STEP"}:
            return (
                "comes after an optimizer step without gradients, which can only be this rank's "
                "last"
            )
        if action.kind == "F" and action.version > steps:
            return f"uses version {action.version}, and {steps} steps were made"
        if action.kind == "STEP" and action.version != steps + 1:
            return f"makes version {action.version}, and version {steps + 1} is next"
        if action.kind in {"B", "R"}:
            version = self.versions.get((action.unit, action.index))
            if version is None:
                return "has no forward before it on this rank"
            if version != action.version:
                return f"uses version {action.version}, and its forward used {version}"
        return ""

    def note(self, action: Action) -> None:
        """Note that an action was done."""
        if action.kind == "F":
            self.versions[action.unit, action.index] = action.version
        elif action.kind == "B":
            self.has_gradients.add(action.unit)
        elif action.kind == "STEP":
            self.steps[action.unit] += 1
            if action.unit not in self.has_gradients:
                self.has_ended.add(action.unit)
            self.has_gradients.discard(action.unit)


def check_versions(program: Program) -> list[Violation]:
    """Check an asynchronous program: each F and B once, with existing versions, before a STEP."""
    header = program.header
    if header.operation != TRAIN or header.root != -1:
        text = f"the header must name {TRAIN} and no root, got {header}"
        return [Violation("header", -1, -1, text)]
    ended: set[tuple[str, int, int]] = set()
    steps: dict[int, set[int]] = defaultdict(set)
    violations: list[Violation] = []
    for rank, actions in enumerate(program.ranks):
        violations += _check_rank(program, rank, actions, ended, steps)
    for stage in range(header.num_units):
        wanted = [(kind, stage, i) for i in range(header.num_indices) for kind in "FB"]
        missing = [f"{kind}{stage}.{i}" for kind, _, i in wanted if (kind, stage, i) not in ended]
        if missing:
            violations.append(Violation("work", -1, -1, f"no rank does {', '.join(missing[:5])}"))
        if len(steps[stage]) > 1:
            text = f"ranks of stage {stage} make {sorted(steps[stage])} steps: not the same number"
            violations.append(Violation("versions", -1, -1, text))
    return violations


def _check_rank(
    program: Program,
    rank: int,
    actions: tuple[Action, ...],
    finished: set[tuple[str, int, int]],
    steps: dict[int, set[int]],
) -> Iterator[Violation]:
    """Yield the violations of a rank; add its work to `finished` and its steps to `steps`."""
    header, state = program.header, _RankVersions()
    for position, action in enumerate(actions):
        key = (action.kind, action.unit, action.index)
        if not (action.unit < header.num_units and action.index < header.num_indices):
            below = f"a stage below {header.num_units} and a micro-batch below {header.num_indices}"
            rule, problem = "units", f"is not of {below}"
        elif action.kind in {"F", "B", "R"} and key in finished:
            rule, problem = "work", "a second time"
        else:
            rule, problem = "versions", state.problem(action)
        if problem:
            yield Violation(rule, rank, position, f"{ASYNCHRONOUS.describe(action)} {problem}")
        finished.add(key)
        state.note(action)
    for stage in sorted(state.has_gradients):
        text = f"ends with gradients of stage {stage} that no STEP has used"
        yield Violation("versions", rank, -1, text)
    for stage, made in state.steps.items():
        steps[stage].add(made)


# messages follow the rules of other pipelines
ASYNCHRONOUS_RULES = Rules(check_versions, check_data, PIPELINE_RULES.semantics)
