"""What a worker does, in words for people: what it says of itself, and what its messages show."""

from __future__ import annotations

from ...pipeline.rule import Action
from ...protocol import messages as m

_MOST_SHOWN = 100

_REQUESTS: dict[type, str] = {
    m.Deploy: "the building of its layers",
    m.LoadTensor: "the loading of its weights",
    m.Launch: "the linking with its neighbor",
    m.BuildOptimizer: "the building of an optimizer",
    m.LoadOptimizerState: "the loading of an optimizer's state",
    m.MeasureNorms: "the measuring of its gradients",
    m.FetchTensors: "the sending of its weights",
    m.FetchOptimizerState: "the sending of its optimizer's state",
    m.MeasureLayer: "the measuring of a layer",
    m.MeasureOptimizer: "the measuring of an optimizer",
    m.MeasureLink: "the measuring of a link",
}
_SHOWN: dict[type, str] = {m.Activation: "forward", m.Gradient: "backward"}


def of_action(action: Action, step: int) -> str:
    """What a stage does when it carries out an action."""
    kind = "forward" if action.kind == "F" else "backward"
    return f"the {kind} of micro-batch {action.key.microbatch} in step {step}"


def of_request(request: m.Message) -> str:
    """What a stage does when it carries out a request; nothing if that is over at once."""
    if isinstance(request, m.ApplyOptimizer):
        return f"the optimizer's part of step {request.step}"
    return _REQUESTS.get(type(request), "")


def shown_by(message: m.Message) -> str:
    """What a worker that sends a message does, or has just done; nothing if it does not show."""
    if isinstance(message, m.Pong):
        return ascii(message.doing[:_MOST_SHOWN])[1:-1]
    if isinstance(message, (m.Activation, m.Gradient)):
        kind = _SHOWN[type(message)]
        return f"the {kind} of micro-batch {message.microbatch} in step {message.step}"
    if isinstance(message, m.Timings):
        return f"the optimizer's part of step {message.step}"
    return ""
