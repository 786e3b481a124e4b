"""Boxes of a state from any division of a model to any other one."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from braid.comm import Group
from braid.elasticity.parts import ModelPart, TensorBox
from braid.elasticity.redistribution import LostStateError, _moves, fill, newest_state
from braid.errors import ConfigError, MismatchError
from support.worlds import run_threads

SHAPE = (7, 5)
WHOLE = torch.arange(35.0).view(SHAPE)


def _by_rows(rank: int, size: int) -> tuple[torch.Size, list[TensorBox]]:
    rows = torch.arange(SHAPE[0]).tensor_split(size)[rank]
    first, count = (int(rows[0]), len(rows)) if len(rows) else (0, 0)
    box = TensorBox(SHAPE, (first, 0), (count, SHAPE[1]), (SHAPE[1], 1), 0)
    return torch.Size((count, SHAPE[1])), [box]


def _by_columns(rank: int, size: int) -> tuple[torch.Size, list[TensorBox]]:
    columns = torch.arange(SHAPE[1]).tensor_split(size)[rank]
    first, count = (int(columns[0]), len(columns)) if len(columns) else (0, 0)
    box = TensorBox(SHAPE, (0, first), (SHAPE[0], count), (count, 1), 0)
    return torch.Size((SHAPE[0], count)), [box]


def _by_elements(rank: int, size: int) -> tuple[torch.Size, list[TensorBox]]:
    """Pieces of the flat tensor: a box for each row."""
    elements = torch.arange(WHOLE.numel()).tensor_split(size)[rank].tolist()
    boxes = []
    for row, cells in itertools.groupby(elements, lambda i: i // SHAPE[1]):
        own = list(cells)
        offset = (row, own[0] % SHAPE[1])
        start = own[0] - elements[0]
        boxes.append(TensorBox(SHAPE, offset, (1, len(own)), (SHAPE[1], 1), start))
    return torch.Size((len(elements),)), boxes


def _whole(rank: int, size: int) -> tuple[torch.Size, list[TensorBox]]:
    return torch.Size(SHAPE), [TensorBox.all_of(WHOLE)]


DIVISIONS = {"rows": _by_rows, "columns": _by_columns, "elements": _by_elements, "whole": _whole}


def _part(division: str, rank: int, size: int, *, has_values: bool, name: str = "") -> ModelPart:
    shape, boxes = DIVISIONS[division](rank, size)
    param = nn.Parameter(torch.full(shape, -1.0))
    optimizer = torch.optim.Adam([param])
    buffer = torch.full((3,), -1.0)
    part = ModelPart(
        name or ("all" if division == "whole" else f"{division} {rank}"),
        {"w": param},
        {"w": boxes} if param.numel() else {},
        optimizer,
        lambda: {"mean": buffer},
    )
    if has_values:
        values = {"step": torch.tensor(4.0), "exp_avg": torch.empty(shape)}
        optimizer.state[param] = {**values, "exp_avg_sq": torch.empty(shape), "limit": (1, 2)}
        for entry in part.entries():
            if entry.is_alike or entry.name == "model/w":
                _fill_boxes(entry.tensor, boxes, entry.name)
        buffer.fill_(9.0)
    return part


def _fill_boxes(tensor: torch.Tensor, boxes: list[TensorBox], name: str) -> None:
    for box in boxes:
        rows, columns = (slice(o, o + n) for o, n in zip(box.offset, box.extent, strict=True))
        box.view(tensor, box.offset, box.extent).copy_(_value(name)[rows, columns])


def _value(name: str) -> torch.Tensor:
    return WHOLE + 100 * ["model/w", "optimizer/w/exp_avg", "optimizer/w/exp_avg_sq"].index(name)


@pytest.mark.parametrize(("num_before", "num_after"), [(1, 3), (3, 2), (3, 3)])
@pytest.mark.parametrize("after", DIVISIONS)
@pytest.mark.parametrize("before", DIVISIONS)
def test_each_element_comes_from_where_it_was(before, after, num_before, num_after):
    """Those that have gone have left a copy with the first rank."""

    def main(group: Group) -> None:
        held = [group.rank] if group.rank < num_before else []
        held += range(num_after, num_before) if not group.rank else []
        parts = [_part(before, rank, num_before, has_values=True) for rank in held]
        names = [
            _part(before, rank, num_before, has_values=False).name for rank in range(num_before)
        ]
        newest = newest_state(group, {5: parts} if parts else {}, {5: names} if parts else {})
        part = _part(after, group.rank, num_after, has_values=False)
        fill(group, newest, parts, part)
        for entry in part.entries():
            if entry.is_alike or entry.name == "model/w":
                expected = torch.full_like(entry.tensor, -1.0)
                _fill_boxes(expected, part.boxes["w"], entry.name)
                assert torch.equal(entry.tensor, expected), entry.name
        assert torch.equal(part.buffers()["mean"], torch.full((3,), 9.0))
        param = part.params["w"]
        if param.numel():
            state = part.optimizer.state[param]
            assert (state["step"].item(), state["limit"]) == (4.0, (1, 2))

    run_threads(num_after, main)


def test_states_of_a_transposed_parameter_keep_their_places():
    def main(group: Group) -> None:
        part, new = (_transposed_part(has_values) for has_values in (not group.rank, False))
        parts = [] if group.rank else [part]
        held = newest_state(group, {0: parts} if parts else {}, {0: ["all"]} if parts else {})
        fill(group, held, parts, new)
        for entry in new.entries():
            if entry.is_alike or entry.name == "model/w":
                assert torch.equal(entry.tensor, _value(entry.name)), entry.name

    run_threads(2, main)


def _transposed_part(has_values: bool) -> ModelPart:
    param = nn.Parameter(torch.zeros(SHAPE[::-1]).t())
    boxes = {"w": [TensorBox.all_of(param)]}
    part = ModelPart("all", {"w": param}, boxes, torch.optim.Adam([param]), dict)
    if has_values:
        states = {name: torch.zeros_like(param.detach()) for name in ("exp_avg", "exp_avg_sq")}
        part.optimizer.state[param] = states
        for entry in part.entries():
            entry.tensor.copy_(_value(entry.name))
    return part


def test_members_that_have_the_same_box_share_the_sending():
    def main(group: Group) -> list[int]:
        has_values = group.rank < 2
        parts = {0: [_part("whole", 0, 1, has_values=True)]} if has_values else {}
        newest = newest_state(group, parts, {0: ["all"]} if has_values else {})
        wanted = [("model/w", 35, [TensorBox.all_of(WHOLE)])]
        return [
            source.rank for rank in range(4) for _, _, source, _ in _moves(newest, wanted, rank)
        ]

    assert run_threads(4, main) == [[0, 1, 0, 1]] * 4


def test_the_newest_division_with_all_its_parts_counts():
    def main(group: Group) -> int:
        parts = {3: [_part("rows", group.rank, 2, has_values=True)]}
        names = {3: ["rows 0", "rows 1"]}
        if not group.rank:
            parts[4] = [_part("rows", 0, 3, has_values=True)]
            names[4] = ["rows 0", "rows 1", "rows 2"]
        return newest_state(group, parts, names).division

    assert run_threads(2, main) == [3, 3]


def test_a_part_that_nobody_has_is_named():
    def main(group: Group) -> str:
        parts = {3: [_part("rows", group.rank, 3, has_values=True)]}
        with pytest.raises(LostStateError) as caught:
            newest_state(group, parts, {3: ["rows 0", "rows 1", "rows 2"]})
        return str(caught.value)

    for text in run_threads(2, main):
        assert text.startswith("the state of rows 2 is lost, ")


@pytest.mark.parametrize(("boxes", "missing"), [([], 35), (_by_rows(0, 2)[1], 15)])
def test_elements_that_a_member_would_not_get_are_an_error_of_all(boxes, missing):
    def main(group: Group) -> str:
        old = _part("whole", 0, 1, has_values=True)
        newest = newest_state(group, {0: [old]}, {0: ["all"]})
        part = _part("whole", 0, 1, has_values=False)
        if group.rank:
            part = part._replace(boxes={"w": boxes} if boxes else {})
        with pytest.raises(LostStateError) as caught:
            fill(group, newest, [old], part)
        return str(caught.value)

    text = f"{missing} of 35 elements of model/w are lost: resume from a checkpoint"
    assert run_threads(2, main) == [text] * 2


def test_members_with_other_values_of_one_tensor_are_named():
    def main(group: Group) -> str:
        group.context.health.numbers = (0, 2)  # of the launcher
        part = _part("whole", group.rank, 2, has_values=True)
        if group.rank:
            part.optimizer.state[part.params["w"]]["exp_avg"][2, 3] += 1.0
        with pytest.raises(MismatchError) as caught:
            newest_state(group, {0: [part]}, {0: ["all"]})
        return str(caught.value)

    for text in run_threads(2, main):
        assert "rank 2 and rank 0 have different values of optimizer/w/exp_avg (part all)" in text


def test_states_whose_boxes_are_not_known_are_refused():
    part = _part("whole", 0, 1, has_values=False)
    part.optimizer.state[part.params["w"]] = {"old": [torch.ones(2)]}
    with pytest.raises(ConfigError, match="Adam keeps tensors in lists or dicts, such as w/old/0"):
        part.numbers()


def test_sums_of_rows_of_a_part_are_refused():
    part = _part("rows", 0, 2, has_values=True)
    part.optimizer.state[part.params["w"]]["row_var"] = torch.ones(4, 1)
    with pytest.raises(ConfigError, match=r"Adam keeps w/row_var of shape \(4, 1\) for a part"):
        part.numbers()
