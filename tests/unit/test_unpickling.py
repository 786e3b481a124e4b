"""Every place that could unpickle, with who can reach it and by which switch: SECURITY.md stands on it.

A pickle runs what its writer wants. So nothing that came over a wire or lies in a file is unpickled,
unless a switch says so. A new place fails here until it is in the list; a place that is gone, too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import braid

SOURCE = Path(braid.__file__).parent
PICKLERS = {
    "_pickle", "cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "multiprocessing", "pickle",
    "shelve", "torch.multiprocessing",
}  # fmt: skip
# functions that unpickle, whatever module they are taken from
METHODS = {
    "all_gather_object", "broadcast_object_list", "dcp_to_torch_save", "gather_object",
    "read_pickle", "recv_object_list", "scatter_object_list", "FileSystemReader", "Unpickler",
    "ProcessPoolExecutor",
}  # fmt: skip

WORDS = re.compile("|".join([*PICKLERS, *METHODS, "torch.load", "allow_pickle"]))
HOROVOD = "this user, who called horovod.run: files that are of this user and have mode 0600"
RAY = "this user and the ranks of the call braid.launch.ray.run: Ray, and a directory of this user only"
BENCH = "a bench and its own children"
COUNTS = "counts references to memory"
WRITES = "writes only"

PLACES = {
    "checkpoint/torch_distributed.py _read_metadata.Restricted: pickle.Unpickler": "who writes the file; read_model(format='dcp'), and it finds classes without code only",
    "checkpoint/torch_distributed.py _refused: pickle.UnpicklingError": "the refusal",
    "comm/autograd/layer_costs.py LiveTensors.__init__: torch.multiprocessing.reductions.StorageWeakRef": COUNTS,
    "comm/autograd/layer_costs.py LiveTensors.register: torch.multiprocessing.reductions.StorageWeakRef": COUNTS,
    "comm/tensors/plain_data.py _pickled: pickle.dumps": WRITES,
    "comm/tensors/plain_data.py decode: pickle.loads": "ranks of the job; allow_pickle=True of an object collective on this rank, for Horovod's front BRAID_HOROVOD_ALLOW_PICKLE=1",
    "compat/horovod/launcher/function_rank.py _packed: pickle.dumps": WRITES,
    "compat/horovod/launcher/function_rank.py _raised: pickle.dumps": WRITES,
    "compat/horovod/launcher/function_rank.py loads: pickle.loads": HOROVOD,
    "compat/horovod/launcher/run_function.py _packed: pickle.dumps": WRITES,
    "launch/engines/ray_call.py _write: pickle.dumps": WRITES,
    "launch/engines/ray_call.py _write: ray.cloudpickle.dumps": WRITES,
    "launch/engines/ray_call.py main: pickle.loads": RAY,
    "launch/engines/ray_call.py read_result: pickle.loads": RAY,
    "launch/ray.py run: ray.cloudpickle.dumps": WRITES,
    "rpc/codec.py _Pickler: pickle.Pickler": WRITES,
    "rpc/codec.py _Unpickler: pickle.Unpickler": "nodes of the job; RpcOptions(allow_pickle=True) of this node",
    "runtime/transport/arena.py OwnExtent.__init__: torch.multiprocessing.reductions.StorageWeakRef": COUNTS,
}


def _calls(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (function, expression) of everything that could unpickle."""
    names = {local: full for node in ast.walk(tree) for local, full in _imported(node)}

    def walk(node: ast.AST, where: tuple[str, ...]) -> Iterator[tuple[str, str]]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            where = (*where, node.name)
        if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load):
            head, _, rest = ast.unparse(node).partition(".")
            full = ".".join(filter(None, (names.get(head, head), rest)))
            if _is_of_picklers(full) or full.rpartition(".")[2] in METHODS:
                yield ".".join(where), full
                return
        if isinstance(node, ast.Call) and (loader := _loader(node)):
            yield ".".join(where), loader
        for child in ast.iter_child_nodes(node):
            yield from walk(child, where)

    yield from walk(tree, ())


def _imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the local and the full name of what a statement imports."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.asname or alias.name.partition(".")[0], alias.name
    elif isinstance(node, ast.ImportFrom) and node.module:
        for alias in node.names:
            yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _loader(call: ast.Call) -> str:
    """Return the name of a function that unpickles by its arguments; empty for others."""
    function, words = ast.unparse(call.func), {word.arg: word.value for word in call.keywords}
    if function == "torch.load" and not _is(words.get("weights_only"), True):
        return function
    return "numpy.load" if "allow_pickle" in words and function in {"np.load", "numpy.load"} else ""


def _is_of_picklers(full: str) -> bool:
    return any(f".{full}".find(f".{name}.") >= 0 for name in PICKLERS)


def _is(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def places() -> set[str]:
    """Return all places of the library."""
    return {
        f"{path.relative_to(SOURCE).as_posix()} {function}: {expression}"
        for path in SOURCE.rglob("*.py")
        if WORDS.search(text := path.read_text())
        for function, expression in _calls(ast.parse(text))
    }


def test_every_place_that_could_unpickle_is_known():
    assert places() == PLACES.keys()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import pickle\npickle.loads(x)", {("", "pickle.loads")}),
        ("import pickle as p\ndef f(): p.load(x)", {("f", "pickle.load")}),
        ("from pickle import loads as read\nread(x)", {("", "pickle.loads")}),
        ("from ray import cloudpickle\ncloudpickle.loads(x)", {("", "ray.cloudpickle.loads")}),
        ("import marshal\nmarshal.loads(x)", {("", "marshal.loads")}),
        ("import torch\ntorch.load(x)", {("", "torch.load")}),
        ("torch.load(x, weights_only=False)", {("", "torch.load")}),
        ("torch.load(x, weights_only=True)", set()),
        ("np.load(x, allow_pickle=True)", {("", "numpy.load")}),
        ("dist.broadcast_object_list([x])", {("", "dist.broadcast_object_list")}),
        ("import multiprocessing\nmultiprocessing.Pipe()", {("", "multiprocessing.Pipe")}),
    ],
)
def test_a_new_place_is_found(text, found):
    assert set(_calls(ast.parse(text))) == found
