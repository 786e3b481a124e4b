"""The public surface is small, lazy and frozen here: changing it is a decision."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import braid
from braid import errors

ROOT_NAMES = [
    "BraidError",
    "CheckpointError",
    "CommError",
    "CommTimeout",
    "ConfigError",
    "DataParallel",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "Group",
    "InternalError",
    "MismatchError",
    "ParameterServer",
    "PeerLostError",
    "Pipeline",
    "Plan",
    "Program",
    "RendezvousError",
    "Request",
    "StaleError",
    "SyncBatchNorm",
    "Work",
    "__version__",
    "capture",
    "device",
    "elastic",
    "elastic_mesh",
    "find_plan",
    "fit",
    "init",
    "load",
    "log",
    "mesh",
    "parallelize",
    "save",
    "shutdown",
    "simulate",
    "spawn",
    "world",
]


def test_root_names_are_these():
    assert sorted(braid.__all__) == sorted(ROOT_NAMES)
    assert len(ROOT_NAMES) <= 40


def test_every_root_name_can_be_used():
    assert all(getattr(braid, name) is not None for name in ROOT_NAMES)
    assert dir(braid) == sorted(ROOT_NAMES)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Grup'"):
        braid.Grup  # noqa: B018


def test_importing_braid_imports_neither_torch_nor_any_package():
    code = "import braid, sys; print([m for m in sys.modules if m.startswith(('torch', 'braid.'))])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "['braid._version']"


def test_no_root_name_imports_the_compiler_of_torch():
    code = "import braid, sys; [getattr(braid, name) for name in braid.__all__]; print('torch._dynamo' in sys.modules)"
    environ = dict(os.environ)
    environ.pop("PYTEST_CURRENT_TEST", None)  # else tests/support/startup keeps the compiler out
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ
    )
    assert done.stdout.strip() == "False"


def test_the_error_tree_is_what_its_docstring_draws():
    tree = {
        name: tuple(base.__name__ for base in getattr(errors, name).__bases__)
        for name in errors.__all__
        if isinstance(getattr(errors, name), type)
    }
    assert tree == {
        "BraidError": ("Exception",),
        "CheckpointError": ("BraidError", "RuntimeError"),
        "CommError": ("BraidError", "RuntimeError"),
        "CommTimeout": ("CommError", "TimeoutError"),
        "ConfigError": ("BraidError", "ValueError", "RuntimeError"),
        "InternalError": ("BraidError", "RuntimeError"),
        "MismatchError": ("CommError",),
        "PeerLostError": ("CommError",),
        "RendezvousError": ("BraidError", "RuntimeError"),
        "StaleError": ("BraidError", "RuntimeError"),
    }


def test_torch_finds_an_entry_point_that_does_nothing_harmful():
    import importlib.metadata

    points = importlib.metadata.entry_points(group="torch.backends", name="braid")
    assert [point.load()() for point in points] == [None]
