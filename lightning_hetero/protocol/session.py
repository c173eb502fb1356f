"""The rules of a conversation: who may say what, when. Tables, and one small interpreter.

coordinator ─ worker              upstream worker ─ downstream worker

OPENING ── Hello ──▶ GREETING     OPENING ── Hello ──▶ GREETING
GREETING ─ Welcome ▶ IDLE         GREETING ─ Welcome ▶ LINKED
IDLE: measuring                   LINKED: activations down, gradients up; probes of the link
IDLE ───── Deploy ─▶ LOADING
LOADING ── Launch ─▶ SERVING
SERVING: steps, state, optimizer
SERVING ── Deploy ─▶ LOADING: layers have moved

Whoever watches a worker: OPENING ─ Hello ▶ GREETING ─ Welcome ▶ TELLING ─ Status ▶ CLOSED
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Literal

from ..errors import LocalProtocolError, RemoteProtocolError
from . import messages as m

Role = Literal["opener", "answerer"]


class State(enum.Enum):
    """Where a conversation stands."""

    OPENING = "opening"
    GREETING = "greeting"
    IDLE = "idle"
    LOADING = "loading"
    SERVING = "serving"
    LINKED = "linked"
    TELLING = "telling"
    CLOSED = "closed"


Table = Mapping[State, Mapping[type, State]]


def _stay(state: State, *kinds: type) -> dict[type, State]:
    return dict.fromkeys(kinds, state)


COORDINATOR_SAYS: Table = {
    State.OPENING: {m.Hello: State.GREETING},
    State.IDLE: {
        **_stay(
            State.IDLE,
            m.DescribeDevice,
            m.PrepareLayers,
            m.MeasureLayer,
            m.MeasureOptimizer,
            m.MeasureLink,
            m.Probe,
        ),
        m.Deploy: State.LOADING,
    },
    State.LOADING: {
        **_stay(State.LOADING, m.LoadTensor, m.OfferTensor),
        m.Launch: State.SERVING,
    },
    State.SERVING: {
        **_stay(
            State.SERVING,
            m.BuildOptimizer,
            m.LoadOptimizerState,
            m.LoadTensor,
            m.BeginStep,
            m.SetAttributes,
            m.Arguments,
            m.Activation,
            m.Gradient,
            m.DropCaches,
            m.AbortStep,
            m.SetTrained,
            m.ZeroGradients,
            m.MeasureNorms,
            m.ClipGradients,
            m.ApplyOptimizer,
            m.AverageWeights,
            m.Record,
            m.FetchRecord,
            m.FetchTensors,
            m.FetchGradients,
            m.FetchOptimizerState,
        ),
        m.Deploy: State.LOADING,
    },
}

WORKER_SAYS: Table = {
    State.GREETING: {m.Welcome: State.IDLE},
    State.IDLE: _stay(
        State.IDLE,
        m.Done,
        m.DeviceDescribed,
        m.LayerMeasured,
        m.OptimizerMeasured,
        m.LinkMeasured,
        m.ProbeAnswer,
        m.NotMeasured,
        m.Paused,
        m.Resumed,
    ),
    # What nobody waits for may be on its way when a Deploy comes for moved layers.
    State.LOADING: _stay(
        State.LOADING,
        m.Built,
        m.Loaded,
        m.OfferAnswered,
        m.Done,
        m.Timings,
        m.BuffersUpdated,
        m.StageRecord,
        m.NeighborLost,
        m.Paused,
        m.Resumed,
    ),
    State.SERVING: _stay(
        State.SERVING,
        m.Done,
        m.Loaded,
        m.Timings,
        m.BuffersUpdated,
        m.StageRecord,
        m.Activation,
        m.Gradient,
        m.Norms,
        m.TensorContent,
        m.OptimizerState,
        m.NeighborLost,
        m.Paused,
        m.Resumed,
    ),
}

UPSTREAM_SAYS: Table = {
    State.OPENING: {m.Hello: State.GREETING},
    State.LINKED: _stay(State.LINKED, m.Activation, m.Probe),
}

DOWNSTREAM_SAYS: Table = {
    State.GREETING: {m.Welcome: State.LINKED},
    State.LINKED: _stay(State.LINKED, m.Gradient, m.ProbeAnswer),
}

WATCHER_SAYS: Table = {State.OPENING: {m.Hello: State.GREETING}}

WATCHED_SAYS: Table = {
    State.GREETING: {m.Welcome: State.TELLING},
    State.TELLING: {m.Status: State.CLOSED},
}

# These fit anywhere.
ALWAYS: dict[type, State | None] = {
    m.Ping: None,
    m.Pong: None,
    m.AskClock: None,
    m.ClockTold: None,
    m.Failure: State.CLOSED,
    m.Goodbye: State.CLOSED,
}

# A failure inside a step is reported and the conversation goes on.
_KEEPS_SERVING = {(State.SERVING, m.Failure), (State.LOADING, m.Failure)}


class Session:
    """One end of a conversation; both ends run the same tables, mirrored."""

    def __init__(self, ours: Table, theirs: Table) -> None:
        self._ours = ours
        self._theirs = theirs
        self._step = 0
        self.state = State.OPENING

    def sent(self, message: m.Message) -> None:
        """Note what we are about to say.

        Raises:
            LocalProtocolError: If the rules forbid it.
        """
        following = self._following(self._ours, message)
        if following is None:
            raise LocalProtocolError(f"{message} must not be sent while {self.state.value}.")
        self.state = following

    def received(self, message: m.Message) -> None:
        """Note what the peer said.

        Raises:
            RemoteProtocolError: If the rules forbid it.
        """
        following = self._following(self._theirs, message)
        if following is None:
            raise RemoteProtocolError(f"{message} must not come while {self.state.value}.")
        self._check_step(message)
        self.state = following

    def _following(self, table: Table, message: m.Message) -> State | None:
        kind = type(message)
        if kind in ALWAYS:
            if (self.state, kind) in _KEEPS_SERVING:
                return self.state
            return ALWAYS[kind] or self.state
        return table.get(self.state, {}).get(kind)

    def _check_step(self, message: m.Message) -> None:
        """A coordinator begins steps one after the other and speaks of the present one only."""
        step = getattr(message, "step", None)
        if step is None or self._theirs is not COORDINATOR_SAYS:
            return
        expected = self._step + 1 if isinstance(message, m.BeginStep) else self._step
        if step != expected or step == 0:
            raise RemoteProtocolError(
                f"{type(message).__name__} is for step {step}, out of order: "
                f"step {expected} was expected."
            )
        self._step = step


def coordinator_session() -> Session:
    """The coordinator's end of its conversation with a worker."""
    return Session(COORDINATOR_SAYS, WORKER_SAYS)


def worker_session() -> Session:
    """The worker's end of its conversation with the coordinator."""
    return Session(WORKER_SAYS, COORDINATOR_SAYS)


def upstream_session() -> Session:
    """The end of the stage that dials its downstream neighbor."""
    return Session(UPSTREAM_SAYS, DOWNSTREAM_SAYS)


def downstream_session() -> Session:
    """The end of the stage that its upstream neighbor dialled."""
    return Session(DOWNSTREAM_SAYS, UPSTREAM_SAYS)


def watcher_session() -> Session:
    """The end of whoever watches a worker."""
    return Session(WATCHER_SAYS, WATCHED_SAYS)


def watched_session() -> Session:
    """The worker's end of its conversation with whoever watches it."""
    return Session(WATCHED_SAYS, WATCHER_SAYS)
