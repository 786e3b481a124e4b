"""Programs and frameworks find on the wrapper what they read from torch's class, or learn what to use instead."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_ddp_copies import expected, grads, loss_of, net, same, step
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch_jobs import run
from training import said_by

from braid.comm import Group
from braid.errors import ConfigError
from braid.parallel.data_parallel import DistributedDataParallel
from support.pool import ProcessPool


def _read(group: Group) -> None:
    module = net()
    module.logger = "the module's own"
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["0.bias"])
    model = DistributedDataParallel(module, process_group=group, bucket_cap_mb=3)
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    assert not isinstance(module, nn.parallel.DistributedDataParallel)
    assert get_model_state_dict(model).keys() == module.state_dict().keys()
    assert model.bucket_bytes_cap == 3 << 20
    assert model.parameters_to_ignore == {"0.bias"}
    assert model.process_group is group
    assert model.device_mesh is None
    assert model.broadcast_buffers
    assert (model.device, model.device_type) == (torch.device("cpu"), "cpu")
    assert model.logger == "the module's own"
    averaged = dict(model._get_data_parallel_params(model, named_params=True))
    assert list(averaged) == ["0.weight", "1.weight", "1.bias", "2.weight", "2.bias"]
    logged = model._get_ddp_logging_data()
    assert not logged.get("can_set_static_graph")
    assert logged["bucket_cap_bytes"] == 3 << 20
    # as Lightning and torch's pipelining do before backward
    model.require_forward_param_sync = False
    model.reducer._rebuild_buckets()
    model.reducer.prepare_for_backward([torch.ones(1)])
    model.reducer._delay_all_reduce()


def test_what_frameworks_read_is_there(world):
    world(2, _read)


def _missing(group: Group) -> list[str]:
    model = DistributedDataParallel(net(), process_group=group)
    assert not hasattr(model, "ddp_uneven_inputs_config")
    return [
        said_by(lambda n=name: getattr(model, n), AttributeError)
        for name in ("ddp_uneven_inputs_config", "_register_builtin_comm_hook", "nothing")
    ] + [said_by(lambda: model.reducer.next_bucket, AttributeError)]


def test_names_without_a_meaning_say_what_to_use(world):
    config, hook, nothing, reducer = world(1, _missing)[0]
    assert "has no 'ddp_uneven_inputs_config', which torch's has: use join()" in config
    assert 'use hook="fp16" or register_comm_hook(state, hook)' in hook
    assert "'Sequential' object has no attribute 'nothing'" in nothing
    assert "has no 'next_bucket': use model.bucket_times()" in reducer


def _silenced(group: Group) -> bool:
    model = DistributedDataParallel(net(), process_group=group)
    assert model.require_backward_grad_sync
    model.require_backward_grad_sync = False
    loss_of(model, group.rank, 0).backward()
    alone = net()
    loss_of(alone, group.rank, 0).backward()
    assert same([grads(model)], [grads(alone)])
    with model.no_sync():
        assert not model.require_backward_grad_sync
    model.require_backward_grad_sync = True
    return same([step(model, group.rank, 1)], expected(group.size, [1]))


@pytest.mark.parametrize("size", [2, 3])
def test_averaging_is_silenced_by_the_attribute_of_torch(world, size):
    assert world(size, _silenced) == [True] * size


def _static(group: Group) -> str:
    model = DistributedDataParallel(net(), process_group=group)
    model._set_static_graph()
    assert model.static_graph
    assert model._get_ddp_logging_data()["static_graph"]
    found = [step(model, group.rank, number) for number in range(2)]
    assert same(found, expected(group.size, [0, 1]))
    return said_by(model._set_static_graph, ConfigError)


@pytest.mark.parametrize("size", [2, 3])
def test_a_static_graph_is_set_until_gradients_have_been_averaged(world, size):
    for text in world(size, _static):
        assert (
            "static_graph was set after gradients had been averaged 2 times: pass static_graph=True"
            in text
        )


def _mesh() -> bool:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    model = DistributedDataParallel(net(), device_mesh=mesh)
    assert model.device_mesh is mesh
    assert model.process_group is mesh.get_group()
    assert dist.get_world_size(model.process_group) == dist.get_world_size()
    return same([step(model, dist.get_rank(), 0)], expected(dist.get_world_size(), [0]))


def test_a_wrapper_over_a_mesh_shows_the_mesh_and_its_group(pool: ProcessPool, tmp_path: Path):
    assert run(pool, tmp_path, 2, _mesh) == [True] * 2
