"""Claims of braid.cli.doctor: every verdict from made-up facts, one line of advice for each that is not ok."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from braid.cli import main
from braid.cli.doctor import Examination, Finding, checks, examine, gather, show
from braid.cli.doctor.examination import CHECKS
from braid.cli.doctor.facts import (
    Accelerators,
    Clocks,
    Cores,
    HostNames,
    MemoryFacts,
    NumaNodes,
    Permissions,
    Ports,
    ResourceLimits,
    SharedMemory,
    System,
    Threads,
    Versions,
)
from braid.runtime.transport import atomic

GIB = 1 << 30
VERSIONS = Versions("3.11.7", "2.13.0+cpu", "2.4.6")
SYSTEM = System("linux", "x86_64", "6.1.0-13-amd64", "2.36")
CORES = Cores(physical=4, logical=8, usable=8, quota=None, load=0.5)
MEMORY = MemoryFacts(64 * GIB, 32 * GIB, 0, 0)
PERMITTED = Permissions("", "", "", "", 1)
PORTS = Ports("", 32768, 60999, default_port_used=False)
NAMES = HostNames("here", ("10.0.0.7",), "", 0.001, ("127.0.0.1",), in_hosts=True)
LIMITS = ResourceLimits(4096, 1 << 20, None, 8 << 20)
GPU = Accelerators(("NVIDIA H200", "NVIDIA H200"), "12.8", "2.27.5", "570.1")


def listed(found: Finding | list[Finding]) -> list[Finding]:
    return [found] if isinstance(found, Finding) else found


@pytest.mark.parametrize(
    ("finding", "verdict", "word"),
    [
        (checks.check_versions(VERSIONS)[0], "ok", "3.11.7"),
        (checks.check_versions(VERSIONS._replace(python="3.9.18"))[0], "problem", "but braid needs 3.10 or newer"),
        (checks.check_versions(VERSIONS._replace(torch=""))[1], "problem", "not installed"),
        (checks.check_versions(VERSIONS._replace(torch="2.9.1"))[1], "problem", "but braid needs 2.10 or newer"),
        (checks.check_versions(VERSIONS._replace(torch_error="no libgomp"))[1], "problem", "no libgomp"),
        (checks.check_versions(VERSIONS._replace(torch="3.0.1"))[1], "note", "newer than "),
        (checks.check_versions(VERSIONS._replace(torch_lacks=("torch._C._a",)))[1], "problem", "lacks torch._C._a"),
        (checks.check_versions(VERSIONS._replace(numpy="1.24.0"))[2], "problem", "but braid needs 1.26 or newer"),
        (checks.check_system(SYSTEM), "ok", "glibc 2.36"),
        (checks.check_system(SYSTEM._replace(kernel="4.18.0-553.el8")), "note", "4.18.0"),
        (checks.check_system(SYSTEM._replace(machine="aarch64")), "note", "aarch64"),
        (checks.check_system(System("darwin", "arm64", "24.1.0", "")), "note", "darwin"),
        (checks.check_system(SYSTEM._replace(portable=True)), "note", "BRAID_PORTABLE=1"),
        (checks.check_system(SYSTEM._replace(has_shared_counters=False)), "note", "no C++ runtime"),
        (checks.check_system(SYSTEM._replace(portable=None)), "problem", "BRAID_PORTABLE is neither 0 nor 1"),
        (checks.check_cores(CORES), "ok", "4 physical, 8 logical, 8 usable"),
        (checks.check_cores(CORES._replace(quota=1.5)), "note", "quota 1.5"),
        (checks.check_cores(CORES._replace(quota=8.0)), "ok", "quota 8"),
        (checks.check_cores(CORES._replace(usable=1)), "note", "1 usable"),
        (checks.check_cores(CORES._replace(load=12.0)), "note", "load 12.0"),
        (checks.check_threads(Threads("", 4, 8)), "ok", "not set"),
        (checks.check_threads(Threads("4", 4, 8)), "ok", "OMP_NUM_THREADS=4"),
        (checks.check_threads(Threads("16", 16, 8)), "note", "OMP_NUM_THREADS=16"),
        (checks.check_threads(Threads("many", 0, 8)), "note", "OMP_NUM_THREADS=many"),
        (checks.check_nodes(NumaNodes(("0-7",))), "ok", "one node"),
        (checks.check_nodes(NumaNodes(("0-7", "8-15"))), "note", "node 1: 8-15"),
        (checks.check_memory(MEMORY), "ok", "no swap"),
        (checks.check_memory(MEMORY._replace(available=GIB)), "note", "1 GiB available"),
        (checks.check_memory(MEMORY._replace(limit=2 * GIB, used=GIB)), "note", "control group 1 GiB of 2 GiB"),
        (checks.check_memory(MEMORY._replace(limit=GIB, used=GIB)), "problem", "control group"),
        (checks.check_memory(MEMORY._replace(swap_total=4 * GIB, swap_free=GIB)), "ok", "swap 1 GiB free of 4 GiB"),
        (checks.check_shared_memory(SharedMemory(8 * GIB, 8 * GIB)), "ok", "8 GiB free"),
        (checks.check_shared_memory(SharedMemory(64 << 20, 60 << 20)), "note", "60 MiB free of 64 MiB"),
        (checks.check_shared_memory(SharedMemory(0, 0)), "note", "no /dev/shm"),
        (checks.check_limits(LIMITS), "ok", "open files 4096, processes without limit, locked memory 8 MiB"),
        (checks.check_limits(LIMITS._replace(files=256)), "note", "open files 256"),
        (checks.check_limits(LIMITS._replace(processes=100)), "note", "processes 100"),
        (checks.check_ports(PORTS), "ok", "29500 free"),
        (checks.check_ports(PORTS._replace(bind_error="Cannot assign")), "problem", "Cannot assign"),
        (checks.check_ports(PORTS._replace(default_port_used=True)), "note", "29500 in use"),
        (checks.check_ports(PORTS._replace(first=60000, last=60100)), "note", "60000 to 60100"),
        (checks.check_names(NAMES), "ok", "here is 10.0.0.7, in /etc/hosts"),
        (checks.check_names(NAMES._replace(error="unknown", addresses=())), "note", "here has no address (unknown)"),
        (checks.check_names(NAMES._replace(seconds=5.0)), "note", "after 5.0 s"),
        (checks.check_names(NAMES._replace(localhost=("10.0.0.7",))), "note", "localhost is 10.0.0.7"),
        (checks.check_clock(Clocks("tsc", 40.0)), "ok", "tsc, 40 ns"),
        (checks.check_clock(Clocks("hpet", 1400.0)), "note", "hpet, 1400 ns"),
        (checks.check_gpus(Accelerators((), "", "", "")), "ok", "none"),
        (checks.check_gpus(GPU), "ok", "2 x NVIDIA H200, CUDA 12.8, NCCL 2.27.5, driver 570.1"),
        (checks.check_gpus(Accelerators((), "", "", "570.1")), "note", "a CPU build"),
        (checks.check_gpus(GPU._replace(error="no device")), "note", "torch.cuda fails: no device"),
    ],
)  # fmt: skip
def test_each_verdict_has_its_facts_and_its_advice(finding, verdict, word):
    assert (finding.verdict, word in finding.fact) == (verdict, True)
    assert (finding.advice == "") == (verdict == "ok")
    assert "\n" not in finding.fact + finding.advice


def test_what_the_kernel_permits_is_all_right():
    found = checks.check_kernel_permissions(PERMITTED)
    assert [finding.verdict for finding in found] == ["ok"] * 3
    assert [finding.fact for finding in found[2:]] == [
        "ranks read each other's memory (Yama's ptrace_scope 1)",
    ]


@pytest.mark.parametrize(
    ("field", "check"),
    [
        ("memfd", "memfd_create"),
        ("pidfd", "pidfd_open"),
        ("read_child", "process_vm_readv"),
        ("read_sibling", "process_vm_readv"),
    ],
)
def test_what_the_kernel_refuses_is_noted_with_its_words(field, check):
    found = checks.check_kernel_permissions(
        PERMITTED._replace(**{field: "Operation not permitted"})
    )
    (odd,) = (finding for finding in found if finding.verdict != "ok")
    assert (odd.check, odd.verdict) == (check, "note")
    assert odd.fact.startswith("Operation not permitted")
    assert odd.advice


def test_a_check_that_fails_is_a_finding_and_the_others_go_on():
    def broken() -> Finding:
        raise OSError(5, "Input/output error")

    fine = Finding("b", "ok", "fine")
    found = examine({"a": broken, "b": lambda: fine, "c": lambda: [fine, fine]})
    assert [(f.check, f.verdict) for f in found.findings] == [("a", "note"), *[("b", "ok")] * 3]
    told = "could not be checked: OSError: [Errno 5] Input/output error"
    assert (found.findings[0].fact, found.usable) == (told, True)


@pytest.mark.parametrize(
    ("findings", "last"),
    [
        ([Finding("a", "ok", "x")], "braid: works here"),
        ([Finding("a", "note", "x", "y")], "braid: works here, 1 note"),
        (
            [Finding("a", "note", "x", "y"), Finding("a", "problem", "x", "y")],
            "braid: does not work here: 1 note, 1 problem",
        ),
    ],
)
@pytest.mark.parametrize("terminal", [False, True])
def test_the_last_line_says_whether_braid_works_here(findings, last, terminal):
    out = io.StringIO()
    show(
        Examination(findings=tuple(findings)),
        Console(file=out, force_terminal=terminal, no_color=True),
    )
    lines = out.getvalue().rstrip().split("\n")
    assert (lines[-1], len(lines)) == (last, 1 + sum(1 + bool(f.advice) for f in findings))


def test_markup_in_what_was_found_is_shown_as_it_is():
    out = io.StringIO()
    show(Examination(findings=(Finding("a", "ok", "[bold] x" * 40),)), Console(file=out, width=60))
    assert out.getvalue().split("\n")[0] == f"ok      {'a':<16} {'[bold] x' * 40}"


def test_a_narrow_terminal_folds_what_does_not_fit_and_drops_nothing():
    out = io.StringIO()
    found = Finding("process_vm_readv", "ok", "0.1.0 in /a/very/long/path/without/any/blank")
    show(
        Examination(findings=(found,)),
        Console(file=out, force_terminal=True, no_color=True, width=40),
    )
    table = "".join(out.getvalue().split("\n")[:-2])
    assert "process_vm_readv" in table
    assert found.fact.replace(" ", "") in table.replace("process_vm_readv", "").replace(" ", "")


def test_a_portable_mode_that_is_neither_on_nor_off_is_a_problem(monkeypatch):
    monkeypatch.setenv("BRAID_PORTABLE", "maybe")
    assert checks.check_system(gather.system()).verdict == "problem"


def test_a_missing_runtime_is_told(monkeypatch):
    monkeypatch.setattr(atomic, "_FETCH_ADD", None)
    assert not gather.system().has_shared_counters


def test_this_machine_is_examined_whole(capsys):
    class Report(msgspec.Struct):
        usable: bool
        findings: list[dict[str, str]]

    code = main(["doctor", "--json"])
    report = msgspec.json.decode(capsys.readouterr().out, type=Report)
    assert code == (0 if report.usable else 1)
    assert len(report.findings) == len(CHECKS) + 2 + 2  # versions and permissions are three lines
    for finding in report.findings:
        assert finding["verdict"] in {"ok", "note", "problem"}
        assert not finding["fact"].startswith("could not be checked")
        assert (finding["advice"] == "") == (finding["verdict"] == "ok")
