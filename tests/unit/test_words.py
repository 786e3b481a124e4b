"""Names use the words of docs/glossary.md, classes have one each, docs begin with a noun or a verb."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
RETIRED = re.compile(
    r"(^|_)(settles?|settled|attends?|hears?|heard|obeys?|tells?|told|says?|said|found|came|"
    r"spoils?|spoiled|weighs?|weighed|bequeath|heir|lineage|owes?|muster|lobby|warden|knocks?|"
    r"guilty|testimony|abroad|near|far|mates?|twins|waking|lazily|patient|impatient|refrain|"
    r"has_left|gives?_up|given_up|held_back|help_others)(_|$)|"
    r"^_*(Standing|Crew|Seat|Seating|Muster\w*|Lobby|Volunteer|Switchboard|Beacons|Attendant|Homes?|"
    r"Hosting|Said|Told|Remarks|KnownParams|Surroundings|Reaction|WentBack|Claims)$"
)
MODULES = {
    *("moving", "reducing", "messaging", "applying", "scattering", "gathering", "joining"),
    *("calling", "probing"),
}
ALLOWED = {
    ("braid/train/gpt.py", "attend"): "a layer of attention, and a key of checkpoints",
    ("braid/parallel/data_parallel/wrapped_optimizer.py", "found_inf"): "torch's own attribute",
}
OTHER_SYSTEMS = {  # classes whose name may equal that of another class, and the system that has it
    ("braid/compat/horovod/fusion/request.py", "Request"): "Horovod's message.h",
    ("braid/compat/horovod/fusion/timeline.py", "Timeline"): "Horovod's timeline.h",
    ("braid/compat/horovod/torch/compression.py", "Compression"): "horovod.torch",
    ("braid/compat/horovod/torch/sync_batch_norm.py", "SyncBatchNorm"): "horovod.torch",
    (
        "braid/compat/megatron/distributed/distributed_data_parallel.py",
        "DistributedDataParallel",
    ): "Megatron",
    ("braid/compat/megatron/tensor_parallel/embedding.py", "VocabParallelEmbedding"): "Megatron",
    ("braid/compat/megatron/tensor_parallel/layers.py", "ColumnParallelLinear"): "Megatron",
    ("braid/compat/megatron/tensor_parallel/layers.py", "RowParallelLinear"): "Megatron",
    ("braid/compat/pslite/apps.py", "KVServer"): "PS-Lite",
    ("braid/compat/pslite/apps.py", "KVWorker"): "PS-Lite",
    ("braid/compat/pslite/apps.py", "SimpleApp"): "PS-Lite",
    ("braid/compat/pslite/environment.py", "Environment"): "PS-Lite",
    ("braid/compat/pslite/postoffice.py", "Postoffice"): "PS-Lite",
    ("braid/compat/torchgpipe/microbatch.py", "Batch"): "torchgpipe.microbatch",
}
PRONOUN = r"(What|Where|Of|Who|Whom|Whose|Which|How|It|They|Those|Nothing|Have)\b"


def _names(tree: ast.AST) -> Iterator[str]:
    """Functions, classes, arguments, attributes, slots, fields and variables of a file."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name) | ast.arg(arg=name):
                yield name
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Assign(targets=[ast.Name(id="__slots__")], value=value):
                yield from ast.literal_eval(value)


def _docs(tree: ast.AST) -> Iterator[str]:
    """Docstrings, entries of their Args and Attributes sections, and strings after fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
            text = ast.get_docstring(node) or ""
            yield text
            for section in re.findall(r"^(?:Args|Attributes):\n((?:    .*\n?|\n)+)", text, re.M):
                yield from re.findall(r"^    \*{0,2}\w+: (.*)", section, re.M)
        body = getattr(node, "body", None)
        if isinstance(body, list):
            for field, doc in pairwise(body):
                match field, doc:
                    case ast.AnnAssign() | ast.Assign(), ast.Expr(ast.Constant(str(text))):
                        yield text


def _texts() -> Iterator[tuple[str, str]]:
    """Paths and texts of the files of `src`."""
    for path in sorted(SOURCE.rglob("*.py")):
        yield path.relative_to(SOURCE).as_posix(), path.read_text()


def test_no_name_has_a_retired_word():
    retired = set()
    for file, text in _texts():
        words = set(re.findall(r"\w+", re.sub(r'"""[^"]*"""|#.*', "", text)))
        if any(map(RETIRED.search, words)):  # some are in strings, or of other libraries
            names = set(_names(ast.parse(text)))
            retired |= {(file, name) for name in names if RETIRED.search(name)}
        if (stem := Path(file).stem) in MODULES:
            retired.add((file, stem))
    assert sorted(retired) == sorted(ALLOWED)


def test_no_doc_begins_with_a_pronoun():
    wrong = [
        (file, doc)
        for file, text in _texts()
        if re.search(rf'("""|: ){PRONOUN}', text)
        for doc in _docs(ast.parse(text))
        if re.match(PRONOUN, doc)
    ]
    assert wrong == []


def test_class_names_are_unique():
    files: dict[str, list[str]] = {}
    for file, text in _texts():
        code = re.sub(r'""".*?"""', "", text, flags=re.S)
        for name in re.findall(r"^ *class (\w+)", code, re.M):
            if (file, name) not in OTHER_SYSTEMS:
                files.setdefault(name, []).append(file)
    assert {name: found for name, found in files.items() if len(found) > 1} == {}


def test_every_exception_is_needed():
    for file, name in OTHER_SYSTEMS:
        assert f"class {name}" in (SOURCE / file).read_text(), (file, name)
