"""Several devices in a rank's process: replicas of a compiled module are refused, on every rank, before the module is touched."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from braid.comm import Group
from braid.errors import ConfigError
from braid.parallel.data_parallel import DistributedDataParallel


def _several_devices(group: Group) -> tuple[str, list[str]]:
    net = nn.Sequential(nn.Linear(3, 2))
    compiled = torch.compile(net, backend="eager")
    try:
        DistributedDataParallel(compiled, device_ids=["cpu", "cpu"], process_group=group)
    except ConfigError as exc:
        return str(exc), list(net._modules)
    return "", []


@pytest.mark.procs
def test_several_devices_refuse_a_compiled_module(procs):
    for told, names in procs(2, _several_devices):
        assert (
            "compiled it for this one Sequential, so its copies cannot run: pass the original module"
            in told
        )
        assert names == ["0"]
