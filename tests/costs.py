"""What a run of the tests has cost, against what it may: the ten dearest tests, and rooms beyond their budgets.

Times are noisy, so a room beyond its budget is a warning in the summary and fails nothing. A test's seconds are those of
its set-up, call and tear-down, on whichever worker; two workers have twice the seconds of the clock on the wall.
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
    "gpu/test_gpu_launch": 25,
    "netns/": 85,
    "unit/": 45,
    "unit/test_schedule": 15,
    "world/test_autograd": 5,
    "world/test_averaging": 5,
    "world/test_bench": 18,
    "world/test_bench_ps": 6,
    "world/test_checkpoint": 10,
    "world/test_comm": 55,
    "world/test_context_parallel": 8,
    "world/test_data_parallel": 30,
    "world/test_ddp": 35,
    "world/test_demo": 24,
    "world/test_distributed_optimizer": 10,
    "world/test_dropped": 20,
    "world/test_engine_oracle": 100,
    "world/test_fusion": 15,
    "world/test_horovod": 40,
    "world/test_hosts": 15,
    "world/test_launch": 95,
    "world/test_leave_horovod": 10,
    "world/test_megatron": 15,
    "world/test_membership": 50,
    "world/test_hybrid": 10,
    "world/test_insertion": 20,
    "world/test_message": 10,
    "world/test_observe": 15,
    "world/test_pages": 18,
    "world/test_parallelize": 18,
    "world/test_pipeline": 24,
    "world/test_plan_here": 16,
    "world/test_portable": 20,
    "world/test_proving": 15,
    "world/test_ps": 20,
    "world/test_pslite": 14,
    "world/test_rl": 15,
    "world/test_rpc": 45,
    "world/test_rpc_programs": 16,
    "world/test_readme": 48,
    "world/test_rebuild": 10,
    "world/test_redistribute": 8,
    "world/test_sharding": 25,
    "world/test_store": 5,
    "world/test_sync_batch_norm": 10,
    "world/test_tensor_parallel": 10,
    "world/test_torch_backend": 50,
    "world/test_torch_rpc": 15,
    "world/test_train": 40,
    "world/test_train_on_servers": 10,
}
OTHERS_S = 5  # of each file that has no budget


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the dearest tests and the rooms beyond their budgets."""
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
    rooms: dict[str, float] = defaultdict(float)
    for name, cost in seconds.items():
        rooms[_room(name)] += cost
    for room, cost in sorted(rooms.items(), key=lambda item: -item[1]):
        if cost > (allowed := BUDGETS_S.get(room, OTHERS_S)):
            terminalreporter.write_line(
                f"tests/{room}* took {cost:.0f} s and may take {allowed} s", yellow=True
            )


def _room(name: str) -> str:
    """Return the entry of the budgets that the test's path begins with, or the path of its file."""
    path = name.partition("::")[0].partition("tests/")[2]
    known = [room for room in BUDGETS_S if path.startswith(room)]
    return max(known, key=len) if known else path
