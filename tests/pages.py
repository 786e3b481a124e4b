"""Writes the pages in docs/collectives: `python tests/pages.py`.

A page per algorithm with its rounds, a picture of its time, its cost and where it wins, all made from the program itself; a test holds the files to
what this writes, and the formulas to the closed forms.
"""

from __future__ import annotations

import importlib
import inspect
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from braid.comm.algorithms.programs import names_for
from braid.comm.engines.selection import DEFAULT_COSTS, DEFAULT_NETWORK_COSTS, Selection
from braid.comm.tensors.node_map import NodeMap
from braid.programs.cost import Comparison, compare
from braid.programs.schedule.blocks import blocks_svg
from braid.programs.schedule.collective import ALGORITHMS, algorithm, program
from braid.programs.schedule.plot import table
from braid.programs.topology import Cluster, Level, flat

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "collectives"
NUM_RANKS = 4  # in tables and pictures; more do not fit
A, BYTES_PER_S = 5e-6, 10e9
SIZES = {
    "1 KiB": 1 << 10,
    "64 KiB": 1 << 16,
    "1 MiB": 1 << 20,
    "16 MiB": 1 << 24,
    "256 MiB": 1 << 28,
}
CLUSTER = (
    Cluster(  # 8 GPUs of a host on NVLink, a 400 Gbit/s card per host, racks of 8 hosts, 4 : 1
        [
            Level(name="host", size=8, latency_s=2e-6, bytes_per_s=600e9),
            Level(name="rack", size=8, latency_s=5e-6, bytes_per_s=50e9),
            Level(name="spine", size=4, latency_s=10e-6, bytes_per_s=100e9),
        ]
    )
)

SWITCH = flat(64, A, BYTES_PER_S)
WHERE = (
    f"One switch: {A * 1e6:g} us and {BYTES_PER_S / 1e9:g} GB/s per rank. The cluster: hosts of 8 ranks with 600 GB/s each, 50 GB/s per "
    "host, racks of 8 hosts behind 100 GB/s (4 : 1). Computed by `braid schedule compare`; on a machine of your own, measure."
)
DRAWN = (
    "The blocks of each rank before every round, and at the end. A block has the colours of the ranks that it contains; an arrow is a message of "
    "the round. `braid schedule show --svg FILE` draws other programs and sizes, and `braid schedule simulate` their time."
)


CARRIED_OUT = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all")
OWN = (  # algorithms of the engine: names, what they do, file
    ("all_reduce direct, two_phase", "through slots, whole or by slices", "all_reduce.py"),
    ("all_reduce pulled", "slices read from private memory by the kernel", "all_reduce.py"),
    ("all_reduce registered", "in place, on tensors of `group.empty`", "all_reduce.py"),
    ("all_reduce hierarchical", "slices over hosts, pipelined", "hierarchical.py"),
    (
        "broadcast, all_gather, all_to_all, gather, scatter staged",
        "through slots",
        "broadcast_gather.py",
    ),
    ("the same, pulled", "read from private memory by the kernel", "broadcast_gather.py"),
    ("reduce_scatter, reduce, scan staged, pulled", "the same, with sums", "reduce_scatter.py"),
    ("broadcast, all_gather, reduce_scatter hierarchical", "by relays on every host", "relays.py"),
    (
        "send, recv",
        "a line of memory for each pair of ranks, with small messages inside of it",
        "send.py",
    ),
)


class Subject(NamedTuple):
    """A page.

    Attributes:
        title: Of the page.
        module: Of `braid.programs.schedule.collective`, which tells the idea.
        formulas: Time by operation, as Python reads it: a seconds per message, b per byte, c per byte added up, p ranks (a
            power of two), l bytes, lg = log2 p.
        note: What else is to be known.
    """

    title: str
    module: str
    formulas: dict[str, str]
    note: str = ""


CHAIN = "(p-1)*a + (p-1)/p*l*b"
FOLDED = "Ranks above the largest power of two hand over before and get the result after: two more messages of l bytes."
SUBJECTS = {
    "ring": Subject(
        "Ring",
        "ring",
        {
            "all_reduce": "2*(p-1)*a + 2*(p-1)/p*l*b + (p-1)/p*l*c",
            "reduce_scatter": "(p-1)*a + (p-1)/p*l*(b+c)",
            "all_gather": CHAIN,
        },
    ),
    "doubling": Subject(
        "Recursive doubling", "exchange", {"all_reduce": "lg*(a + l*b + l*c)"}, FOLDED
    ),
    "halving_doubling": Subject(
        "Halving-doubling",
        "exchange",
        {"all_reduce": "2*lg*a + 2*(p-1)/p*l*b + (p-1)/p*l*c"},
        FOLDED,
    ),
    "hypercube": Subject(
        "Hypercube",
        "exchange",
        {"all_gather": "lg*a + (p-1)/p*l*b"},
        "Ranks that are no corner of the cube hand over a block before, and get everything after.",
    ),
    "tree": Subject(
        "Binomial tree",
        "tree",
        {
            "broadcast": "lg*(a + l*b)",
            "reduce": "lg*(a + l*b + l*c)",
            "all_reduce": "2*lg*(a + l*b) + lg*l*c",
            "scatter": "lg*a + (p-1)/p*l*b",
            "gather": "lg*a + (p-1)/p*l*b",
        },
    ),
    "pairwise": Subject(
        "Pairwise exchange",
        "pairwise",
        {"all_to_all": CHAIN, "reduce_scatter": "(p-1)*a + (p-1)/p*l*(b+c)", "all_gather": CHAIN},
    ),
    "bruck": Subject(
        "Bruck",
        "bruck",
        {"all_gather": "lg*a + (p-1)/p*l*b", "all_to_all": "lg*a + lg/2*l*b"},
    ),
    "torus": Subject(
        "2-D torus",
        "grid",
        {"all_reduce": "2*(r-1)*(a + l/r*b) + 2*(p/r-1)*(a + l/p*b) + (p-1)/p*l*c"},
        "r is the length of a row; a square torus has r = sqrt(p).",
    ),
    "hierarchical": Subject(
        "Hierarchical rings",
        "grid",
        {"all_reduce": "2*(r-1)*(a + l/r*b) + 2*(p/r-1)*(a + l/p*b) + (p-1)/p*l*c"},
        "r is the number of ranks of a host. Between hosts a and b are those of the network, and the second b is that of a rank's share of it.",
    ),
    "naive": Subject(
        "One to all",
        "naive",
        {
            "broadcast": "(p-1)*(a + l*b)",
            "reduce": "(p-1)*(a + l*b + l*c)",
            "all_reduce": "2*(p-1)*(a + l*b) + (p-1)*l*c",
            "gather": CHAIN,
            "scatter": CHAIN,
            "all_gather": "2*(p-1)*a + (p-1)/p*l*b + (p-1)*l*b",
        },
    ),
}


def page(name: str) -> str:
    """Text of the page of an algorithm."""
    subject = SUBJECTS[name]
    module = importlib.import_module(f"braid.programs.schedule.collective.{subject.module}")
    idea = inspect.getdoc(module) or ""
    source = f"../../src/braid/programs/schedule/collective/{subject.module}.py"
    operation = next(iter(subject.formulas))
    lines = [f"# {subject.title}", "", *_operations(name), "", *_idea(idea), ""]
    lines += [f"## {operation} on {NUM_RANKS} ranks", "", *_rounds(name, operation), ""]
    lines += [f"![Blocks step by step]({name}.svg)", ""]
    lines += [
        DRAWN,
        "",
        "## Cost",
        "",
        "| operation | seconds |",
        "|---|---|",
        *(f"| {op} | `{text.replace('*', ' ')}` |" for op, text in subject.formulas.items()),
        "",
        "a: seconds per message, b: per byte sent, c: per byte added up; p ranks, here a power of two, l bytes of the largest full buffer, lg = log2 p; `braid.programs.cost.form` knows the others. "
        + subject.note,
        "",
        "## Where it wins",
        "",
        *_wins(name),
        "",
        "## On tensors",
        "",
        *_on_tensors(name),
        "",
        f"The file: [{subject.module}.py]({source}).",
    ]
    return "\n".join(lines).rstrip() + "\n"


def picture(name: str) -> str:
    """Rounds of an algorithm, as SVG."""
    return blocks_svg(
        program(algorithm(name, next(iter(SUBJECTS[name].formulas)), NUM_RANKS, row=2))
    )


def _operations(name: str) -> list[str]:
    """What the functions say of themselves."""
    makers = {op: make for (known, op), make in ALGORITHMS.items() if known == name}
    return [
        f"* `{op}`: {(inspect.getdoc(make) or '').split(chr(10))[0]}" for op, make in makers.items()
    ]


def _idea(doc: str) -> list[str]:
    """The docstring as Markdown: what is indented there, pictures and examples, is literal."""
    lines: list[str] = []
    literal = False
    for line in doc.split("\n"):
        if line.strip() and line.startswith("    ") != literal:
            literal = not literal
            if lines and not lines[-1]:
                lines.pop()
            lines += ["", "```"] if literal else ["```", ""]
        lines.append(line[4:] if literal else line)
    return [*lines, "```"] if literal else lines


def _rounds(name: str, operation: str) -> list[str]:
    head, *rows = table(program(algorithm(name, operation, NUM_RANKS, row=2)))
    return [
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        "`3>1`: block 3 to rank 1; `3<0`: block 3 from rank 0; `+`: added to what is there; `4=0`: block 0 copied to block 4; `2x>1`: two blocks to rank 1.",
    ]


def _on_tensors(name: str) -> list[str]:
    comm = "../../src/braid/comm/algorithms"
    if name == "hierarchical":
        return [
            (
                "Groups of several hosts choose their own form of this by themselves, with shared memory in place of the rows and chunks on "
                f"their way in all phases ([hierarchical.py]({comm}/hierarchical.py)); see [which algorithm when](chosen.md)."
            )
        ]
    calls = [
        f'`group.{operation}(..., algorithm="{name}")`'
        for operation in SUBJECTS[name].formulas
        if name in names_for(operation) and operation in CARRIED_OUT
    ]
    return [
        (
            f"On any group it is carried out by {', '.join(calls)} ([programs.py]({comm}/programs.py)). No group chooses it by itself: "
            "what they choose keeps chunks on their way, see [which algorithm when](chosen.md)."
        )
    ]


def chosen() -> str:
    """The page about what groups choose by themselves."""
    near = Selection(DEFAULT_COSTS, NUM_RANKS, may_pull=True)
    nodes = NodeMap.of([0, 0, 1, 1])
    far = Selection(DEFAULT_NETWORK_COSTS, NUM_RANKS, may_pull=False, nodes=nodes)
    lines = [
        "# Which algorithm when",
        "",
        (
            "A group measures its primitives when the job starts and computes from them which of its own algorithms is fastest for which size; "
            "`print(group.engine.explain())` shows the table of your machines. Ranks of a host share memory. *Staged*: "
            "each rank copies its data into slots of this memory, from which the others read. *Pulled*: peers read the private memory of a rank "
            "through the kernel. *Registered*: the tensor itself lies in shared memory. *Hierarchical*: hosts exchange slices over the network "
            "while their ranks add up. The first table is for one host of two cores and four ranks without measurement, the second for two such "
            "hosts with two ranks each over 10 Gbit/s:"
        ),
        "",
        "```",
        near.explain(),
        "```",
        "",
        "```",
        far.explain(),
        "```",
        "",
        "| algorithm | what it does | file |",
        "|---|---|---|",
    ]
    for names, what, file in OWN:
        lines.append(f"| {names} | {what} | [{file}](../../src/braid/comm/algorithms/{file}) |")
    lines += [
        "",
        (
            "The time of each algorithm is a formula in `_FORMS` and `_SENT` of [selection.py](../../src/braid/comm/engines/selection.py); "
            '`algorithm="..."` takes one by name.'
        ),
    ]
    return "\n".join(lines) + "\n"


def _wins(name: str) -> list[str]:
    operations = [operation for known, operation in ALGORITHMS if known == name]
    networks = {"one switch, 64 ranks": SWITCH, "the cluster, 256 ranks": CLUSTER}
    lines = [f"| fastest for | {' | '.join(SIZES)} |", f"|---|{'---|' * len(SIZES)}"]
    for operation in operations:
        for where, cluster in networks.items():
            found = _compared(operation, cluster)
            cells = [_winner(found, i, name) for i in range(len(SIZES))]
            lines.append(f"| {operation}, {where} | {' | '.join(cells)} |")
    return [*lines, "", WHERE]


@lru_cache
def _compared(operation: str, cluster: Cluster) -> Comparison:
    return compare(operation, cluster.num_ranks, list(SIZES.values()), cluster)


def _winner(found: Comparison, index: int, name: str) -> str:
    """`yes` if nothing is faster than `name`; else what is."""
    return "yes" if found.is_best(name, index) else found.best(index)


def main() -> None:
    """Write all pages and the list of them."""
    PAGES.mkdir(parents=True, exist_ok=True)
    for name in SUBJECTS:
        (PAGES / f"{name}.md").write_text(page(name), encoding="utf-8")
        (PAGES / f"{name}.svg").write_text(picture(name), encoding="utf-8")
    (PAGES / "README.md").write_text(contents(), encoding="utf-8")
    (PAGES / "chosen.md").write_text(chosen(), encoding="utf-8")


def contents() -> str:
    """The list of pages."""
    lines = [
        "# Collectives, page by page",
        "",
        "Written by `python tests/pages.py` from the programs themselves.",
        "",
    ]
    for name, subject in SUBJECTS.items():
        operations = ", ".join(op for known, op in ALGORITHMS if known == name)
        lines.append(f"* [{subject.title}]({name}.md): {operations}")
    lines += ["", "[Which algorithm when](chosen.md): what groups choose by themselves."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
