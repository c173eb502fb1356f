"""Every exception of this package, and the closing question of several of their texts.

HeteroError
├─ PlanError                 a plan does not fit the model or the workers
├─ ProfileError              measurements cannot be read, or contradict themselves
├─ RecoveryError             settings of recovery are out of their bounds
├─ ModelError                a model cannot be cut as asked
│  └─ CheckpointError        weights on disk are missing, damaged or of another model
├─ BatchError                a batch cannot be split, or results cannot be merged
├─ ProtocolError
│  ├─ LocalProtocolError     we were about to send a message against the rules
│  └─ RemoteProtocolError    the peer sent a message against the rules
├─ TokenError                a token file is missing, weak or open to others
├─ PairingError              two machines did not pair, so the token stays where it is
├─ ChannelError              a connection ended or could not be used
│  └─ TrustError             the two ends have different tokens, or one lacks a token
├─ DiscoveryError            workers cannot be announced or found
├─ ClusterError              a cluster file cannot be used
├─ SaveError                 a checkpoint could not be written
├─ PictureError              a picture or a report cannot be made here
├─ WorkerTraceback           the traceback of a worker's error; only the cause of another one
└─ WorkerError
   ├─ WorkerUnreachable      a worker did not answer, or refused the conversation
   ├─ JoinError              a worker cannot join a run, or too few workers have joined it
   ├─ WorkerLost             a worker of the run is gone
   │  └─ WeightsLost         weights or optimizer state were lost with workers
   ├─ MoveUndone             a worker was lost or failed during a move; the layers are back
   ├─ LinkLost               two workers are alive and cannot reach each other
   └─ StageFailed            a worker's own code raised; its cause is a WorkerTraceback
"""

from difflib import get_close_matches
from typing import Literal


class HeteroError(Exception):
    """Base of all exceptions raised by this package on purpose."""


class PlanError(HeteroError, ValueError):
    """A plan does not fit the model or the workers."""


class ProfileError(HeteroError, ValueError):
    """Measurements cannot be read, or contradict themselves."""


class RecoveryError(HeteroError, ValueError):
    """Settings of recovery are out of their bounds."""


class ModelError(HeteroError):
    """A model cannot be cut into stages as asked."""


class CheckpointError(ModelError):
    """Weights on disk are missing, damaged or of another model."""


class BatchError(HeteroError):
    """A batch cannot be split, or results of micro-batches cannot be merged."""


class ProtocolError(HeteroError):
    """A message against the rules of the conversation."""


class LocalProtocolError(ProtocolError):
    """We were about to send a message against the rules."""


class RemoteProtocolError(ProtocolError):
    """The peer sent a message against the rules."""


class TokenError(HeteroError):
    """A token file is missing, weak, or open to others."""


class PairingError(HeteroError):
    """Two machines did not pair, so the token stays where it is."""


class ChannelError(HeteroError):
    """A connection ended, or could not be used."""


class TrustError(ChannelError):
    """The two ends of a connection have different tokens, or one of them lacks a token.

    ``about`` names the cause: TLS itself, the tokens, or the clocks.
    """

    def __init__(self, text: str, about: Literal["TLS", "token", "clock"] = "TLS") -> None:
        super().__init__(text)
        self.about: Literal["TLS", "token", "clock"] = about


class DiscoveryError(HeteroError):
    """Workers cannot be announced or found on this network."""


class ClusterError(HeteroError, ValueError):
    """A cluster file cannot be used."""


class SaveError(HeteroError, OSError):
    """A checkpoint could not be written; an older file in its place is untouched."""


class PictureError(HeteroError):
    """A picture or a report cannot be made here."""


class WorkerError(HeteroError):
    """Something went wrong with a worker."""


class WorkerUnreachable(WorkerError):
    """A worker did not answer, or refused the conversation."""


class JoinError(WorkerError):
    """A worker cannot join a run, or too few workers have joined it in time."""


class WorkerLost(WorkerError):
    """A worker of the run is gone."""


class WeightsLost(WorkerLost):
    """The coordinator could not fetch all weights and optimizer state from the workers.

    With ``are_weights_whole``, only optimizer state is lost.
    """

    def __init__(self, text: str, are_weights_whole: bool = False) -> None:
        super().__init__(text)
        self.are_weights_whole = are_weights_whole


class MoveUndone(WorkerError):
    """A worker was lost or failed while layers moved. The layers are back in their old places, and
    steps go on.
    """


class LinkLost(WorkerError):
    """Two neighboring workers are alive and cannot reach each other; their weights are not lost."""


class StageFailed(WorkerError):
    """A worker's own code raised; its cause is a `WorkerTraceback`."""

    @classmethod
    def with_traceback_there(cls, text: str, traceback: str) -> "StageFailed":
        """The error; Python prints the worker's traceback before it."""
        found = cls(text)
        found.__cause__ = WorkerTraceback(traceback)
        return found


class WorkerTraceback(HeteroError):
    """The traceback of a worker's error, as text. It is the cause of another error, so the other
    error's sentence comes last.
    """

    def __str__(self) -> str:
        return f"\n{super().__str__()}"


def traceback_there(error: BaseException) -> str:
    """The worker's traceback of an error, for a command to print before the error's sentence; empty
    if the error is not a worker's.
    """
    link: BaseException | None = error
    while link is not None and not isinstance(link, WorkerTraceback):
        link = link.__cause__
    return "" if link is None else f"{link}\n"


def did_you_mean(text: str, *known: str) -> str:
    """A question with the likely spelling of a misspelt text, with a space before it; empty without
    a guess.
    """
    near = get_close_matches(text, known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
