"""Every exception of this package.

HeteroError
├─ PlanError                 a plan that does not fit the model or the workers
├─ ProfileError              measurements that cannot be read, or that contradict themselves
├─ ModelError                a model that cannot be cut as asked
│  └─ CheckpointError        weights on disk that are missing, damaged or of another model
├─ BatchError                a batch or a result that cannot be split or merged
├─ ProtocolError
│  ├─ LocalProtocolError     we were about to say what the rules forbid
│  └─ RemoteProtocolError    the peer said what the rules forbid
├─ TokenError                a token file that is missing, weak or open to others
├─ ChannelError              a connection ended or could not be used
│  └─ TrustError              the two ends have no token in common, or one has none
├─ DiscoveryError            workers that cannot be announced or found
├─ MeshError                 a WireGuard mesh that cannot work, or its files
├─ SaveError                 a checkpoint that could not be written
├─ PictureError              a picture or a report that cannot be made here
└─ WorkerError
   ├─ WorkerUnreachable      nobody answered, or it refused us
   ├─ WorkerLost             it was there and is gone
   │  └─ WeightsLost         what workers held has not come home whole
   ├─ LinkLost               two are there and no longer reach each other
   └─ StageFailed            its own code raised; carries the worker's traceback
"""

from typing import Literal


class HeteroError(Exception):
    """Base of all exceptions that this package raises on purpose."""


class PlanError(HeteroError, ValueError):
    """A plan that does not fit the model or the workers."""


class ProfileError(HeteroError, ValueError):
    """Measurements that cannot be read, or that contradict themselves."""


class ModelError(HeteroError):
    """A model that cannot be cut into stages as asked."""


class CheckpointError(ModelError):
    """Weights on disk that are missing, damaged or of another model."""


class BatchError(HeteroError):
    """A batch that cannot be split, or results of micro-batches that cannot be merged."""


class ProtocolError(HeteroError):
    """A message that the rules of the conversation forbid."""


class LocalProtocolError(ProtocolError):
    """We were about to say something that the rules forbid."""


class RemoteProtocolError(ProtocolError):
    """The peer said something that the rules forbid."""


class TokenError(HeteroError):
    """A token file that is missing, weak, or open to others."""


class ChannelError(HeteroError):
    """A connection ended, or could not be used."""


class TrustError(ChannelError):
    """The two ends of a connection have no token in common, or one of them has none.

    ``about`` says what stands between them.
    """

    def __init__(self, text: str, about: Literal["TLS", "token", "clock"] = "TLS") -> None:
        super().__init__(text)
        self.about: Literal["TLS", "token", "clock"] = about


class DiscoveryError(HeteroError):
    """Workers that cannot be announced on this network, or were not found there."""


class MeshError(HeteroError, ValueError):
    """A WireGuard mesh that cannot work, or files of it that cannot be read or written."""


class SaveError(HeteroError, OSError):
    """A checkpoint that could not be written; what was in its place is untouched."""


class PictureError(HeteroError):
    """A picture or a report that cannot be made here."""


class WorkerError(HeteroError):
    """Something went wrong with a worker."""


class WorkerUnreachable(WorkerError):
    """A worker did not answer, or refused the conversation."""


class WorkerLost(WorkerError):
    """A worker that took part in the run is gone."""


class WeightsLost(WorkerLost):
    """Weights or optimizer state that workers held and that have not come home whole.

    With ``are_weights_whole`` only the optimizer state is lost.
    """

    def __init__(self, text: str, are_weights_whole: bool = False) -> None:
        super().__init__(text)
        self.are_weights_whole = are_weights_whole


class LinkLost(WorkerError):
    """Two neighboring workers are there and cannot reach each other; their weights are not lost."""


class StageFailed(WorkerError):
    """A worker's own code raised; the text carries the worker's traceback."""
