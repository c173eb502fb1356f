"""What `make test` leaves out: whole files and tests of the second tier.

`make test` shall take less than ten minutes on two cores. What is listed here takes long, mostly
because it starts processes. The first tier goes through most of the same code in one process, and
with processes on the main paths; what goes wrong elsewhere between processes is found by the second
tier. The continuous build runs both. `tests/pairwise.py` marks single cases of a test.
"""

from __future__ import annotations

import pytest

SECOND_TIER = frozenset(
    {
        "coordinator/test_lost_sessions.py::test_random_losses_change_no_bit",
        "coordinator/test_lost_sessions.py::test_random_losses_change_no_bit_where_layers_move",
        "devices/test_numerics.py::test_newer_settings_travel_too",
        ""
        "devices/test_numerics.py::test_the_precision_of_convolutions_travels_whichever_setting_was_used",
        "examples/test_clusters.py",
        ""
        "examples/test_diffusion.py::test_the_adapter_of_two_workers_is_that_of_one_device_and_diffusers_loads_it",
        "examples/test_fine_tune_run.py::test_recomputation_changes_no_weight",
        ""
        "examples/test_fine_tune_run.py::test_the_instructions_are_distinct_and_about_other_modules_than_the_corpus",
        "examples/test_fine_tune_run.py::test_two_workers_train_as_one_device",
        ""
        "examples/test_fine_tune_run.py::test_windows_over_workers_train_as_accumulation_on_one_device",
        "fake_device/test_autoload.py",
        "fake_device/test_backend.py",
        "fake_device/test_check.py",
        "fake_device/test_device.py",
        "fake_device/test_mistakes.py",
        "fake_device/test_pipeline.py",
        "fake_device/test_recovery.py",
        "integration/test_8bit_optimizers.py",
        "integration/test_adapters.py::test_every_kind_of_adapter_equals_one_device",
        "integration/test_adapters_in_own_layers.py",
        "integration/test_accumulation_window.py::test_a_skipped_batch_leaves_its_window_whole",
        ""
        "integration/test_accumulation_window.py::test_an_attribute_that_changes_within_a_window_holds_from_its_batch_on",
        "integration/test_accumulation_window.py::test_code_that_looks_at_a_gradient_waits_for_it",
        ""
        "integration/test_accumulation_window.py::test_options_of_the_trainer_have_the_bits_of_batches_that_wait",
        "integration/test_accumulation_window.py::test_so_does_the_coordinator_as_a_replica",
        "integration/test_accumulation_window.py::test_under_anomaly_detection_no_backward_is_left",
        ""
        "integration/test_accumulation_window.py::test_validation_within_a_window_waits_before_weights_change",
        ""
        "integration/test_accumulation_window.py::test_what_is_frozen_for_a_batch_has_the_gradients_of_the_others",
        "integration/test_along.py",
        "integration/test_audit.py::test_where_nothing_changes_it_says_nothing_and_changes_no_bit",
        "integration/test_audit.py::test_weights_in_four_bits_are_audited",
        "integration/test_audit.py::test_a_worker_that_is_lost_in_an_audit_changes_no_bit",
        "integration/test_before_backward.py",
        "integration/test_callbacks.py::test_a_callback_has_the_effect_that_it_has_on_one_device",
        ""
        "integration/test_callbacks.py::test_a_callback_that_would_look_for_weights_that_are_elsewhere_is_refused",
        "integration/test_changed_arguments.py",
        "integration/test_compiling.py",
        "integration/test_coordinator_last.py::test_layers_move_with_and_without_the_embedding",
        "integration/test_delayed_links.py",
        "integration/test_diffusion.py",
        ""
        "integration/test_dropout.py::test_every_kind_of_dropout_has_the_bits_of_the_run_without_workers",
        "integration/test_failures.py::test_no_local_worker_is_left_behind",
        "integration/test_failures.py::test_sigterm_ends_a_coordinator_whose_worker_never_answers",
        "integration/test_faults.py",
        "integration/test_first_batch.py::test_the_check_changes_no_bit",
        "integration/test_four_bits.py::test_a_checkpoint_with_four_bits_resumes",
        "integration/test_four_bits.py::test_an_optimizer_of_parameters_that_do_not_train",
        "integration/test_freezing.py",
        "integration/test_fuzzing.py",
        "integration/test_generation.py",
        "integration/test_gradients_away.py",
        "integration/test_halves.py",
        "integration/test_hosted.py::test_a_model_that_stays_on_disk_has_the_bits_of_its_groups",
        ""
        "integration/test_hosted.py::test_a_run_goes_on_from_a_checkpoint_of_another_plan_and_of_one_device",
        "integration/test_hosted.py::test_a_window_may_have_a_batch_without_gradients",
        ""
        "integration/test_hosted.py::test_layers_move_to_and_from_plans_with_the_coordinator_as_a_replica",
        "integration/test_hosted.py::test_looking_at_gradients_in_mid_window_loses_none",
        ""
        "integration/test_hosted.py::test_replicas_beside_other_stages_have_the_bits_of_their_groups",
        "integration/test_hosted_faults.py",
        "integration/test_hostile_weights.py",
        "integration/test_instance_methods.py",
        ""
        "integration/test_interruptions.py::test_a_hook_that_fails_after_an_error_keeps_no_worker_and_no_weights",
        "integration/test_interruptions.py::test_ctrl_c_as_a_run_takes_leave_frees_its_workers",
        ""
        "integration/test_joining.py::test_one_whose_version_does_not_fit_is_told_of_in_the_run_s_error",
        "integration/test_late_copies.py",
        "integration/test_later_checks.py",
        "integration/test_layer_state.py",
        "integration/test_loops.py::test_training_is_that_of_one_device",
        "integration/test_lost_guests.py",
        "integration/test_lost_replicas.py",
        "integration/test_lost_weights.py",
        "integration/test_lost_workers.py::test_a_killed_process_comes_back",
        "integration/test_lost_workers.py::test_a_worker_that_is_killed_behind_a_move_comes_back",
        ""
        "integration/test_lost_workers.py::test_a_worker_that_is_lost_when_it_has_given_its_layers_away_gets_them_back",
        "integration/test_lost_workers.py::test_several_losses_one_after_the_other_and_at_once",
        ""
        "integration/test_lost_workers.py::test_weights_that_workers_have_not_back_yet_do_not_come_home",
        "integration/test_lying_coordinators.py",
        "integration/test_lying_workers.py",
        "integration/test_members.py",
        "integration/test_more_families.py",
        "integration/test_move_traffic.py",
        "integration/test_moving_layers.py::test_a_slow_worker_is_noticed_and_relieved",
        "integration/test_moving_layers.py::test_averages_of_the_weights_move_too",
        "integration/test_moving_weights.py",
        "integration/test_namespaces.py",
        "integration/test_narrowing.py",
        "integration/test_objects_in_layers.py",
        "integration/test_observing.py",
        "integration/test_odd_decoders.py",
        "integration/test_own_layers.py::test_a_script_without_a_main_guard_is_told_to_have_one",
        "integration/test_own_layers.py::test_local_workers_allow_the_layers_by_themselves",
        "integration/test_other_dtypes.py",
        "integration/test_patched_code.py",
        "integration/test_patterns.py",
        "integration/test_placements.py::test_layers_move_from_every_shape_to_every_other",
        ""
        "integration/test_placements.py::test_weights_are_bit_equal_to_accumulation_over_the_same_micro_batches",
        "integration/test_pretrained.py",
        "integration/test_reconnection.py",
        "integration/test_recovered_faults.py",
        "integration/test_recovery_views.py",
        "integration/test_remedies.py",
        "integration/test_round_trips.py",
        "integration/test_shape_faults.py",
        "integration/test_shapes.py",
        "integration/test_shared_states.py",
        "integration/test_states_away.py",
        "integration/test_strategy.py::test_copies_are_made_before_training_or_after_it",
        "integration/test_takeovers.py",
        "integration/test_tensors_away.py",
        "integration/test_trainer_use.py",
        "integration/test_tunnels.py",
        "integration/test_views.py",
        "integration/test_weight_averaging.py",
        ""
        "integration/test_window_as_lightning.py::test_several_loaders_have_the_weights_of_one_device",
        "integration/test_windows.py::test_a_measured_plan_counts_pieces",
        "integration/test_windows.py::test_pieces_that_are_cut_equal_one_device",
        "integration/test_windows.py::test_replicas_share_the_pieces_of_a_window",
        "launch/test_cluster.py::test_a_worker_ends_at_once_if_that_is_wanted",
        "launch/test_cluster.py::test_two_files_with_a_machine_of_one_name_have_a_worker_each",
        "launch/test_cluster.py::test_up_train_status_and_down",
        "launch/test_interrupted_wait.py::test_a_signal_ends_what_a_launcher_has_started",
        "launch/test_ray.py::test_a_killed_worker_a_lost_node_and_a_new_one",
        "launch/test_ray.py::test_a_node_without_the_token_is_told",
        "launch/test_ray.py::test_an_address_without_a_cluster_starts_none",
        "launch/test_ray.py::test_bundles_that_fit_nowhere_are_told",
        "launch/test_ray.py::test_workers_on_two_nodes_train_with_the_numbers_of_listed_workers",
        "launch/test_ray_losses.py",
        "launch/test_slurm.py::test_a_node_without_the_token_is_told",
        ""
        "launch/test_slurm.py::test_the_tasks_of_two_components_train_with_the_numbers_of_listed_workers",
        "launch/test_ssh.py::test_an_error_of_the_run_ends_them_too",
        ""
        "launch/test_ssh.py::test_two_machines_train_with_the_numbers_of_local_workers_and_nothing_is_left",
        "pipeline/test_compiling.py::test_numbers_are_those_of_layers_that_are_not_compiled",
        "pipeline/test_dropout_under_plans.py",
        "planner/test_search.py::test_brute_force_finds_nothing_better_on_five_devices",
        "planner/test_search.py::test_brute_force_finds_nothing_better_on_three_devices",
        "planner/test_search.py::test_no_split_with_layers_at_both_ends_is_much_faster",
        "planner/test_team_walk.py::test_plans_of_many_workers_fit_and_are_the_same_each_time",
        "planner/test_team_walk.py::test_random_changes_find_no_plan_that_is_much_faster",
        "profiler/test_profiling_run.py::test_an_unusable_file_is_ignored_with_a_log_line",
        "profiler/test_profiling_run.py::test_measuring_leaves_no_trace",
        "profiler/test_profiling_run.py::test_other_families_are_measured",
        "profiler/test_profiling_run.py::test_over_slow_links_token_ids_travel",
        "profiler/test_profiling_run.py::test_the_profile_marks_the_halves_with_experts",
        "profiler/test_profiling_run.py::test_the_second_start_measures_nothing",
        ""
        "profiler/test_profiling_run.py::test_validation_takes_the_plan_of_the_training_and_even_without_one",
        "site/test_pages.py::test_the_site_is_built_without_a_warning",
        "site/test_tutorials.py",
        "test_lazy_names.py::test_lightning_knows_the_strategy_in_either_order",
        "test_pytorch_lightning.py::test_the_other_lightning_is_not_imported",
        "verify/test_device_check.py::test_the_report_says_what_is_right_and_ends_with_that",
        "verify/test_device_check.py::test_wrong_losses_are_told",
        "verify/test_rehearsal.py::test_a_model_that_stays_on_disk_is_verified",
        "verify/test_rehearsal.py::test_workers_of_every_shape_are_verified_stage_by_stage",
    }
)
"""Files, and tests of other files, by their paths in this folder."""


def is_of_second_tier(item: pytest.Item) -> bool:
    """Whether a test, or its whole file, is listed here."""
    path = item.path.relative_to(item.config.rootpath / "tests").as_posix()
    test = f"{path}::{item.name.partition('[')[0]}"
    return not SECOND_TIER.isdisjoint((path, test))
