"""The rules of a conversation: each end accepts what a table allows, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.bases import State
from lightning_hetero.protocol.session import Session, answering_session, opening_session
from lightning_hetero.protocol.values import DictNode

from .examples import example

HELLO = m.Hello(m.PROTOCOL_VERSION, "coordinator", "run")
WELCOME = m.Welcome(m.PROTOCOL_VERSION)
DEPLOY = m.Deploy(1, [], [], seed=0)

MESSAGES = [example(kind) for kind in m.KINDS]


@dataclass
class Pair:
    """Two ends of a conversation, wired together in memory."""

    opener: Session
    answerer: Session
    heard: list[m.Message] = field(default_factory=list)

    def ask(self, *messages: m.Message) -> None:
        """The opener says something."""
        self._carry(self.opener, self.answerer, messages)

    def answer(self, *messages: m.Message) -> None:
        """The answerer says something."""
        self._carry(self.answerer, self.opener, messages)

    def _carry(self, speaker: Session, listener: Session, messages: Sequence[m.Message]) -> None:
        for message in messages:
            speaker.sent(message)
            listener.received(message)
            self.heard.append(message)

    @property
    def state(self) -> State:
        """Where both ends stand."""
        assert self.opener.state is self.answerer.state
        return self.opener.state


def workers_pair() -> Pair:
    return Pair(opening_session("coordinator"), answering_session("coordinator"))


def neighbors_pair() -> Pair:
    return Pair(opening_session("neighbor"), answering_session("neighbor"))


def watchers_pair() -> Pair:
    return Pair(opening_session("watcher"), answering_session("watcher"))


def joiners_pair() -> Pair:
    return Pair(opening_session("joiner"), answering_session("joiner"))


def bring(pair: Pair, state: State) -> Pair:
    """Bring a conversation to a state with as few messages as possible."""
    if state is State.OPENING:
        return pair
    if state is State.CLOSED:
        pair.ask(m.Goodbye())
        return pair
    pair.ask(HELLO)
    if state is not State.GREETING:
        pair.answer(WELCOME)
    if state in (State.LOADING, State.SERVING):
        pair.ask(DEPLOY)
    if state is State.SERVING:
        pair.ask(m.Launch(), m.BeginStep(1, in_flight=4, accumulate=False))
    return pair


# What answers each request, once more by hand. A piece is never the last answer.
ANSWERS = {
    "AskRoom": "RoomTold",
    "BuildOptimizer": "Done",
    "Deploy": "Built",
    "DescribeDevice": "DeviceDescribed",
    "FetchFingerprints": "Fingerprints",
    "FetchGradients": "TensorContent Done",
    "FetchOptimizerState": "OptimizerState Done",
    "FetchRecord": "StageRecord",
    "FetchTensors": "TensorContent Done",
    "Launch": "Done",
    "LoadTensor": "Done",
    "MeasureLayer": "LayerMeasured NotMeasured",
    "MeasureLink": "LinkMeasured NotMeasured",
    "MeasureNorms": "Norms",
    "MeasureOptimizer": "OptimizerMeasured NotMeasured",
    "OpenSession": "SessionOpened",
    "PrepareLayers": "Done NotMeasured",
    "Probe": "ProbeAnswer",
    "ReplaceNeighbor": "NeighborReplaced",
    "SendTensor": "Done",
    "SnapshotTensor": "Done",
    "TakeSnapshot": "SnapshotBegun",
    "Wait": "CaughtUp",
    "ZeroGradients": "Done",
}
PIECES = {"OptimizerState", "TensorContent"}


def test_each_request_has_the_answers_of_the_table() -> None:
    assert {kind.__name__: " ".join(kind.answers) for kind in m.KINDS if kind.answers} == ANSWERS
    assert {kind.__name__ for kind in m.KINDS if kind.is_piece} == PIECES
    assert {kind.__name__ for kind in m.ANSWERS} == {
        n for each in ANSWERS.values() for n in each.split()
    }


ALWAYS = "Ping Pong AskClock ClockTold Failure Goodbye"

# The rules once more by hand, so that a wrong declaration is noticed: for each conversation and
# state, what the opener may say and what the answerer may say.
ALLOWED: dict[tuple[Callable[[], Pair], State], tuple[str, str]] = {
    (workers_pair, State.OPENING): ("Hello", ""),
    (workers_pair, State.GREETING): ("", "Welcome"),
    (workers_pair, State.IDLE): (
        "Deploy DescribeDevice PrepareLayers MeasureLayer MeasureOptimizer MeasureLink Probe "
        "AskRoom OpenSession",
        "Done DeviceDescribed LayerMeasured OptimizerMeasured LinkMeasured ProbeAnswer NotMeasured "
        "Paused Resumed Leaving RoomTold SessionOpened",
    ),
    (workers_pair, State.LOADING): (
        "LoadTensor SendTensor MovedTensor FetchTensors FetchOptimizerState Launch "
        "KeepSent SnapshotTensor ReplaceNeighbor AskRoom OpenSession Replay",
        "Built Done Timings BuffersUpdated StageRecord MovedTensor "
        "SentKept TensorContent OptimizerState NeighborLost NeighborUnreachable NeighborAway "
        "NeighborBack "
        "Paused Resumed Leaving SnapshotBegun SnapshotPart NeighborReplaced "
        "CaughtUp RoomTold SessionOpened",
    ),
    (workers_pair, State.SERVING): (
        "BuildOptimizer LoadOptimizerState LoadTensor UpdateTensors BeginStep SetAttributes "
        "Arguments Activation Gradient DropCaches AbortStep SetTrained ZeroGradients MeasureNorms "
        "ClipGradients "
        "ApplyOptimizer AverageWeights ReduceGradients ReplicaTensors Record FetchRecord "
        "FetchTensors FetchGradients FetchOptimizerState FetchFingerprints Deploy "
        "KeepSent ForgetSent TakeSnapshot Replay Wait ReplaceNeighbor AskRoom OpenSession",
        "Done Timings BuffersUpdated StageRecord Activation Gradient Norms TensorContent "
        "SentKept "
        "ReplicaTensors OptimizerState Fingerprints NeighborLost NeighborUnreachable NeighborAway "
        "NeighborBack Paused Resumed Leaving SnapshotBegun SnapshotPart NeighborReplaced "
        "CaughtUp RoomTold SessionOpened",
    ),
    (workers_pair, State.CLOSED): ("", ""),
    (neighbors_pair, State.OPENING): ("Hello", ""),
    (neighbors_pair, State.GREETING): ("", "Welcome"),
    (neighbors_pair, State.LINKED): (
        "Activation MovedTensor ReplicaTensors Probe",
        "Gradient ProbeAnswer",
    ),
    (neighbors_pair, State.CLOSED): ("", ""),
    (watchers_pair, State.OPENING): ("Hello", ""),
    (watchers_pair, State.GREETING): ("", "Welcome"),
    (watchers_pair, State.TELLING): ("", "Status"),
    (watchers_pair, State.CLOSED): ("", ""),
    (joiners_pair, State.OPENING): ("Hello", ""),
    (joiners_pair, State.GREETING): ("", "Welcome"),
    (joiners_pair, State.WAITING): ("", "Welcome"),
    (joiners_pair, State.CLOSED): ("", ""),
}

SITUATIONS = list(ALLOWED)
ENDS = ("opener", "answerer")


def allowed(make: Callable[[], Pair], state: State, end: str) -> set[str]:
    opener, answerer = ALLOWED[make, state]
    return set(f"{ALWAYS} {opener if end == 'opener' else answerer}".split())


def accepted(
    say: Callable[[Pair, m.Message], None], make: Callable[[], Pair], state: State
) -> set[str]:
    """The messages that an end accepts in a state; each is tried on a new conversation."""
    names = set()
    for message in MESSAGES:
        pair = bring(make(), state)
        try:
            say(pair, message)
        except ProtocolError:
            assert pair.state is state, "a refused message changes nothing"
        else:
            names.add(type(message).__name__)
    return names


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(("make", "state"), SITUATIONS)
def test_an_end_sends_only_what_the_rules_allow(
    make: Callable[[], Pair], state: State, end: str
) -> None:
    def say(pair: Pair, message: m.Message) -> None:
        getattr(pair, end).sent(message)

    assert accepted(say, make, state) == allowed(make, state, end)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(("make", "state"), SITUATIONS)
def test_an_end_receives_only_what_the_rules_allow(
    make: Callable[[], Pair], state: State, end: str
) -> None:
    def hear(pair: Pair, message: m.Message) -> None:
        (pair.answerer if end == "opener" else pair.opener).received(message)

    assert accepted(hear, make, state) == allowed(make, state, end)


@pytest.mark.parametrize(("make", "state"), SITUATIONS)
def test_the_fault_is_local_when_we_send_and_remote_when_we_receive(
    make: Callable[[], Pair], state: State
) -> None:
    wrong = WELCOME if state in (State.LOADING, State.SERVING) else m.NeighborLost(1, "gone")
    with pytest.raises(LocalProtocolError, match=f"must not be sent while {state.value}"):
        bring(make(), state).opener.sent(wrong)
    with pytest.raises(RemoteProtocolError, match=f"must not come while {state.value}"):
        bring(make(), state).answerer.received(wrong)


@pytest.mark.parametrize(("make", "state"), SITUATIONS)
def test_a_goodbye_ends_any_conversation_and_may_be_answered(
    make: Callable[[], Pair], state: State
) -> None:
    pair = bring(make(), state)
    pair.ask(m.Ping())
    pair.answer(m.Pong(), m.Goodbye())
    assert pair.state is State.CLOSED
    pair.ask(m.Goodbye())
    assert pair.state is State.CLOSED


@pytest.mark.parametrize(("make", "state"), SITUATIONS)
def test_a_failure_ends_a_conversation_unless_a_stage_is_loaded_or_served(
    make: Callable[[], Pair], state: State
) -> None:
    pair = bring(make(), state)
    pair.answer(m.Failure("out of memory"))
    goes_on = state in (State.LOADING, State.SERVING)
    assert pair.state is (state if goes_on else State.CLOSED)


def test_a_whole_run_of_a_coordinator_and_a_worker() -> None:
    pair = workers_pair()
    pair.ask(HELLO)
    pair.answer(WELCOME)
    assert pair.state is State.IDLE
    pair.ask(DEPLOY)
    pair.answer(m.Built())
    pair.ask(m.LoadTensor("0.weight"), m.LoadTensor("0.bias"))
    pair.answer(m.Done(), m.Done())
    assert pair.state is State.LOADING
    pair.ask(m.Launch())
    pair.answer(m.Done())
    pair.ask(m.BuildOptimizer(0, "AdamW", None, []))
    pair.answer(m.Done())
    for step in (1, 2, 3):
        pair.ask(m.BeginStep(step, in_flight=2, accumulate=step == 2))
        for microbatch in (0, 1):
            pair.ask(m.Arguments(step, microbatch, 0, True, "bfloat16", [], []))
            pair.ask(m.Activation(step, microbatch, 0, requires_grad=[True], collected=[]))
            pair.answer(
                m.Activation(step, microbatch, 0, requires_grad=[True], collected=[]), m.Ping()
            )
            pair.ask(m.Pong(), m.Gradient(step, microbatch, 0, [True]))
            pair.answer(m.Gradient(step, microbatch, 0, [True]))
        pair.ask(m.MeasureNorms(step, 0))
        pair.answer(m.Norms({}))
        pair.ask(m.ClipGradients(step, 0, factor=0.1, value=None), m.ApplyOptimizer(step, 0, []))
    pair.answer(m.Failure("a stage failed"), m.NeighborLost(2, "gone"))
    pair.ask(m.AbortStep(3), m.FetchTensors(["0.weight"]), m.FetchOptimizerState(0, []))
    pair.answer(m.TensorContent("0.weight"), m.Done())
    pair.answer(m.OptimizerState("0.weight", DictNode({})), m.Done())
    pair.ask(m.LoadOptimizerState(0, "0.weight", DictNode({})), m.LoadTensor("0.weight"))
    assert pair.state is State.SERVING
    pair.ask(m.Goodbye())
    pair.answer(m.Goodbye())
    assert pair.state is State.CLOSED


def test_layers_move_between_two_steps() -> None:
    pair = bring(workers_pair(), State.SERVING)
    pair.ask(m.ApplyOptimizer(1, 0, []), DEPLOY)
    assert pair.state is State.LOADING
    pair.answer(m.Timings(1, 0.1, 0.2, 4), m.Built())
    pair.ask(m.LoadTensor("0.weight"), m.Launch())
    pair.answer(m.Done())
    pair.ask(m.BuildOptimizer(0, "AdamW", None, []), m.BeginStep(2, 1, accumulate=False))
    assert pair.state is State.SERVING


def test_a_worker_goes_on_in_the_place_of_a_lost_one() -> None:
    pair = bring(workers_pair(), State.LOADING)
    pair.ask(m.LoadTensor("0.weight"), m.SnapshotTensor("0.bias", None))
    pair.answer(m.Done(), m.Done())
    pair.ask(m.KeepSent(2**20), m.Launch())
    pair.answer(m.Done())
    pair.ask(m.Replay(7), m.BuildOptimizer(0, "AdamW", None, []))
    pair.ask(m.BeginStep(8, 1, accumulate=False), m.Wait(is_end=True))
    pair.answer(m.CaughtUp())
    pair.ask(m.TakeSnapshot(1, with_gradients=False), m.BeginStep(9, 1, accumulate=False))
    pair.answer(m.SnapshotBegun(1), m.SnapshotPart(1, is_last=True))
    pair.ask(m.ForgetSent(8))


def test_only_a_new_worker_goes_on_behind_a_step() -> None:
    pair = bring(workers_pair(), State.SERVING)
    with pytest.raises(RemoteProtocolError, match="Replay is for step 7"):
        pair.ask(m.Replay(7))


def test_a_whole_run_of_two_neighbors() -> None:
    pair = neighbors_pair()
    pair.ask(HELLO)
    pair.answer(WELCOME)
    for step in (1, 2):
        pair.ask(m.Activation(step, 0, 0, [True], []), m.Activation(step, 1, 0, [True], []))
        pair.answer(m.Gradient(step, 0, 0, [True]), m.Ping(), m.Gradient(step, 1, 0, [True]))
        pair.ask(m.Pong())
    assert pair.state is State.LINKED
    pair.answer(m.Goodbye())
    assert pair.state is State.CLOSED


@pytest.mark.parametrize(("begun", "step"), [(1, 0), (1, 1), (1, 3), (3, 1), (3, 3), (3, 5)])
def test_a_step_that_begins_late_early_or_again_is_refused(begun: int, step: int) -> None:
    worker = serving_worker(begun)
    expected = f"BeginStep is for step {step}, out of order: step {begun + 1} was expected"
    with pytest.raises(RemoteProtocolError, match=expected):
        worker.received(m.BeginStep(step, in_flight=1, accumulate=False))


@pytest.mark.parametrize("step", [0, 1, 3])
@pytest.mark.parametrize(
    "name",
    [
        "Arguments",
        "Activation",
        "Gradient",
        "AbortStep",
        "MeasureNorms",
        "ClipGradients",
        "ApplyOptimizer",
    ],
)
def test_a_message_about_another_step_is_refused(name: str, step: int) -> None:
    worker = serving_worker(2)
    with pytest.raises(RemoteProtocolError, match=f"{name} is for step {step}.*step 2"):
        worker.received(in_step(name, step))
    worker.received(in_step(name, 2))


def test_a_refused_step_does_not_count_as_begun() -> None:
    worker = serving_worker(1)
    with pytest.raises(RemoteProtocolError):
        worker.received(m.BeginStep(3, in_flight=1, accumulate=False))
    worker.received(m.BeginStep(2, in_flight=1, accumulate=False))
    worker.received(m.Gradient(2, 0, 0, [True]))


def test_a_worker_may_still_answer_for_the_step_that_was_aborted() -> None:
    pair = bring(workers_pair(), State.SERVING)
    pair.ask(m.AbortStep(1), m.BeginStep(2, in_flight=1, accumulate=False))
    pair.answer(
        m.Activation(1, 0, 0, requires_grad=[True], collected=[]),
        m.Gradient(1, 0, 0, [True]),
        m.Norms({}),
    )
    assert pair.state is State.SERVING


@given(
    situation=st.sampled_from(SITUATIONS),
    moves=st.lists(st.tuples(st.booleans(), st.sampled_from(MESSAGES)), max_size=40),
)
def test_one_end_accepts_what_the_other_end_may_send(
    situation: tuple[Callable[[], Pair], State], moves: list[tuple[bool, m.Message]]
) -> None:
    make, state = situation
    pair = bring(make(), state)
    for opener_speaks, message in moves:
        if isinstance(message, m.BeginStep) or pair.state is State.CLOSED:
            continue
        speaker, listener = pair.opener, pair.answerer
        if not opener_speaks:
            speaker, listener = listener, speaker
        verdicts = (verdict(speaker.sent, message), verdict(listener.received, message))
        assert verdicts in ((None, None), (LocalProtocolError, RemoteProtocolError))
        assert speaker.state is listener.state
        if isinstance(message, m.Launch) and verdicts == (None, None):
            pair.ask(m.BeginStep(1, in_flight=1, accumulate=False))


def verdict(say: Callable[[m.Message], None], message: m.Message) -> type[ProtocolError] | None:
    try:
        say(message)
    except ProtocolError as error:
        return type(error)
    return None


def serving_worker(step: int) -> Session:
    """A worker's end in the middle of a step."""
    pair = bring(workers_pair(), State.SERVING)
    for later in range(2, step + 1):
        pair.ask(m.BeginStep(later, in_flight=1, accumulate=False))
    return pair.answerer


def in_step(name: str, step: int) -> m.Message:
    """The example of this name, in another step."""
    found = next(message for message in MESSAGES if type(message).__name__ == name)
    return msgspec.structs.replace(found, step=step)
