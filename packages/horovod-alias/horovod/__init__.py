"""The name `horovod` for `braid.compat.horovod`; not Horovod itself, see README.md.

What is imported as `horovod.torch` *is* the module `braid.compat.horovod.torch`: a second copy
would have a state of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from braid import __version__

__all__ = ["__version__", "run"]

OWN, TARGET = "horovod.", "braid.compat.horovod."
FRONTS = frozenset({"_keras", "keras", "mxnet", "ray", "spark", "tensorflow"})


class _Alias(MetaPathFinder, Loader):
    """Finds `horovod.x` wherever there is a `braid.compat.horovod.x`."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - asked of every finder
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """The spec of a module of braid under its name here."""
        if not fullname.startswith(OWN):
            return None
        name = fullname.removeprefix(OWN)
        if name.partition(".")[0] in FRONTS:
            msg = f"there is no {fullname}: braid's front for Horovod's users is for PyTorch alone"
            raise ModuleNotFoundError(msg, name=fullname)
        try:
            found = find_spec(TARGET + name) if name != "run" else None
        except ModuleNotFoundError as error:  # of a package of braid that this one is not in
            msg = f"No module named {fullname!r}: braid's front for Horovod's users has no such one"
            raise ModuleNotFoundError(msg, name=fullname) from error
        return found and ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> None:
        """Return an empty module, which `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of braid in its place."""
        name = module.__name__
        sys.modules[name] = import_module(TARGET + name.removeprefix(OWN))


sys.meta_path.insert(0, _Alias())


def __getattr__(name: str) -> Any:
    if name == "run":
        return import_module("braid.compat.horovod").run
    msg = f"module 'horovod' has no attribute {name!r}"
    raise AttributeError(msg)
