"""What `make test` leaves out: whole files and tests of the second tier.

`make test` shall take less than ten minutes on two cores. What is listed here takes long, mostly
because it starts processes. What it goes through, the first tier goes through as well: by rules in
one process, and with processes once for each mechanism. The continuous build runs both tiers.
`tests/pairwise.py` marks single cases of a test.
"""

from __future__ import annotations

import pytest

SECOND_TIER = frozenset(
    {
        "coordinator/test_lost_sessions.py::test_random_losses_change_no_bit",
        "coordinator/test_lost_sessions.py::test_random_losses_change_no_bit_where_layers_move",
        "examples/test_clusters.py",
        "examples/test_fine_tune_run.py::test_recomputation_changes_no_weight",
        "fake_device/test_backend.py::test_memory_and_times_are_those_of_the_device",
        "fake_device/test_check.py",
        "fake_device/test_pipeline.py",
        "fake_device/test_recovery.py",
        "integration/test_8bit_optimizers.py",
        "integration/test_along.py",
        "integration/test_before_backward.py",
        "integration/test_changed_arguments.py",
        "integration/test_compiling.py",
        "integration/test_delayed_links.py",
        "integration/test_faults.py",
        "integration/test_freezing.py",
        "integration/test_fuzzing.py",
        "integration/test_generation.py",
        "integration/test_gradients_away.py",
        "integration/test_halves.py",
        "integration/test_hosted_faults.py",
        "integration/test_hostile_weights.py",
        "integration/test_instance_methods.py",
        "integration/test_late_copies.py",
        "integration/test_later_checks.py",
        "integration/test_layer_state.py",
        "integration/test_lost_guests.py",
        "integration/test_lost_replicas.py",
        "integration/test_lost_weights.py",
        "integration/test_lying_coordinators.py",
        "integration/test_lying_workers.py",
        "integration/test_members.py",
        "integration/test_more_families.py",
        "integration/test_move_traffic.py",
        "integration/test_moving_weights.py",
        "integration/test_namespaces.py",
        "integration/test_narrowing.py",
        "integration/test_observing.py",
        "integration/test_odd_decoders.py",
        "integration/test_patched_code.py",
        "integration/test_patterns.py",
        "integration/test_pretrained.py",
        "integration/test_recovered_faults.py",
        "integration/test_recovery_views.py",
        "integration/test_round_trips.py",
        "integration/test_shape_faults.py",
        "integration/test_shapes.py",
        "integration/test_states_away.py",
        "integration/test_tensors_away.py",
        "integration/test_trainer_use.py",
        "integration/test_tunnels.py",
        "integration/test_views.py",
        "integration/test_weight_averaging.py",
        "launch/test_cluster.py::test_a_worker_ends_at_once_if_that_is_wanted",
        "launch/test_cluster.py::test_two_files_with_a_machine_of_one_name_have_a_worker_each",
        "launch/test_ray.py::test_a_killed_worker_a_lost_node_and_a_new_one",
        "launch/test_ray.py::test_a_node_without_the_token_is_told",
        "launch/test_ray.py::test_an_address_without_a_cluster_starts_none",
        "launch/test_ray.py::test_bundles_that_fit_nowhere_are_told",
        "launch/test_ray.py::test_workers_on_two_nodes_train_with_the_numbers_of_listed_workers",
        "launch/test_ray_losses.py",
        "launch/test_slurm.py::test_a_node_without_the_token_is_told",
        "launch/test_ssh.py::test_an_error_of_the_run_ends_them_too",
        "pipeline/test_compiling.py::test_numbers_are_those_of_layers_that_are_not_compiled",
        "pipeline/test_dropout_under_plans.py",
        "planner/test_search.py::test_brute_force_finds_nothing_better_on_three_devices",
        "planner/test_search.py::test_no_split_with_layers_at_both_ends_is_much_faster",
        "profiler/test_profiling_run.py::test_measuring_leaves_no_trace",
        "profiler/test_profiling_run.py::test_other_families_are_measured",
        "profiler/test_profiling_run.py::test_over_slow_links_token_ids_travel",
        "profiler/test_profiling_run.py::test_the_profile_marks_the_halves_with_experts",
        "site/test_pages.py::test_the_site_is_built_without_a_warning",
        "site/test_tutorials.py",
        "verify/test_device_check.py::test_wrong_losses_are_told",
    }
)
"""Files, and tests of other files, by their paths in this folder."""


def is_of_second_tier(item: pytest.Item) -> bool:
    """Whether a test, or its whole file, is listed here."""
    path = item.path.relative_to(item.config.rootpath / "tests").as_posix()
    test = f"{path}::{item.name.partition('[')[0]}"
    return not SECOND_TIER.isdisjoint((path, test))
