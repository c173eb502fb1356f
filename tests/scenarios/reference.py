"""The reference of a scenario: plain Lightning on one device, without any event.

It accumulates over the micro-batches, in the groups of the plans in force if a stage has replicas
(`integration.groups`). Two things it does as the package documents them: it weighs the losses of
micro-batches by their numbers of labels, and it seeds dropout by step, layer and micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hetero import Plan
from lightning_hetero.model.layers import find_decoder_layers
from lightning_hetero.pipeline.microbatch import counted_labels, split_batch
from lightning_hetero.pipeline.random_numbers import seed_action

from ..integration.groups import InGroups, InTurns
from ..models import fit
from .outcome import Outcome
from .scenario import PIECES, SHAPES, WHOLE, Scenario
from .subject import NUM_STEPS, Subject, data, trainer_arguments, validation

SEED = 7


class Reference(Subject):
    """The subject on one device, which sees micro-batches one by one."""

    def __init__(self, scenario: Scenario, folder: Path, num_pieces: int) -> None:
        super().__init__(scenario, folder, num_pieces)
        self.shares = shares_of(scenario, num_pieces)
        self.is_cut = SHAPES[scenario.shape].cuts_layers
        self._raw = torch.zeros(())

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        number, microbatch = divmod(self.trainer.fit_loop.total_batch_idx, self.num_pieces)
        with self.drawing(number + 1, microbatch):
            self._raw = super().training_step(batch, batch_idx)
        return self._raw

    @contextmanager
    def drawing(self, step: int, microbatch: int) -> Iterator[None]:
        """Inside, each layer draws what it is to draw in this place."""

        def seed(layer: int, *_: Any) -> None:
            seed_action(SEED, step, layer, microbatch, 0)

        modules = [each.module for each in find_decoder_layers(self)]
        if self.is_cut:  # the second half of a layer has a number of its own
            modules = [half for each in modules for half in (each, each.post_attention_layernorm)]
        hooks = [
            each.register_forward_pre_hook(partial(seed, number))
            for number, each in enumerate(modules)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Weigh the loss of a micro-batch by its labels."""
        if "padding" not in self.options or self.num_pieces == 1:
            super().backward(loss, *args, **kwargs)
            return
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        scale = 1.0 if scaler is None else scaler.get_scale()
        share = self.shares[self.trainer.fit_loop.batch_idx] / self.window
        self._raw.backward(torch.full_like(self._raw, share * scale))


def shares_of(scenario: Scenario, num_pieces: int) -> list[float]:
    """By micro-batch, how much it counts in its batch: as its labels do."""
    found = []
    for batch in data(scenario):
        counts = [int(counted_labels(piece)) for piece in split_batch(batch, num_pieces)]
        found += [count / sum(counts) for count in counts]
    return found


_KNOWN: dict[tuple[Any, ...], Outcome] = {}


def reference(scenario: Scenario, plans: Sequence[Plan], folder: Path) -> Outcome:
    """Train on one device.

    Args:
        scenario: Its options count.
        plans: The plan in force in each optimizer step; those without replicas do not count.
        folder: For files of models.
    """
    groups = [plan if any(len(s.workers) > 1 for s in plan.stages) else None for plan in plans]
    is_cut = SHAPES[scenario.shape].cuts_layers and "dropout" in scenario.options
    key = (*sorted(scenario.options), is_cut, repr(groups))
    if key not in _KNOWN:
        _KNOWN[key] = _trained(scenario, groups, folder)
    return _KNOWN[key]


def _trained(scenario: Scenario, groups: Sequence[Plan | None], folder: Path) -> Outcome:
    is_whole = bool(WHOLE & {*scenario.options})
    num_pieces = 1 if is_whole else PIECES
    module = Reference(scenario, folder, num_pieces)
    frozen = {n: t.clone() for n, t in module.named_parameters() if n not in module.trains}
    arguments = trainer_arguments(scenario, True, num_pieces)
    if any(groups) and not is_whole:
        window = num_pieces * scenario.window
        alone = Plan([], num_pieces)
        sums = [InGroups(plan or alone, window) for plan in groups]
        arguments["callbacks"].append(InTurns(sums, window))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PL_GLOBAL_SEED", str(SEED))
        fit(module, "auto", data(scenario, num_pieces), validation(), max_epochs=2, **arguments)
    assert len(module.logged) == NUM_STEPS * scenario.window * num_pieces
    shares = module.shares * 2
    columns = {
        name: combined([each[name] for each in module.logged], shares, num_pieces)
        for name in module.logged[0]
    }
    rows = zip(*columns.values(), strict=True)
    logged = [dict(zip(columns, row, strict=True)) for row in rows]
    # Lightning averages what is frozen too, which rounds it; `StageWeightAveraging` does not.
    return Outcome({**module.state_dict(), **frozen}, logged, module.validated)


def combined(values: Sequence[float], shares: Sequence[float], num_pieces: int) -> list[float]:
    """Of the values of micro-batches, those of their batches, in the bits of float32."""
    terms = [torch.tensor(v) * share for v, share in zip(values, shares, strict=True)]
    found = []
    for first in range(0, len(terms), num_pieces):
        total = terms[first]
        for term in terms[first + 1 : first + num_pieces]:
            total = total + term
        found.append(float(total))
    return found
