"""Peers name functions of the program's own modules, and nothing else is imported for them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from braid.rpc.names import Names
from braid.rpc.outcomes import RpcError

MODULE = "def own(x):\n    return x + 1\n\n\nclass Failed(Exception):\n    pass\n"
ENVIRONMENTS = (
    ".venv/lib/python3.11/site-packages",
    "env/lib/python3.11/dist-packages",
    ".pyenv/versions/3.11.7/lib/python3.11",
    "miniconda3/lib/python3.12/site-packages",
    "deps",  # pip install --target
)


def _written(directory: Path, name: str, text: str = MODULE) -> None:
    path = directory.joinpath(*name.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    for package in path.relative_to(directory).parents[:-1]:
        (directory / package / "__init__.py").touch()
    path.write_text(text)


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Return names as in a program `home/train.py`, whose directory is where imports begin."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.syspath_prepend(str(home))
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(home / "train.py"), raising=False)
    before = set(sys.modules)
    yield home
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_modules_of_the_program_are_imported_and_called(program):
    _written(program, "flat_own")
    _written(program, "pack_own.inner.deep")
    names = Names()
    assert names.find("flat_own:own")(1) == names.find("pack_own.inner.deep:own")(1) == 2
    assert names.exception_of("flat_own:Failed").__name__ == "Failed"
    assert names.name_of(names.find("pack_own.inner.deep:own")) == "pack_own.inner.deep:own"


def test_a_program_inside_of_its_package_calls_its_package(program, monkeypatch):
    _written(program, "pack_in.train")
    _written(program, "pack_in.model")
    _written(program, "beside_it")
    file = program / "pack_in" / "train.py"
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(file))
    names = Names()
    assert names.find("pack_in.model:own")(1) == 2
    with pytest.raises(RpcError, match="this node does not let other nodes use 'beside_it:own'"):
        names.find("beside_it:own")


@pytest.mark.parametrize("place", ENVIRONMENTS)
@pytest.mark.parametrize("imported", [False, True])
def test_environments_below_the_program_are_not_of_it(program, monkeypatch, place, imported):
    monkeypatch.syspath_prepend(str(program / place))
    _written(program / place, "brought_in", "LOG = []\ndef own(x):\n    return x\n")
    if imported:
        __import__("brought_in")
    with pytest.raises(RpcError, match="this node does not let other nodes use"):
        Names().find("brought_in:own")
    assert ("brought_in" in sys.modules) is imported


@pytest.mark.parametrize(
    "name",
    [
        "subprocess:getoutput",
        "os:system",
        "posix:system",
        "this.x:y",
        "antigravity:webbrowser.open",
        "antigravity.x:y",
        "distutils.spawn:spawn",
        "braid.rpc.names:register",
        "numpy.testing:run_module_suite",
        "..flat:own",
        "flat..own:own",
        ".:own",
        "a/b:own",
        "builtins:eval",
        "sys:exit",
    ],
)
def test_nothing_else_is_imported_or_called(program, monkeypatch, name):
    for module in ("this", "antigravity", "numpy.testing"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    before = set(sys.modules)
    with pytest.raises(RpcError, match="this node does not let other nodes use"):
        Names().find(name)
    assert set(sys.modules) == before


def test_the_standard_library_is_refused_though_the_program_lies_in_it(monkeypatch):
    import subprocess

    monkeypatch.setattr(sys.modules["__main__"], "__file__", subprocess.__file__, raising=False)
    with pytest.raises(RpcError, match="this node does not let other nodes use"):
        Names().find("subprocess:getoutput")


def test_a_file_of_the_program_behind_another_package_is_not_imported(program, monkeypatch):
    """What would be imported counts, not what lies there: the first directory of the path wins."""
    _written(program, "twice_own.inner")
    other = program.parent / "other"
    _written(other, "twice_own.outer")
    monkeypatch.syspath_prepend(str(other))
    with pytest.raises(RpcError, match="this node does not let other nodes use"):
        Names().find("twice_own.inner:own")
    assert "twice_own" not in sys.modules
