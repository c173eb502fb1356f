from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from lightning_hetero.devices.copies import PlainCopies, StreamedCopies
from lightning_hetero.errors import BatchError, ModelError
from lightning_hetero.pipeline.results import loss_of
from lightning_hetero.stepping import LossScaling, _as_computed

from .devices.made_up_streams import MadeUpStreams, on_device


def test_the_loss_is_found_where_lightning_looks_for_it() -> None:
    loss = torch.tensor(1.0)
    assert loss_of(loss) is loss
    assert loss_of({"loss": loss, "other": 1}) is loss
    assert loss_of(None) is None


@pytest.mark.parametrize("result", [1.0, {"lose": torch.tensor(1.0)}, {"loss": None}, "loss"])
def test_anything_else_is_refused(result: Any) -> None:
    with pytest.raises(BatchError, match="without a loss tensor"):
        loss_of(result)


def test_backward_shows_the_gradients_that_were_computed() -> None:
    shown: list[bool] = []
    loss = _as_computed(torch.tensor(2.0), lambda _gradient: shown.append(True))
    assert loss.item() == 2.0
    assert shown == []
    (loss / 3).backward()
    assert shown == [True]


def test_a_loss_scaled_on_its_way_to_backward_is_refused() -> None:
    scaling = LossScaling(PlainCopies(torch.device("cpu")))
    loss = _as_computed(torch.tensor(2.0), partial(scaling.note, expected=1.0))
    with pytest.raises(ModelError, match="scaled by 2 on its way"):
        (loss * 2).backward()


def test_where_looking_would_wait_for_the_device_it_is_refused_at_the_next_step() -> None:
    streams = MadeUpStreams()
    scaling = LossScaling(StreamedCopies(streams))
    scaling.check_last()
    for scale in (1.0, 2.0):
        scaling.note(on_device(torch.tensor(scale)), 1.0)
        if scale == 1.0:
            scaling.check_last()
    with pytest.raises(ModelError, match="scaled by 2 on its way"):
        scaling.check_last()
    scaling.check_last()  # it is said once
