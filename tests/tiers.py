"""Tiers of tests: `make test` runs all tests except those marked `all`, and `make test-all` runs these too.

`TIERS` assigns a tier to a test by its path. Without an entry, a test that starts launchers, or that conftest.py lists among
such tests, runs in `make test-all`, and any other test runs in `make test`.

A family of tests may be a product of many parameters (sizes x algorithms x modes). `make test` then runs a sample of the
product, and `make test-all` runs the rest: every pair of two parameters' values occurs in the sample with the tier `PAIRS`,
and every value with the tier `VALUES`. Most mistakes need one value or two values together (Kuhn, Wallace, Gallo: Software
fault interactions and implications for software testing, IEEE TSE 2004).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, Literal

import pytest

Tier = Literal["test", "values", "pairs", "all"]
TEST: Tier = "test"
VALUES: Tier = "values"
PAIRS: Tier = "pairs"
ALL: Tier = "all"
# beginning of a test's path below tests/ -> tier; the longest beginning that fits counts
TIERS: dict[str, Tier] = {
    "frameworks/": ALL,
    "gpu/": ALL,
    "netns/": ALL,
    # a few tests of each package that starts launchers
    "world/test_bench.py::test_benches_that_make_no_sense": TEST,
    "world/test_command_line.py::test_a_full_disk": TEST,
    "world/test_launch.py::test_torchruns_contract_is_kept": TEST,
    "world/test_probe.py": TEST,
    "world/test_probe.py::test_the_file_is_read": ALL,
    "world/test_rl.py::test_a_killed_actor": ALL,
    "world/test_rl.py::test_two_actors": VALUES,
    "world/test_train.py::test_ranks_compute_the_same_bits": TEST,
    # pages and examples
    "unit/test_docs_collectives.py::test_page_and_picture": ALL,
    "unit/test_handbook.py::test_a_picture_is": ALL,
    "world/test_pages_run.py": ALL,
    # whole products of parameters, and the longest proofs
    "unit/test_comm_formats_feedback.py::test_sgd_that": ALL,
    "unit/test_commands_plan.py::test_the_fastest_split": ALL,
    "unit/test_cost.py::test_a_tree_is_best": ALL,
    "unit/test_cost.py::test_rounds_give_what_the_simulator_gives_on_three": VALUES,
    "unit/test_plan_described.py::test_the_device": ALL,
    "unit/test_plan_search.py::test_ten_thousand": ALL,
    "unit/test_ps_kv_simulation.py::test_each_push": VALUES,
    "unit/test_ps_simulation.py::test_a_run_whose_servers_die": VALUES,
    "unit/test_ps_simulation.py::test_each_accepted_push": VALUES,
    "unit/test_ps_simulation.py::test_each_accepted_push_of_a_worker": PAIRS,
    "unit/test_ps_simulation.py::test_each_accepted_push_of_a_worker_that_was_stopped_is_applied[bsp-wait": TEST,
    "unit/test_ps_simulation.py::test_hot_shards_move_to_servers_with_little_load[1": ALL,
    "unit/test_ps_storage_resharding.py::test_training": VALUES,
    "unit/test_schedule_pipelines.py::test_v_half_and_v_min": ALL,
    "unit/test_schedule_simulate.py::test_the_simulator_gives": VALUES,
    "world/test_sharding_moved_gradients.py::test_a_compiled": ALL,
    "world/test_comm_c10d.py::test_claim_holds_over_gloo": ALL,
    "world/test_comm_device_waits.py::test_claim_holds": ALL,
    "world/test_comm_explorer.py::test_collectives_that_follow_each_other_do_not_race[3": ALL,
    "world/test_comm_explorer.py::test_hosts_never_wait_for_each_other_nor_write_what_is_still_read[hosts3": ALL,
    "world/test_comm_explorer.py::test_no_interleaving": VALUES,
    "world/test_comm_explorer.py::test_relays_never": ALL,
    "world/test_comm_group.py::test_claim_holds[": VALUES,
    "world/test_comm_group.py::test_claim_holds_on_three": ALL,
    "world/test_comm_program_steps.py::test_an_algorithm": VALUES,
    "world/test_data_parallel_hooks.py::test_training_reaches": ALL,
    "world/test_coordinator_faults.py": ALL,
    "world/test_ddp_conversions.py::test_what_is_the_same": VALUES,
    "world/test_ddp_joins.py::test_several": VALUES,
    "world/test_ddp_options.py::test_a_step_of_a_compiled_module": ALL,
    "world/test_dropped_engines.py::test_engines_that_are_gone": ALL,
    "world/test_dropped_engines.py::test_engines_that_are_gone_leave_nothing[dp=2-dropped": TEST,
    "world/test_checkpoint_habits.py::test_another_engine": ALL,
    "world/test_checkpoint_habits.py::test_another_engine_continues_as_if_nothing_had_been[extra state]": TEST,
    "world/test_engine_habits.py": ALL,
    "world/test_engine_habits.py::test_a_program_gets_the_numbers_of_one_process_or_an_error[fsdp]": TEST,
    "world/test_engine_habits.py::test_a_program_gets_the_numbers_of_one_process_or_an_error[horovod]": TEST,
    "world/test_engine_habits.py::test_a_program_gets_the_numbers_of_one_process_or_an_error[pipeline]": TEST,
    "world/test_engine_oracle.py::test_random_models_train_like_one_process": ALL,
    "world/test_engine_oracle.py::test_random_models_train_like_one_process_under_every_engine[0]": TEST,
    "world/test_expert_parallel.py::test_divided": VALUES,
    "world/test_horovod_autotune.py": ALL,
    "world/test_horovod_gradients.py::test_two_optimizers_of_like_models": ALL,
    "world/test_horovod_mistakes.py::test_whatever_ranks_and_threads_call": ALL,
    "world/test_horovod_programs.py": ALL,
    "world/test_horovod_torch.py::test_every_operation_is_right_in_every_dtype_and_one_to_four_dims[2": ALL,
    "world/test_horovod_torch.py::test_every_operation_is_right_in_every_dtype_and_one_to_four_dims[3": ALL,
    "world/test_horovod_torch.py::test_every_operation_is_right_in_every_dtype_and_one_to_four_dims[4": ALL,
    "world/test_horovod_torch.py::test_gradients_go_back_the_way_that_tensors_came[2": ALL,
    "world/test_horovod_torch.py::test_gradients_go_back_the_way_that_tensors_came[3": ALL,
    "world/test_horovod_torch.py::test_gradients_go_back_the_way_that_tensors_came[4": ALL,
    "world/test_hosts.py::test_ranks_of_several_hosts_keep": ALL,
    "world/test_hybrid.py": VALUES,
    "world/test_hybrid.py::test_each_axis_alone": ALL,
    "world/test_hybrid.py::test_each_axis_alone_and_all_together_train_like_one_process[pp=2,dp=2,tp=2-1f1b-3": TEST,
    "world/test_hybrid.py::test_experts_have_an_axis_of_their_own[pp=2": ALL,
    "world/test_insertion.py::test_a_model_without_a_plan": ALL,
    "world/test_insertion.py::test_a_model_without_a_plan_has_the_gradients_of_one_process[2-0.0": TEST,
    "world/test_insertion.py::test_a_value_that_an_operation_takes_twice": ALL,
    "world/test_insertion.py::test_a_value_that_an_operation_takes_twice_may_be_split_differently_each_time[stack": TEST,
    "world/test_insertion.py::test_another_mode": ALL,
    "world/test_insertion.py::test_ids_and_labels": ALL,
    "world/test_insertion.py::test_operators_may_be_split": ALL,
    "world/test_megatron_layers.py::test_a_program": ALL,
    "world/test_megatron_pipeline.py::test_losses": ALL,
    "world/test_megatron_pipeline.py::test_losses_and_gradients_are_those_of_one_process[pp=2,tp=2]": TEST,
    "world/test_megatron_pipeline.py::test_losses_and_gradients_are_those_of_one_process[pp=2,vp=2,dp=2]": TEST,
    "world/test_parallelize_states.py": ALL,
    "world/test_pipeline.py::test_a_captured_model_with_tied_weights": ALL,
    "world/test_pipeline.py::test_gradients_have_the_bits": VALUES,
    "world/test_pipeline_agreement.py::test_shared_parameters": ALL,
    "world/test_pipeline_hard.py::test_any_plan": ALL,
    "world/test_pipeline_hard.py::test_every_schedule": VALUES,
    "world/test_pipeline_hard.py::test_recomputation": VALUES,
    "world/test_pipeline_hard.py::test_steps_of_stages": VALUES,
    "world/test_placed_processes.py": ALL,
    "world/test_portable.py::test_portable_ranks_keep_the_claims": ALL,
    "world/test_redistribute.py::test_any_two_layouts_on_any_two": ALL,
    "world/test_rpc_programs.py": ALL,
    "world/test_sharding_faces.py::test_bytes_held": VALUES,
    "world/test_sharding_properties.py": ALL,
    "world/test_sharding_state.py::test_a_state_is_loaded": ALL,
    "world/test_sharding_state.py::test_parameters_without_dims": ALL,
    "world/test_sharding_train.py::test_a_run_is_resumed": ALL,
    "world/test_tensor_parallel_sequence.py": VALUES,
    "world/test_torch_backend.py::test_gathered_lists": VALUES,
    "world/test_torch_backend.py::test_results_are_those_of_gloo": VALUES,
    "world/test_torch_backend.py::test_results_are_those_of_gloo[reductions-3": ALL,
    "world/test_torch_backend_parallel.py": ALL,
    "world/test_torch_backend_parallel.py::test_result_is_that_of_gloo[functional": TEST,
    "world/test_torch_rpc.py::test_programs_in_the_form_of": ALL,
}


def tier_of(path: str, starts_launchers: bool) -> Tier:
    """Return the tier of the test at `path` below tests/."""
    beginnings = [beginning for beginning in TIERS if path.startswith(beginning)]
    if beginnings:
        return TIERS[max(beginnings, key=len)]
    return ALL if starts_launchers else TEST


def mark_tiers(items: Iterable[pytest.Item], starts_launchers: Mapping[pytest.Item, bool]) -> None:
    """Mark the items that run in `make test-all` only."""
    families: dict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        path = item.nodeid.removeprefix("tests/")
        tier = tier_of(path, starts_launchers[item])
        if tier == ALL:
            item.add_marker(pytest.mark.all)
        elif tier != TEST and not item.get_closest_marker("proof"):
            families[path.partition("[")[0], 2 if tier == PAIRS else 1].append(item)
    for (_, strength), family in families.items():
        sample = covering_sample([_values(item) for item in family], strength)
        for index, item in enumerate(family):
            if index not in sample:
                item.add_marker(pytest.mark.all)


def _values(item: pytest.Item) -> dict[str, Hashable]:
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return {name: _hashable(value) for name, value in parameters.items()}


def _hashable(value: Any) -> Hashable:
    try:
        hash(value)
    except TypeError:  # a list, or a tuple with a list
        return repr(value)
    return value


def covering_sample(rows: Sequence[Mapping[str, Hashable]], strength: int) -> set[int]:
    """Return indices of rows in which every combination of `strength` parameters' values occurs that occurs in `rows`.

    The sample is greedy: it takes the row with the most missing combinations. Of several, it takes the last row, which
    usually has the largest sizes.
    """
    combined = [set(combinations(row.items(), min(strength, len(row)))) for row in rows]
    missing = set().union(*combined)
    sample: set[int] = set()
    while missing:
        best = max(reversed(range(len(rows))), key=lambda index: len(combined[index] & missing))
        sample.add(best)
        missing -= combined[best]
    return sample
