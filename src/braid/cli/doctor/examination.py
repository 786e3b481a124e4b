"""Runs all checks; a check that raises becomes a finding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from braid.cli.doctor import checks, gather
from braid.cli.doctor.checks import Finding, note
from braid.cli.doctor.probes import probe_permissions

__all__ = ["CHECKS", "Examination", "examine"]

Check: TypeAlias = Callable[[], "Finding | list[Finding]"]

# in the order of the report: basic facts first
CHECKS: Mapping[str, Check] = {
    "versions": lambda: checks.check_versions(gather.versions()),
    "system": lambda: checks.check_system(gather.system()),
    "engine": lambda: checks.check_engines(gather.engines()),
    "cores": lambda: checks.check_cores(gather.cores()),
    "threads": lambda: checks.check_threads(gather.threads()),
    "NUMA": lambda: checks.check_nodes(gather.nodes()),
    "memory": lambda: checks.check_memory(gather.memory()),
    "shared memory": lambda: checks.check_shared_memory(gather.shared_memory()),
    "permissions": lambda: checks.check_kernel_permissions(probe_permissions()),
    "limits": lambda: checks.check_limits(gather.limits()),
    "ports": lambda: checks.check_ports(gather.ports()),
    "names": lambda: checks.check_names(gather.names()),
    "time": lambda: checks.check_clock(gather.clocks()),
    "GPUs": lambda: checks.check_gpus(gather.accelerators()),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Examination:
    """Results of all checks of `braid doctor`.

    Attributes:
        findings: Findings in the order of the report.
    """

    findings: tuple[Finding, ...]

    @property
    def usable(self) -> bool:
        """Whether braid works on this machine: no finding is a problem."""
        return not any(finding.verdict == "problem" for finding in self.findings)

    def count(self, verdict: str) -> int:
        """Return the number of findings with this verdict."""
        return sum(finding.verdict == verdict for finding in self.findings)


def examine(selected: Mapping[str, Check] = CHECKS) -> Examination:
    """Run checks on this machine.

    Args:
        selected: Checks to run, by name.

    Cost: about the time of importing torch; two child processes run for about 50 ms.
    """
    findings: list[Finding] = []
    for name, check in selected.items():
        findings += _run(name, check)
    return Examination(findings=tuple(findings))


def _run(name: str, check: Check) -> Iterable[Finding]:
    try:
        result = check()
    except Exception as exc:  # noqa: BLE001 - a check that raises is a finding
        message = str(exc).split("\n")[0]
        text = f"could not be checked: {type(exc).__name__}: {message}".rstrip(": ")
        return [
            note(name, text, "please report this: braid.cli.doctor does not know such a machine")
        ]
    return [result] if isinstance(result, Finding) else result
