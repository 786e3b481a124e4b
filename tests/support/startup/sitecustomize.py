"""Keeps torch's compiler out of programs that tests start and that do not compile.

Problem: the first optimizer of a process imports `torch._dynamo`, to exclude its methods from
compilation. That takes 1.5 s of a core, nearly half of a rank's start.

Idea: while the compiler is not imported, nothing is compiled, so nothing must be excluded. This
module changes two decorators of torch to that effect.

Python imports a module of this name when it starts; `conftest` puts its directory into PYTHONPATH,
but for `make proof`.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

# by module; compiled with the name of torch's file, so that no stack shows a line of the tests
CHANGES = {
    "torch._compile": """
def _change(original):
    import functools, sys

    def _disable_dynamo(fn=None, recursive=True):
        if fn is None:
            return functools.partial(_disable_dynamo, recursive=recursive)
        disabled = original(fn, recursive)

        @functools.wraps(fn)
        def inner(*args, **kwargs):
            return (disabled if "torch._dynamo" in sys.modules else fn)(*args, **kwargs)

        return inner

    return _disable_dynamo

_disable_dynamo = _change(_disable_dynamo)
""",
    "torch.optim.optimizer": """
def _change(original):
    import functools, sys

    def _use_grad_for_differentiable(func):
        breaking = original(func)

        @functools.wraps(func)
        def _use_grad(self, *args, **kwargs):
            if "torch._dynamo" in sys.modules:
                return breaking(self, *args, **kwargs)
            with torch.set_grad_enabled(self.defaults["differentiable"]):
                return func(self, *args, **kwargs)

        return _use_grad

    return _use_grad_for_differentiable

_use_grad_for_differentiable = _change(_use_grad_for_differentiable)
""",
}


class _Finder(MetaPathFinder):
    """Finds the modules of `CHANGES` as usual, and changes them when they have been imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module that is to be changed; None for any other module."""
        spec = PathFinder.find_spec(name, path, target) if name in CHANGES else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            exec(compile(CHANGES[name], str(module.__file__), "exec"), vars(module))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "PYTEST_CURRENT_TEST" in os.environ:  # a test has started this process, not pytest
    sys.meta_path.insert(0, _Finder())

# the next module of this name, which Python would have imported without this one
here = str(Path(__file__).parent)
if here in sys.path:
    sys.path.remove(here)
    this = sys.modules.pop("sitecustomize")
    with suppress(ModuleNotFoundError):
        import_module("sitecustomize")
    sys.modules.setdefault("sitecustomize", this)
