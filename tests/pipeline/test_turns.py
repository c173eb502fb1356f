"""A turn: a function runs on its own thread, but only while the driver waits for it."""

from __future__ import annotations

import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from lightning_hetero.pipeline.turns import Finished, HandedOver, Turn, TurnThreads, current_turn

user_value: ContextVar[str] = ContextVar("user_value", default="unset")


threads = TurnThreads()


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    threads.close()
    assert set(threading.enumerate()) <= before


def made(function: Callable[[], Any], name: str) -> Turn:
    return Turn(function, name, threads)


def ask(request: Any) -> Any:
    """Hand over from inside a turn."""
    turn = current_turn()
    assert turn is not None
    return turn.hand_over(request)


def test_a_function_that_hands_nothing_over_finishes_at_once() -> None:
    assert made(lambda: 7, "quick").start() == Finished(7)


def test_requests_come_out_and_answers_go_in() -> None:
    def double_twice() -> int:
        return int(ask(ask(1) + 1) + 1)

    turn = made(double_twice, "asking")
    assert turn.start() == HandedOver(1)
    assert turn.resume(10) == HandedOver(11)
    assert turn.resume(20) == Finished(21)


def test_turns_run_only_while_the_driver_waits_for_them() -> None:
    said: list[str] = []

    def speak(name: str) -> None:
        for number in range(2):
            said.append(f"{name}{number}")
            ask(None)

    first, second = (made(lambda name=name: speak(name), name) for name in "ab")  # type: ignore[misc]
    first.start()
    said.append("driver")
    second.start()
    second.resume(None)
    first.resume(None)
    assert said == ["a0", "driver", "b0", "b1", "a1"]
    assert [turn.resume(None) for turn in (first, second)] == [Finished(None)] * 2


def test_what_the_function_raises_reaches_the_driver_with_its_traceback() -> None:
    error = ValueError("mine")

    def deep_inside() -> None:
        raise error

    def training_step() -> None:
        ask(None)
        deep_inside()

    turn = made(training_step, "raising")
    turn.start()
    with pytest.raises(ValueError, match="mine") as caught:
        turn.resume(None)
    assert caught.value is error
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[-2:] == ["training_step", "deep_inside"]


def test_the_thread_sees_the_drivers_context_variables() -> None:
    token = user_value.set("mine")
    try:
        assert made(user_value.get, "reader").start() == Finished("mine")
    finally:
        user_value.reset(token)


def test_grad_mode_and_autocast_stay_the_threads_own() -> None:
    def step() -> bool:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            ask(None)
            return torch.is_grad_enabled() or not torch.is_autocast_enabled("cpu")

    turn = made(step, "modes")
    turn.start()
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert turn.resume(None) == Finished(False)


def test_a_turn_begins_with_the_autocast_and_the_saved_tensors_hooks_of_its_driver() -> None:
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    def step() -> torch.dtype:
        ask(None)
        product = torch.ones(2, 2, requires_grad=True) @ torch.ones(2, 2)
        return product.dtype

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with torch.autocast("cpu", dtype=torch.bfloat16), hooks:
        turn = made(step, "inside")
        turn.start()
    assert turn.resume(None) == Finished(torch.bfloat16)
    assert packed
    packed.clear()
    after = made(step, "outside")
    after.start()
    assert after.resume(None) == Finished(torch.float32)
    assert not packed


def test_only_the_turns_own_thread_is_in_a_turn() -> None:
    turn = made(lambda: ask(current_turn()), "who")
    assert turn.start() == HandedOver(turn)
    assert current_turn() is None
    turn.abandon()


def test_an_abandoned_function_is_unwound_before_abandon_returns() -> None:
    unwound: list[str] = []

    def step() -> None:
        try:
            ask(None)
        except Exception:
            unwound.append("caught as an error of its own")
        finally:
            unwound.append("finally")

    turn = made(step, "abandoned")
    turn.start()
    turn.abandon()
    assert unwound == ["finally"]


def test_a_finished_turn_can_be_abandoned() -> None:
    turn = made(lambda: None, "finished")
    turn.start()
    turn.abandon()


def test_a_function_that_hands_over_while_it_is_unwound_ends_too() -> None:
    def step() -> None:
        try:
            ask("forward")
        finally:
            ask("another forward, in the user's clean-up")

    turn = made(step, "clean-up")
    turn.start()
    abandoning = threading.Thread(target=turn.abandon, daemon=True)
    abandoning.start()
    abandoning.join(timeout=2)
    assert not abandoning.is_alive(), "abandon() waits for ever"


def test_a_thread_runs_one_turn_after_the_other_and_keeps_nothing_of_them() -> None:
    class Result:
        pass

    def step() -> Result:
        user_value.set("of the turn before")
        return Result()

    first = made(step, "first").start()
    assert isinstance(first, Finished)
    gone = weakref.ref(first.result)
    idents = [made(lambda: (threading.get_ident(), user_value.get()), "next") for _ in range(3)]
    found = [turn.start() for turn in idents]
    del first
    assert len(set(map(str, found))) == 1
    assert "unset" in str(found[0])
    assert gone() is None


@pytest.mark.parametrize(
    "leave",
    [
        lambda: torch.autocast("cpu", torch.bfloat16).__enter__(),
        lambda: torch.set_grad_enabled(False),
        lambda: torch.set_default_device("meta"),
        lambda: torch.autograd.graph.save_on_cpu().__enter__(),
    ],
    ids=["autocast", "grad mode", "default device", "saved tensors"],
)
@pytest.mark.parametrize("raises", [False, True])
def test_a_thread_with_another_state_of_torch_runs_no_other_turn(
    leave: Callable[[], Any], raises: bool
) -> None:
    def change() -> threading.Thread:
        found.append(threading.current_thread())
        leave()
        if raises:
            raise KeyError("too early")
        return found[0]

    found: list[threading.Thread] = []
    with suppress(KeyError):
        made(change, "changing").start()
    assert made(threading.current_thread, "next").start() != Finished(found[0])
    found[0].join()
    ask_once = made(lambda: ask(1), "waiting")
    ask_once.start()
    made(lambda: None, "beside").start()
    ask_once.resume(0)
    assert found[0] not in [thread for thread, _ in threads._all]


def test_a_turn_makes_its_tensors_on_its_driver_s_default_device() -> None:
    def devices() -> list[str]:
        before = str(torch.empty(1).device)
        ask(None)
        return [before, str(torch.empty(1).device)]

    for device in ("meta", "cpu"):  # the second turn runs on the thread of the first one
        torch.set_default_device(None if device == "cpu" else device)
        try:
            turn = made(devices, device)
            turn.start()
            assert turn.resume(None) == Finished([device] * 2)
        finally:
            torch.set_default_device(None)
    with torch.device("meta"):
        inside = made(devices, "inside a block")
        inside.start()
        assert inside.resume(None) == Finished(["meta"] * 2)


def test_turns_at_once_have_threads_of_their_own() -> None:
    def step() -> int:
        ask(None)
        return threading.get_ident()

    turns = [made(step, str(number)) for number in range(3)]
    for turn in turns:
        turn.start()
    found = {turn.resume(None) for turn in turns}
    assert len(found) == 3


def test_a_turn_computes_on_as_many_cores_as_it_is_told() -> None:
    def multiply() -> int:
        before = psutil.Process().num_threads()
        torch.ones(64, 64) @ torch.ones(64, 64)
        return psutil.Process().num_threads() - before

    assert torch.get_num_threads() == 1
    assert made(multiply, "the first work of a new thread").start() == Finished(0)


def test_a_turn_that_was_abandoned_before_it_started_does_not_run() -> None:
    ran: list[int] = []
    turn = made(lambda: ran.append(1), "late")
    turn.abandon()
    with pytest.raises(BaseException, match="^$") as caught:
        turn.start()
    assert type(caught.value).__name__ == "_Abandoned"
    assert ran == []
