"""State dicts of optimizers while engines name the parts that ranks have."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

from braid.errors import ConfigError
from braid.parallel.gradients.incomplete import PartOfModel, mark_part, unmark_part
from braid.parallel.gradients.state_parts import note_parts

CALLS = PartOfModel("clip", "scaler", part="shard 0 of 2")


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


def marked(part: str = "shard 0 of 2") -> nn.Module:
    model = nn.Linear(2, 2)
    mark_part(model.weight, CALLS._replace(part=part))
    note_parts(model)
    return model


def test_a_state_is_loaded_by_position_by_name_and_by_torchs_checkpoints():
    model = nn.Linear(2, 2)
    optimizer = stepped(model)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    optimizer.load_state_dict(state_dict=state)
    set_optimizer_state_dict(model, optimizer, copy.deepcopy(optimizer.state_dict()))


def test_a_part_takes_its_own_state_and_no_other():
    optimizer, other = stepped(marked()), stepped(marked("shard 1 of 2"))
    state = copy.deepcopy(optimizer.state_dict())
    assert state["braid_part"] == "shard 0 of 2"
    optimizer.load_state_dict(state)
    with pytest.raises(ConfigError, match="'shard 0 of 2' of a model, but this rank has the part"):
        other.load_state_dict(state)
    whole = torch.optim.Adam(nn.Linear(2, 2).parameters())
    whole.load_state_dict(state)  # such as a file of this rank, before the model is divided


@pytest.mark.filterwarnings("ignore:.*has only this rank's part")
def test_a_model_takes_the_state_of_its_part_and_what_all_ranks_have():
    model, other = marked(), marked("shard 1 of 2")
    state = model.state_dict()
    model.load_state_dict(state)
    with pytest.raises(ConfigError, match="has the part 'shard 0 of 2'"):
        other.load_state_dict(state)
    with pytest.raises(ConfigError, match="assign=True"):
        model.load_state_dict(copy.deepcopy(state), assign=True)
    average = copy.deepcopy(model)  # without the mark
    average.load_state_dict(state)
    for name in list(state):
        del state[name]
    other.load_state_dict(state, strict=False)
    unmark_part(model.weight)
    assert not [part for part in model.state_dict()._metadata.values() if "braid_part" in part]
