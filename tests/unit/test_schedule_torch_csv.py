"""CSV of torch's pipelining: what torch writes is read, what is written torch reads, and mistakes have a place."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_schedule_pipelines import overhead

from braid.errors import ConfigError
from braid.programs.schedule import Program, from_text, validate
from braid.programs.schedule.files import read_program, schedule_named
from braid.programs.schedule.known import RULES, VOCABULARIES
from braid.programs.schedule.pipeline import (
    SCHEDULES,
    forward_only,
    from_csv,
    most_held,
    stage_ranks,
    to_csv,
    v_half,
)
from braid.programs.schedule.pipeline.vocabulary import WORK

TRAINING = [name for name in SCHEDULES if name != "forward"]
LOOPED = ["ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble"]
V_SHAPED = ["ScheduleZBVZeroBubble", "ScheduleDualPipeV"]


def torch_schedules() -> Any:
    return pytest.importorskip("torch.distributed.pipelining.schedules")


def torch_stages(numbers: list[int], num_stages: int, num_ranks: int) -> list[Any]:
    """What torch's schedules ask of stages before a step, without modules or process groups."""
    return [
        SimpleNamespace(
            stage_index=number,
            num_stages=num_stages,
            group_size=num_ranks,
            group_rank=0,
            submod=None,
            is_first=number == 0,
            is_last=number == num_stages - 1,
        )
        for number in numbers
    ]


def torch_text(name: str, p: int, m: int, folder: Path, v: int = 2) -> str:
    """CSV that a schedule of torch writes of itself; it makes the rows of all ranks."""
    schedules = torch_schedules()
    numbers = [0, 2 * p - 1] if name in V_SHAPED else list(range(0, v * p, p))
    made = getattr(schedules, name)(torch_stages(numbers, p * len(numbers), p), m)
    made._dump_csv(str(folder / "torch.csv"), format="compute_only")
    return (folder / "torch.csv").read_text()


def loaded(text: str, program: Program, folder: Path) -> dict[int, list[Any]]:
    """Work of each rank, from torch's loader, which also adds messages and checks it."""
    file = folder / "braid.csv"
    file.write_text(text)
    num_stages = program.header.num_units
    stages = torch_stages([0], num_stages, program.num_ranks)
    runtime = torch_schedules()._PipelineScheduleRuntime(stages, program.header.num_indices)
    runtime._load_csv(str(file))
    assert runtime.stage_index_to_group_rank == stage_ranks(program)
    return runtime.pipeline_order


def flat(order: dict[int, list[Any]]) -> list[list[str]]:
    """Work as torch does it: overlapped work one after the other, no idle time."""
    return [
        [str(part) for action in order[rank] if action for part in action.sub_actions or [action]]
        for rank in sorted(order)
    ]


def written(program: Program) -> list[list[str]]:
    return [
        [f"{a.unit}{a.kind}{a.index}" for a in actions if a.kind in WORK]
        for actions in program.ranks
    ]


@pytest.mark.parametrize("name", [*LOOPED, *V_SHAPED])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8)])
def test_every_schedule_of_torch_is_read_and_comes_back_to_torch(
    name: str, p: int, m: int, tmp_path: Path
):
    text = torch_text(name, p, m, tmp_path)
    program = from_csv(text)
    assert validate(program, RULES) == []
    assert (program.num_ranks, program.header.num_indices) == (p, m)
    assert written(program) == flat(loaded(text, program, tmp_path))
    assert flat(loaded(to_csv(program), program, tmp_path)) == written(program)


def test_gpipe_which_torch_cannot_write_is_that_of_torch(tmp_path: Path):
    """The schedule has one stage per rank, and torch dumps schedules of several only."""
    schedules = torch_schedules()
    (stage,) = torch_stages([0], 4, 4)
    order = schedules.ScheduleGPipe(stage, 8)._get_pipeline_order()
    work = [[str(a) for a in order[r] if a and a.is_compute_op] for r in range(4)]
    assert from_csv("\n".join(map(",".join, work)), "gpipe") == SCHEDULES["gpipe"](4, 8)
    assert (
        flat(loaded(to_csv(SCHEDULES["gpipe"](4, 8)), SCHEDULES["gpipe"](4, 8), tmp_path)) == work
    )


def test_dualpipev_of_torch_has_half_its_bubble_as_outputs_leave_before_the_overlapped_work_ends(
    tmp_path: Path,
):
    """In torch both parts of overlapped work send at its end, which costs 12.5 %."""
    text = torch_text("ScheduleDualPipeV", 4, 8, tmp_path)
    assert "(0F7;7B3)OVERLAP_F_B,(7F4;0B0)OVERLAP_F_B" in text
    program = from_csv(text)
    assert overhead(program) == pytest.approx(0.0625)
    assert max(most_held(program)) == 9  # half stages: those of 4 + 1/2 micro-batches


@pytest.mark.parametrize("name", TRAINING)
def test_torch_loads_every_schedule(name: str, tmp_path: Path):
    for p, m in ((1, 2), (3, 6), (4, 3)):
        program = SCHEDULES[name](p, m)
        assert flat(loaded(to_csv(program), program, tmp_path)) == written(program)


@pytest.mark.parametrize("name", TRAINING)
@given(p=st.integers(1, 5), m=st.integers(1, 9))
def test_a_schedule_survives_its_csv(name: str, p: int, m: int):
    program = SCHEDULES[name](p, m)
    assert from_csv(to_csv(program), program.header.name) == program


@given(st.text("0123FBIW,;()\nOVERLAP_ \x00", max_size=40))
def test_any_text_is_refused_or_valid(text: str):
    try:
        program = from_csv(text)
    except ConfigError:
        return
    assert validate(program, RULES) == []


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (
            "",
            "row 1, column 1: a schedule must begin with work such as 0F0, but the file has no work",
        ),
        ("0F0,0B0\n1F0, 1X0", r"row 2, column 2, cell '1X0' must be stage, F, B, I or W"),
        ("0F0,0F0junk,0B0", "row 1, column 2, cell '0F0junk' must be"),
        ("0F0,(0F1;0Z0)OVERLAP_F_B", r"row 1, column 2, cell '\(0F1;0Z0\)OVERLAP_F_B' must be"),
        ("0F0,0SEND_F0", "row 1, column 2, cell '0SEND_F0' is a message or reduction"),
        ("0F0,0B0,0REDUCE_GRAD", "row 1, column 3, cell '0REDUCE_GRAD' is a message or reduction"),
        ("0F0,,0F0,0B0", "row 1, column 3, cell '0F0': F of stage 0 in micro-batch 0 a second"),
        ("0F0,0B0\n0F0,1F0,1B0", "row 2, column 1, cell '0F0': F .* is not on rank 0, which has"),
        ("0F0,0B0\n1F0,1I0", "row 2: ends without W1.0"),
        ("0F0,0B0\n2F0,2B0", "file: no rank does stage 1"),
        ("0F0,0F1,0B1\n1F0,1F1,1B0,1B1", "row 1: ends without B0.0"),
        ("0F0,0B0\n,1B0,1F0", "row 2, column 2, cell '1B0': B of stage 1 .* comes before F"),
        (
            "0F0,2F0,2B0,0B0\n1F0,1W0,1I0",
            "row 2, column 2, cell '1W0': W of stage 1 in micro-batch 0 comes before I",
        ),
        ("0F0,2B0,2F0,0B0\n1F0,1B0", "row 1, column 2, cell '2B0': .* comes before F of micro"),
        ("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0", "cell '0B0': under sequential semantics no rank can"),
        ("999999999F0", "file: a program may have at most 1048576 ranks x units"),
    ],
)
def test_mistakes_are_named_with_row_column_and_cell(text: str, place: str):
    with pytest.raises(ConfigError, match=place):
        from_csv(text)


def test_only_pipelines_that_train_have_csv():
    ring = "program collective x all_reduce units 1 indices 1\nrank 0\n"
    for program in (forward_only(2, 2), from_text(ring, VOCABULARIES)):
        with pytest.raises(ConfigError, match=r"only training pipelines can be written as torch"):
            to_csv(program)


def test_a_file_is_a_schedule_of_its_own_size_only(tmp_path: Path):
    file = tmp_path / "mine.csv"
    file.write_text(to_csv(v_half(2, 4)))
    schedule = schedule_named(str(file))
    assert schedule(2, 4) == v_half(2, 4)._replace(header=schedule(2, 4).header)
    with pytest.raises(
        ConfigError, match=r"mine.csv is for 2 ranks and 4 micro-batches, got 2 and"
    ):
        schedule(2, 3)


def test_mistakes_in_files_name_the_file(tmp_path: Path):
    (tmp_path / "bad.csv").write_text("0F0,x")
    (tmp_path / "infers").write_text("program pipeline x infer units 1 indices 1\nrank 0\n F0.0\n")
    with pytest.raises(ConfigError, match=r"bad.csv, row 1, column 2, cell 'x' must be"):
        read_program(str(tmp_path / "bad.csv"))
    with pytest.raises(ConfigError, match=r"nothing.csv cannot be read"):
        schedule_named("nothing.csv")
    with pytest.raises(ConfigError, match=r"infers does not train a pipeline, it is x infer"):
        schedule_named(str(tmp_path / "infers"))
    with pytest.raises(ConfigError, match=r"unknown schedule 'forward': choose one of gpipe"):
        schedule_named("forward")
