"""Slices along the tokens, `micro_batching="tokens"`: the memory of a stage, the numbers to try.

A sample of such a profile is one token of each sequence of a batch, so a micro-batch is a slice,
and its size is the mean number of its tokens. A step takes the seconds of the safe mode
(`safe_mode`): slices have equal work, all forwards come before all backwards, and the coordinator's
embedding, head and loss run on whole sequences.

All slices of a batch are in flight, whatever the plan says. A stage holds

    keys and values of the sequence, and their gradients
    without recomputation    the graphs of all slices
    with it                  the input of the stage, or of each layer, for the sequence, and the
                             graph of one slice: of all layers of the stage, or of one layer

The graph of a slice grows with its own tokens and with the tokens that it attends to: attention
may keep copies of the keys and values of all of them, its weights, and a mask in its own form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ..pipeline.slice_cut import Work, cut_by_work
from .costs import End, Holder, Index, Need, Numbers, Option
from .profile import EMBEDDING, HEAD, DeviceProfile, ModelProfile, SliceProfile

MOST_SLICES = 64
"""The most slices of a sequence that the planner tries. More save little: the keys and values, and
the calls of the layers, stay."""

Count = npt.NDArray[np.float64]


def slice_counts(num_tokens: int) -> list[int]:
    """The numbers of slices to try: the powers of two up to `MOST_SLICES`."""
    return [2**k for k in range(MOST_SLICES.bit_length()) if 2**k <= num_tokens]


class SliceHolder(Holder):
    """A device as a possible holder of stages that run on slices of one length.

    Args:
        device: Its profile.
        model: The model; its profile knows the slices.
        size: The mean number of tokens in a slice.
        slices: The model's part on slices.
        num_tokens: The tokens of a sequence.
        ends: As for `Holder`.
    """

    def __init__(
        self,
        device: DeviceProfile,
        model: ModelProfile,
        size: int,
        slices: SliceProfile,
        num_tokens: int,
        ends: Sequence[End] = (),
    ) -> None:
        super().__init__(device, model, size, ends)
        self._slices = slices
        # The bytes of an end are those of its share of a batch, and it runs on whole sequences.
        self._whole = num_tokens / size
        work = Work(slices.weight_work, slices.pair_work)
        cut = np.array(cut_by_work(num_tokens, math.ceil(num_tokens / size), work), np.float64)
        starts, stops = cut.T
        lengths = stops - starts
        # Timings have the bytes of a slice of mean length.
        self._of_mean: npt.NDArray[np.float64] = lengths / size
        self._longest = float(self._of_mean.max())
        # For each slice the bytes of one layer's attention besides those of the slice's own tokens.
        self._attended = slices.attended_bytes * stops / num_tokens
        self._attended = self._attended + slices.pair_bytes * lengths * stops
        self._num_tokens = num_tokens

    def need(self, option: Option, first: Index, end: Index, in_flight: Numbers) -> Need:
        """The memory need of a stage, with all slices in flight."""
        plain = super().need(option, first, end, in_flight)
        num_layers = np.asarray(np.subtract(end, first), np.float64)
        of_mean = self._whole if self.is_coordinator else self._longest
        return replace(
            plain,
            in_flight=self._held(option, first, end, num_layers),
            working=self._in_action(option, first, end, num_layers),
            boundaries=self._num_boundaries * self._boundary_bytes * of_mean,
        )

    def _held(self, option: Option, first: Index, end: Index, num_layers: Count) -> Numbers:
        """The bytes kept for all slices from their forwards to their backwards."""
        activation = self._model.activation_bytes_per_sample * self._num_tokens
        # Keys and values, and the gradients that later slices have given them.
        held = 2 * self._slices.key_value_bytes * num_layers
        if not option.recompute:
            graphs = self._saved(option, first, end) * self._whole
            held = held + graphs + num_layers * self._attended.sum()
        elif not self._recomputes_stage(option):
            held = held + option.input_bytes * self._whole * num_layers
        elif EMBEDDING not in self.ends:
            held = held + activation * np.minimum(num_layers, 1)
        if not self.is_coordinator or EMBEDDING in self.ends:
            held = held + activation  # the outgoing one
        if self.is_coordinator and HEAD in self.ends:
            held = held + activation + self._model.tied_gradient_bytes
        return held + self.before_layers.saved_bytes * self._whole

    def _in_action(self, option: Option, first: Index, end: Index, num_layers: Count) -> Numbers:
        """The temporary bytes of one action."""
        keys = self._slices.key_value_bytes
        # One layer gives gradients to all that it attends to. They are added to those of later
        # slices, and earlier tokens get a copy of the sum.
        scratch = option.scratch(first, end) * self._longest
        working = scratch + self._attended.max() + 2 * keys
        if self._recomputes_stage(option):
            saved = self._saved(option, first, end)[..., None] * self._of_mean
            graphs = saved + num_layers[..., None] * self._attended
            working = working + graphs.max(axis=-1)
        elif option.recompute:
            largest = option.peak(first, end) * self._longest - scratch
            working = working + largest + self._attended.max()
        working = np.where(num_layers > 0, working, 0.0)
        if not self.is_coordinator:
            # A worker's head has the logits of one slice.
            return working + self.behind_layers.peak_bytes * self._longest
        ends = [self.ends[name].cost for name in (EMBEDDING, HEAD) if name in self.ends]
        peaks = [cost.peak_bytes * self._whole for cost in ends if cost is not None]
        return np.maximum(working, max(peaks, default=0.0))

    @staticmethod
    def _saved(option: Option, first: Index, end: Index) -> npt.NDArray[np.float64]:
        """The graph of a slice of mean length, for the layers of a stage."""
        return np.asarray(option.saved[end] - option.saved[first])
