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
    f"One switch: each rank has a link with a latency of {A * 1e6:g} us and a rate of {BYTES_PER_S / 1e9:g} GB/s. The cluster has 4 racks of 8 hosts of 8 ranks. Inside a host, "
    "a rank sends 600 GB/s with a latency of 2 us. Between hosts of a rack, a host sends 50 GB/s with 5 us; between racks, a rack sends 100 GB/s with 10 us. The times are computed from the formulas by `braid schedule compare`; "
    "measure on your machines."
)
READ = 'Each row is an operation on one of two networks, and each column is a size l. A cell is `yes` if no other algorithm is faster for this size; otherwise the cell has the fastest algorithm, by its name in `algorithm="..."`.'
DRAWN = (
    "The picture shows the blocks of each rank before every round, and at the end. A block has the colours of the ranks whose data it "
    "contains; an arrow is a message of the round. `braid schedule show --svg FILE` draws other algorithms and numbers of ranks, and "
    "`braid schedule simulate` computes their time."
)
LETTERS = (
    "The table has the time of each operation. In a formula, a space between two factors is a multiplication. p is the number of ranks, here a power of two, and lg stands for lg p. "
    "l is the size in bytes of the input or output of a rank, whichever is larger. a is the time of a message in seconds, b the seconds per byte sent, and c the seconds per byte added. `braid.programs.cost.form` computes the "
    "time for other numbers of ranks. "
)


OWN = (  # algorithms of the engine: names, what they do, file
    (
        "all_reduce direct, two_phase",
        "through slots: each rank adds whole slots, or one slice of each slot",
        "all_reduce.py",
    ),
    ("all_reduce pulled", "slices read from private memory by the kernel", "all_reduce.py"),
    ("all_reduce registered", "in place, on tensors of `group.empty`", "all_reduce.py"),
    (
        "all_reduce hierarchical",
        "slices exchanged over the network while ranks add other slices",
        "hierarchical.py",
    ),
    (
        "broadcast, all_gather, all_to_all, gather, scatter staged",
        "through slots",
        "broadcast_gather.py",
    ),
    (
        "the same operations, pulled",
        "read from private memory by the kernel",
        "broadcast_gather.py",
    ),
    (
        "reduce_scatter, reduce, scan staged, pulled",
        "through slots, or read from private memory by the kernel, with sums",
        "reduce_scatter.py",
    ),
    (
        "broadcast, all_gather, reduce_scatter hierarchical",
        "one rank of every other host receives the data of a rank, and passes it to the ranks of its host",
        "relays.py",
    ),
    (
        "send, recv",
        "a queue in shared memory for each pair of ranks, which contains small messages",
        "send.py",
    ),
)


TWO_BUFFERS = " `4=0`: copy block 0 to block 4. Blocks 0 to 3 are the input of a rank, and blocks 4 to 7 its output. Round 0 has no messages."

GRID = " The ranks are a grid with the rows 0, 1 and 2, 3, and the columns 0, 2 and 1, 3."


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


RAN = (
    "`carried_out` runs an algorithm in one process, without messages. Here three ranks have three numbers each, and `carried_out` returns the numbers of "
    "each rank after the all-reduce. The algorithms in the example are functions of the file that the end of this page names:"
)
CHAIN = "(p-1)*a + (p-1)/p*l*b"
FOLDED = "If p is not a power of two, the remaining ranks send their buffer first and receive the result at the end: two more messages of l bytes."
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
        "If p is not a power of two, the remaining ranks send their block first, and receive all blocks at the end.",
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
        "r is the number of ranks in a row; a square torus has r = sqrt(p).",
    ),
    "hierarchical": Subject(
        "Hierarchical rings",
        "grid",
        {"all_reduce": "2*(r-1)*(a + l/r*b) + 2*(p/r-1)*(a + l/p*b) + (p-1)/p*l*c"},
        "r is the number of ranks of a host, which are one row. In the second term (columns), a is the network's latency, and b is the time per byte of a rank's share of the network.",
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
    """Return the page of an algorithm."""
    subject = SUBJECTS[name]
    module = importlib.import_module(f"braid.programs.schedule.collective.{subject.module}")
    idea = inspect.getdoc(module) or ""
    source = f"../../src/braid/programs/schedule/collective/{subject.module}.py"
    operation = next(iter(subject.formulas))
    lines = [
        f"# {subject.title}",
        "",
        *_question(subject),
        "",
        *_operations(name),
        "",
        *_idea(idea),
        "",
    ]
    lines += [f"## {operation} on {NUM_RANKS} ranks", "", *_rounds(name, operation), ""]
    lines += [DRAWN, "", f"![Blocks step by step]({name}.svg)", ""]
    lines += [
        "## Cost",
        "",
        LETTERS + subject.note,
        "",
        "| operation | seconds |",
        "|---|---|",
        *(f"| {op} | `{text.replace('*', ' ')}` |" for op, text in subject.formulas.items()),
        "",
        "## For which sizes it is the fastest",
        "",
        READ,
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


def _question(subject: Subject) -> list[str]:
    """Return the first lines of a page: its question, and the terms of the page."""
    return [
        (
            f"How does the algorithm *{subject.title}* carry out a collective, how long does it take, and for which sizes is it the fastest? "
            "A *rank* is one of the p processes of a group. A buffer of l bytes has p equal *blocks*, or one block if it is sent as a whole. Ranks send messages in "
            "*rounds*: a rank begins a round when its messages of the previous round are complete. lg p is the logarithm of p to base 2."
        )
    ]


def _operations(name: str) -> list[str]:
    """Return a line for each operation, from the docstring of its function."""
    makers = {op: make for (known, op), make in ALGORITHMS.items() if known == name}
    lines = {op: (inspect.getdoc(make) or "").split("\n")[0] for op, make in makers.items()}
    ideas = {op: line.removeprefix("Return the rounds of ") for op, line in lines.items()}
    return [f"* `{op}`: {idea[:1].upper()}{idea[1:]}" for op, idea in ideas.items()]


def _idea(doc: str) -> list[str]:
    """The docstring as Markdown: what is indented there, pictures and examples, is literal."""
    lines: list[str] = []
    literal = False
    for line in doc.split("\n"):
        if line.strip() and line.startswith("    ") != literal:
            literal = not literal
            if lines and not lines[-1]:
                lines.pop()
            if line.startswith("    >>>"):
                lines += ["", RAN]
            lines += ["", "```"] if literal else ["```", ""]
        lines.append(line[4:] if literal else line)
    return [*lines, "```"] if literal else lines


def _rounds(name: str, operation: str) -> list[str]:
    head, *rows = table(program(algorithm(name, operation, NUM_RANKS, row=2)))
    return [
        (
            "A row is a rank, and a column is a round. A cell lists the actions of the rank in this round. `3>1`: send block 3 to rank 1. `3<0`: receive a block from rank 0 into the "
            "local block 3. `+3<0`: receive a block from rank 0, and add it to the local block 3."
        )
        + (TWO_BUFFERS if operation == "all_to_all" else "")
        + (GRID if SUBJECTS[name].module == "grid" else ""),
        "",
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def _on_tensors(name: str) -> list[str]:
    comm = "../../src/braid/comm/algorithms"
    if name == "hierarchical":
        return [
            (
                "Groups over several hosts choose a variant of this algorithm automatically. The variant uses shared memory inside a host instead of "
                f"rows, and sends data in chunks, so that all phases overlap ([hierarchical.py]({comm}/hierarchical.py)). "
                "See [which algorithm when](chosen.md)."
            )
        ]
    calls = [
        f'`group.{operation}(..., algorithm="{name}")`'
        for operation in SUBJECTS[name].formulas
        if name in names_for(operation)
    ]
    return [
        (
            f"To use this algorithm, call {', '.join(calls)} ([programs.py]({comm}/programs.py)). No group chooses this algorithm automatically: "
            "groups choose algorithms that send data in chunks, so that phases overlap. See [which algorithm when](chosen.md)."
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
            "Which algorithm does a group of ranks (processes) use for a collective of a given size? When the job starts, a group measures its basic "
            "operations, such as copying. From these measurements it computes the fastest of its algorithms for each size. "
            "`print(group.engine.explain())` prints the table for your machines. The names in this table are:"
        ),
        "",
        "* *staged*: each rank copies its data into slots of shared memory, from which the other ranks of the host read; other hosts receive the data over the network;",
        "* *direct*: the same for an all-reduce, in which each rank adds up the slots of all ranks;",
        "* *two_phase*: an all-reduce in which each rank adds up a slice of all slots, and then reads the sums of the other slices;",
        "* *pulled*: other ranks read the private memory of a rank through the kernel of the operating system;",
        "* *registered*: the tensor itself is in shared memory;",
        "* *hierarchical*: hosts exchange slices over the network while their ranks add slices.",
        "",
        (
            "The first table is for four ranks on one host with two cores, the second for two such hosts with two ranks each and a network of "
            "10 Gbit/s. Both use built-in costs instead of measurements. The first line of a table has the time of a synchronisation: all ranks wait until "
            "all of them have reached the same point. `copy`, `add` and `pull` are the rates at which a rank copies memory, adds to it, and reads the private "
            "memory of another rank; `send` with a rate is the rate of a host on the network. `not permitted by the host` means that a rank cannot read the memory of other ranks. The other lines have the algorithms of each operation. `direct, from 128 KiB two_phase (there "
            "...)` means: *direct* below 128 KiB and *two_phase* from 128 KiB on; the times in brackets are predicted for 128 KiB."
        ),
        "",
        "Four ranks on one host:",
        "",
        "```",
        near.explain(),
        "```",
        "",
        "Two hosts with two ranks each:",
        "",
        "```",
        far.explain(),
        "```",
        "",
        "This table lists all algorithms of groups:",
        "",
        "| algorithm | what it does | file |",
        "|---|---|---|",
    ]
    for names, what, file in OWN:
        lines.append(f"| {names} | {what} | [{file}](../../src/braid/comm/algorithms/{file}) |")
    lines += [
        "",
        (
            "The time of each algorithm is a formula in `_FORMS` and `_SENT` of [selection.py](../../src/braid/comm/engines/selection.py). "
            'The argument `algorithm="..."` of a collective chooses an algorithm by name.'
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
        (
            "How does each algorithm for a collective work, and when is it the fastest? Each page shows the rounds of one algorithm, a picture, "
            "and its cost. [Collectives](../handbook/04-collectives.md) explains the operations. `python tests/pages.py` writes these pages from "
            "the algorithms in `braid.programs`."
        ),
        "",
    ]
    for name, subject in SUBJECTS.items():
        operations = ", ".join(op for known, op in ALGORITHMS if known == name)
        lines.append(f"* [{subject.title}]({name}.md): {operations}")
    lines += [
        "",
        "[Which algorithm when](chosen.md) has the algorithms that groups choose automatically.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
