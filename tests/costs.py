"""What a run of the tests has cost, against what it may: the ten dearest tests, and groups of files beyond their budgets.

A budget is for `make test-all`, which runs all tests of a group; `make test` runs a part of them. Times are noisy, so a group
beyond its budget is a warning in the summary and fails nothing. A test's seconds are the time of its set-up, call and
tear-down on any worker; two workers have twice the seconds of the clock on the wall.
"""

from __future__ import annotations

from collections import defaultdict

import pytest

NUM_SHOWN = 10
# beginning of a test's path below tests/ -> seconds; the longest that fits counts
BUDGETS_S = {
    "frameworks/": 300,
    "gpu/test_gpu_train": 12,
    "gpu/": 45,
    "gpu/test_gpu_cores": 25,
    "gpu/test_gpu_elastic": 60,
    "gpu/test_gpu_launch": 25,
    "netns/": 140,
    "unit/": 150,
    "unit/test_schedule": 20,
    "world/test_autograd": 5,
    "world/test_averaging": 5,
    "world/test_bench": 40,
    "world/test_bench_ps": 12,
    "world/test_chaos_runs": 50,
    "world/test_checkpoint": 10,
    "world/test_checkpoint_habits": 25,
    "world/test_comm": 85,
    "world/test_context_parallel": 8,
    "world/test_coordinator": 10,
    "world/test_coordinator_faults": 80,
    "world/test_data_parallel": 30,
    "world/test_ddp": 35,
    "world/test_demo": 35,
    "world/test_averaging_optimizer": 10,
    "world/test_different_optimizers": 12,
    "world/test_dropped": 15,
    "world/test_elastic": 15,
    "world/test_elastic_mesh": 35,
    "world/test_elastic_suspects": 35,
    "world/test_elastic_faults": 35,
    "world/test_elastic_launchers": 70,
    "world/test_elastic_runs": 70,
    "world/test_train_elastic": 40,
    "world/test_engine_habits": 35,
    "world/test_engine_oracle": 100,
    "world/test_fork_server": 10,
    "world/test_fusion": 15,
    "world/test_horovod": 65,
    "world/test_horovod_elastic_runs": 90,
    "world/test_hostfile": 25,
    "world/test_hosts": 18,
    "world/test_launch": 225,
    "world/test_leave_horovod": 18,
    "world/test_megatron": 30,
    "world/test_membership": 100,
    "world/test_hybrid": 23,
    "world/test_insertion": 42,
    "world/test_message": 10,
    "world/test_observe": 32,
    "world/test_pages": 26,
    "world/test_parallelize": 22,
    "world/test_pipeline": 62,
    "world/test_placed_processes": 10,
    "world/test_plan_here": 40,
    "world/test_portable": 26,
    "world/test_proving": 15,
    "world/test_ps": 85,
    "world/test_pslite": 35,
    "world/test_resume": 15,
    "world/test_rl": 35,
    "world/test_rpc": 48,
    "world/test_same_batches": 15,
    "world/test_rpc_programs": 15,
    "world/test_probe": 8,
    "world/test_readme": 110,
    "world/test_rebuild": 10,
    "world/test_redistribute": 9,
    "world/test_sharding": 58,
    "world/test_store": 8,
    "world/test_strategies_workers": 14,
    "world/test_sync_batch_norm": 10,
    "world/test_tensor_parallel": 12,
    "world/test_torch_backend": 105,
    "world/test_torch_rpc": 35,
    "world/test_train": 80,
    "world/test_train_on_servers": 30,
    "world/test_unused_parameters": 7,
}
OTHERS_S = 5  # of each file that has no budget


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the dearest tests and the groups of files beyond their budgets."""
    seconds: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("@")[0]] += report.duration
    dearest = sorted(seconds.items(), key=lambda item: -item[1])[:NUM_SHOWN]
    if sum(s for _, s in dearest) < 1:
        return
    terminalreporter.section(
        f"{len(dearest)} dearest tests of {sum(seconds.values()):.0f} s in all"
    )
    for name, cost in dearest:
        terminalreporter.write_line(f"{cost:6.1f} s  {name}")
    groups: dict[str, float] = defaultdict(float)
    for name, cost in seconds.items():
        groups[_group(name)] += cost
    for group, cost in sorted(groups.items(), key=lambda item: -item[1]):
        if cost > (allowed := BUDGETS_S.get(group, OTHERS_S)):
            terminalreporter.write_line(
                f"tests/{group}* took {cost:.0f} s and may take {allowed} s", yellow=True
            )


def _group(name: str) -> str:
    """Return the entry of the budgets that the test's path begins with, or the path of its file."""
    path = name.partition("::")[0].partition("tests/")[2]
    known = [group for group in BUDGETS_S if path.startswith(group)]
    return max(known, key=len) if known else path
