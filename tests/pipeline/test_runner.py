"""A runner gathers inputs in any order, and acts by the rule, one step after the other."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_hetero.errors import ModelError, RemoteProtocolError
from lightning_hetero.model.layer_call import LayerCall
from lightning_hetero.pipeline.boundary import Activation, Gradients, Surroundings
from lightning_hetero.pipeline.rule import Key
from lightning_hetero.pipeline.runner import Runner
from lightning_hetero.pipeline.stage import Stage

ONES = torch.ones(1, 2)
INCOMING = Activation(torch.ones(1, 2, requires_grad=True))
CALLS = [LayerCall(0, True, (), {})]
TRAINING = Surroundings(True, None, CALLS)
EVALUATION = Surroundings(False, None, CALLS)


def begun(limit: int = 2, step: int = 1, bias: bool = True) -> Runner:
    layers = nn.ModuleDict({"0": nn.Linear(2, 2, bias=bias)})
    runner = Runner([Stage(layers, torch.device("cpu"), stage_index=1)])
    runner.begin(step, limit, accumulate=False)
    return runner


def weight_gradient(runner: Runner) -> torch.Tensor | None:
    gradient: torch.Tensor | None = runner.stage(1).layers.get_parameter("0.weight").grad
    return gradient


def give_forward(runner: Runner, key: Key, step: int = 1) -> None:
    runner.take(step, 1, key, TRAINING)
    runner.take(step, 1, key, INCOMING)


def next_name(runner: Runner) -> str | None:
    action = runner.next_action()
    return None if action is None else str(action)


def run_next(runner: Runner) -> Activation | Gradients:
    action = runner.next_action()
    assert action is not None
    return runner.run(action)


def run_all(runner: Runner) -> list[str]:
    """The actions until there is none."""
    done = []
    while (action := runner.next_action()) is not None:
        runner.run(action)
        done.append(str(action))
    return done


def test_a_forward_waits_for_its_activation_and_its_arguments_in_any_order() -> None:
    def arguments(runner: Runner) -> None:
        runner.take(1, 1, Key(0), TRAINING)

    def activation(runner: Runner) -> None:
        runner.take(1, 1, Key(0), INCOMING)

    arrivals: tuple[Callable[[Runner], None], ...] = (arguments, activation)
    for first, second in itertools.permutations(arrivals):
        runner = begun()
        first(runner)
        assert runner.next_action() is None
        second(runner)
        assert next_name(runner) == "1F0"


def test_a_backward_goes_first_while_another_microbatch_is_downstream() -> None:
    runner = begun(limit=3)
    for microbatch in range(2):
        give_forward(runner, Key(microbatch))
        run_next(runner)
    give_forward(runner, Key(2))
    runner.take(1, 1, Key(0), Gradients((ONES,)))
    assert run_all(runner) == ["1B0", "1F2"]


def test_a_forward_goes_first_when_nothing_is_downstream() -> None:
    runner = begun(limit=2)
    give_forward(runner, Key(0))
    run_next(runner)
    give_forward(runner, Key(1))
    runner.take(1, 1, Key(0), Gradients((ONES,)))
    assert run_all(runner) == ["1F1", "1B0"]


def test_a_forward_beyond_the_bound_waits_for_a_backward() -> None:
    runner = begun(limit=2)
    for microbatch in range(3):
        give_forward(runner, Key(microbatch))
    assert run_all(runner) == ["1F0", "1F1"]
    runner.take(1, 1, Key(0), Gradients((ONES,)))
    assert run_all(runner) == ["1B0", "1F2"]


def test_a_second_visit_of_a_microbatch_in_flight_is_not_held_back() -> None:
    runner = begun(limit=1)
    give_forward(runner, Key(0))
    give_forward(runner, Key(1))
    assert run_all(runner) == ["1F0"]
    give_forward(runner, Key(0, 1))
    assert run_all(runner) == ["1F0.1"]
    runner.take(1, 1, Key(0, 1), Gradients((ONES,)))
    assert run_all(runner) == ["1B0.1"]
    runner.take(1, 1, Key(0), Gradients((ONES,)))
    assert run_all(runner) == ["1B0", "1F1"]


def test_forwards_without_a_backward_never_wait() -> None:
    runner = begun(limit=1)
    for microbatch in range(3):
        runner.take(1, 1, Key(microbatch), EVALUATION)
        runner.take(1, 1, Key(microbatch), Activation(ONES))
    assert run_all(runner) == ["1F0", "1F1", "1F2"]


def test_a_forward_returns_an_activation_and_a_backward_gradients() -> None:
    runner = begun()
    give_forward(runner, Key(0))
    assert next_name(runner) == "1F0"
    assert isinstance(run_next(runner), Activation)
    runner.take(1, 1, Key(0), Gradients((ONES,)))
    assert next_name(runner) == "1B0"
    gradients = run_next(runner)
    assert isinstance(gradients, Gradients)
    [gradient] = gradients.tensors
    assert gradient is not None
    assert torch.equal(gradient, ONES @ runner.stage(1).layers.get_parameter("0.weight"))


def test_a_missing_gradient_passes_on_as_missing_and_ends_the_microbatch() -> None:
    runner = begun(limit=1)
    give_forward(runner, Key(0))
    give_forward(runner, Key(1))
    run_next(runner)
    runner.take(1, 1, Key(0), Gradients((None,)))
    assert run_next(runner) == Gradients((None,))
    assert next_name(runner) == "1F1"


@pytest.mark.parametrize("accumulate", [False, True])
def test_gradients_of_the_last_step_stay_only_for_an_accumulating_one(accumulate: bool) -> None:
    runner = begun()
    for step in (1, 2):
        if step == 2:
            runner.begin(2, 2, accumulate)
        give_forward(runner, Key(0), step)
        run_next(runner)
        runner.take(step, 1, Key(0), Gradients((ONES,)))
        run_next(runner)
    found = weight_gradient(runner)
    assert found is not None
    assert torch.equal(found, torch.full((2, 2), 2.0 if accumulate else 1.0))


def test_a_neighbor_may_be_a_step_ahead_of_the_coordinators_word() -> None:
    runner = begun()
    runner.take(2, 1, Key(0), INCOMING)
    runner.take(1, 1, Key(0), TRAINING)
    assert runner.next_action() is None
    runner.begin(2, 2, accumulate=False)
    assert runner.next_action() is None
    runner.take(2, 1, Key(0), TRAINING)
    assert next_name(runner) == "1F0"


def test_what_came_early_survives_an_abort_of_the_step_before() -> None:
    runner = begun()
    runner.take(2, 1, Key(0), INCOMING)
    runner.abort()
    runner.begin(2, 2, accumulate=False)
    runner.take(2, 1, Key(0), TRAINING)
    assert next_name(runner) == "1F0"


def test_an_aborted_step_is_forgotten_with_all_that_still_comes_of_it() -> None:
    runner = begun()
    give_forward(runner, Key(0))
    run_next(runner)
    give_forward(runner, Key(1))
    runner.abort()
    runner.take(1, 1, Key(0), Gradients((ONES,)))
    give_forward(runner, Key(2))
    assert runner.next_action() is None
    assert weight_gradient(runner) is None
    runner.begin(2, 2, accumulate=True)
    runner.take(1, 1, Key(0), Gradients((ONES,)))
    runner.take(1, 1, Key(1), INCOMING)
    assert runner.next_action() is None


def test_an_abort_drops_the_gradients_gathered_so_far() -> None:
    runner = begun()
    give_forward(runner, Key(0))
    run_next(runner)
    runner.take(1, 1, Key(0), Gradients((ONES,)))
    run_next(runner)
    runner.abort()
    assert weight_gradient(runner) is None


def test_a_new_step_has_its_whole_bound_again() -> None:
    runner = begun(limit=1)
    give_forward(runner, Key(0))
    run_next(runner)
    runner.begin(2, 1, accumulate=False)
    give_forward(runner, Key(1), step=2)
    assert next_name(runner) == "1F1"


def two_stages() -> Runner:
    """Stages 1 and 3 of a pipeline in one process."""
    stages = [
        Stage(nn.ModuleDict({"0": nn.Linear(2, 2)}), torch.device("cpu"), number)
        for number in (1, 3)
    ]
    runner = Runner(stages)
    runner.begin(1, 2, accumulate=False)
    return runner


def give(runner: Runner, stage: int, key: Key) -> None:
    runner.take(1, stage, key, TRAINING)
    runner.take(1, stage, key, INCOMING)


def test_one_rule_chooses_among_the_actions_of_all_stages() -> None:
    runner = two_stages()
    for microbatch in range(3):
        give(runner, 1, Key(microbatch))
    assert run_all(runner) == ["1F0", "1F1"]
    give(runner, 3, Key(0))  # a micro-batch in flight goes on, whatever the bound
    assert run_all(runner) == ["3F0"]
    runner.take(1, 3, Key(0), Gradients((ONES,)))
    assert run_all(runner) == ["3B0"]
    runner.take(1, 1, Key(0), Gradients((ONES,)))
    # Only now micro-batch 0 has left the process.
    assert run_all(runner) == ["1B0", "1F2"]


def test_what_comes_twice_is_refused() -> None:
    runner = begun()
    give_forward(runner, Key(0))
    with pytest.raises(RemoteProtocolError, match="Activation for stage 1 and micro-batch 0 came"):
        runner.take(1, 1, Key(0), INCOMING)
    run_next(runner)  # what has been used counts too
    with pytest.raises(RemoteProtocolError, match="Surroundings for stage 1 .* came twice"):
        runner.take(1, 1, Key(0), TRAINING)
    for keeps_graph in (True, False):
        runner.take(1, 1, Key(0), Gradients((ONES,), keeps_graph))
        with pytest.raises(RemoteProtocolError, match="Gradients for stage 1 .* came twice"):
            runner.take(1, 1, Key(0), Gradients((ONES,)))
        assert isinstance(run_next(runner), Gradients)
    with pytest.raises(RemoteProtocolError, match="Gradients for stage 1 .* came twice"):
        runner.take(1, 1, Key(0), Gradients((ONES,)))
    runner.begin(2, 2, accumulate=False)
    give_forward(runner, Key(0), step=2)
    assert next_name(runner) == "1F0"


def test_gradients_of_a_forward_that_never_came_are_refused() -> None:
    runner = begun()
    give_forward(runner, Key(0))
    with pytest.raises(RemoteProtocolError, match="micro-batch 0 in visit 1 came without its"):
        runner.take(1, 1, Key(0, 1), Gradients((ONES,)))


def test_gradients_wait_for_their_forward_where_a_lost_worker_is_repeated() -> None:
    runner, live = begun(), begun()
    runner.stage(1).layers.load_state_dict(live.stage(1).layers.state_dict())
    runner.repeats = True
    for each in (live, runner):
        give_forward(each, Key(0))
    assert run_all(live) == ["1F0"]
    for each in (live, runner):
        each.take(1, 1, Key(0), Gradients((ONES,)))
    assert run_all(live) == ["1B0"]
    assert run_all(runner) == ["1F0", "1B0"]
    assert torch.equal(weight_gradient(runner), weight_gradient(live))


def test_what_comes_late_is_dropped_also_after_a_move() -> None:
    """It may be for a stage that has left."""
    runner = Runner(two_stages().stages, step=4)
    assert [runner.is_late(step) for step in (3, 4, 5)] == [True, True, False]
    runner.take(4, 2, Key(0), INCOMING)
    runner.begin(5, 2, accumulate=False)
    runner.take(4, 2, Key(0), INCOMING)
    assert runner.has_done(0, 0, is_exact=True)


def test_a_stage_that_is_elsewhere_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match=r"stage 2, and this process has \[1, 3\]"):
        two_stages().take(1, 2, Key(0), INCOMING)


def test_backwards_run_in_the_order_of_their_gradients() -> None:
    runner = begun(limit=3)
    for microbatch in range(3):
        give_forward(runner, Key(microbatch))
    run_all(runner)
    for microbatch in (1, 0, 2):
        runner.take(1, 1, Key(microbatch), Gradients((ONES,)))
    assert run_all(runner) == ["1B1", "1B0", "1B2"]


def test_backwards_run_in_their_places_however_they_come() -> None:
    runner = begun(limit=3)
    for microbatch in range(3):
        give_forward(runner, Key(microbatch))
    run_all(runner)
    for microbatch, place in ((1, 2), (0, 1)):
        runner.take(1, 1, Key(microbatch), Gradients((ONES,), places=(place, 7)))
        assert runner.next_action() is None
    runner.take(1, 1, Key(2), Gradients((ONES,), places=(0, 5)))
    action = runner.next_action()
    assert action is not None
    passed_on = runner.run(action)
    assert isinstance(passed_on, Gradients)
    assert passed_on.places == (5,)
    assert run_all(runner) == ["1B0", "1B1"]


def test_forwards_of_a_visit_run_in_the_order_of_their_arguments() -> None:
    runner = begun(limit=3)
    for microbatch in range(3):
        runner.take(1, 1, Key(microbatch), TRAINING)
    for microbatch in (2, 1, 0):
        assert runner.next_action() is None
        runner.take(1, 1, Key(microbatch), INCOMING)
    assert run_all(runner) == ["1F0", "1F1", "1F2"]


def test_forwards_of_a_visit_run_in_their_places() -> None:
    runner = begun(limit=3)
    for microbatch, place in ((5, 1), (2, 0)):
        assert runner.next_action() is None
        runner.take(1, 1, Key(microbatch), replace(TRAINING, place=place))
        runner.take(1, 1, Key(microbatch), INCOMING)
    assert run_all(runner) == ["1F2", "1F5"]


def test_two_in_one_place_are_refused() -> None:
    runner = begun(limit=3)
    runner.take(1, 1, Key(0), replace(TRAINING, place=0))
    with pytest.raises(RemoteProtocolError, match="came for the place of Key"):
        runner.take(1, 1, Key(1), replace(TRAINING, place=0))


@pytest.mark.follows(
    "Call what works on gradients or weights between two batches, and not while one is on its way"
)
def test_a_request_has_its_place_between_forwards_and_backwards() -> None:
    runner = two_stages()
    assert runner.has_done(0, 0, is_exact=True)
    give(runner, 1, Key(0))
    run_all(runner)
    assert not runner.has_done(2, 0, is_exact=True)  # stage 3 has not
    give(runner, 3, Key(0))
    run_all(runner)
    assert runner.has_done(2, 0, is_exact=True)
    assert not runner.has_done(2, 1, is_exact=True)
    runner.take(1, 3, Key(0), Gradients((ONES,)))
    run_all(runner)
    with pytest.raises(ModelError, match="behind 2 forwards and 0 backwards"):
        runner.has_done(2, 0, is_exact=True)
    assert runner.has_done(2, 0, is_exact=False)
    runner.take(1, 1, Key(0), Gradients((ONES,)))
    run_all(runner)
    assert runner.has_done(2, 2, is_exact=True)  # between two batches


def test_after_an_abort_no_request_waits() -> None:
    runner = two_stages()
    assert not runner.has_done(5, 5, is_exact=True)
    runner.abort()
    assert runner.has_done(5, 5, is_exact=True)
    runner.begin(2, 2, accumulate=False)
    assert not runner.has_done(5, 5, is_exact=True)


def test_arguments_of_a_later_step_wait_for_it() -> None:
    runner = two_stages()
    runner.take(2, 1, Key(0), TRAINING)
    runner.take(2, 1, Key(0), INCOMING)
    assert runner.next_action() is None
    runner.begin(2, 2, accumulate=False)
    assert run_all(runner) == ["1F0"]
