"""Lightning callbacks that know of stages."""

from .averaging import StageWeightAveraging

__all__ = ["StageWeightAveraging"]
