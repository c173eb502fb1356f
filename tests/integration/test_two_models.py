"""Two Hugging Face models in one module, with the layers of both away."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan

from ..models import TinyModule, fit, loader, tiny_llama

LISTS = ["model.model.layers", "teacher.model.layers"]
OPTIONS: dict[str, Any] = {"use_cache": False, "attn_implementation": "eager"}


class Distilling(TinyModule):
    """Compares the hidden states and attentions of a student with those of its teacher."""

    def __init__(self, was_used: bool = False) -> None:
        super().__init__(2, **OPTIONS)
        torch.manual_seed(5)
        self.teacher = tiny_llama(2, **OPTIONS).requires_grad_(False)
        for parameter in self.teacher.parameters():
            parameter.data.add_(0.1 * torch.randn_like(parameter))
        if was_used:
            tokens = torch.arange(4)[None]
            self.model(tokens, output_hidden_states=True, output_attentions=True)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        wanted = {"output_hidden_states": True, "output_attentions": True}
        found = self.model(**batch, **wanted)
        with torch.no_grad():
            expected = self.teacher(**batch, **wanted)
        loss: Tensor = found.loss
        for name in ("hidden_states", "attentions"):
            assert len(found[name]) == len(expected[name]) == 2 + (name == "hidden_states")
            pairs = zip(found[name], expected[name], strict=True)
            loss = loss + 10 * sum(functional.mse_loss(mine, other) for mine, other in pairs)
        self.log("loss", loss)
        return loss


@pytest.mark.parametrize(
    ("ranges", "was_used"),
    [([(0, 2), (2, 4)], False), ([(0, 2), (2, 4)], True), ([(0, 1), (1, 4)], False)],
    ids=["a worker for each", "the student was used before", "a worker with layers of both"],
)
def test_outputs_of_both_models_equal_one_device(
    workers: list[str], ranges: list[tuple[int, int]], was_used: bool
) -> None:
    remote = [StagePlan([name], layers) for name, layers in zip(workers, ranges, strict=False)]
    plan = Plan([StagePlan(["coordinator"], (0, 0)), *remote], 2)
    strategy = HeteroPipelineStrategy(workers[:2], plan, layers=LISTS)
    found, expected = (fit(Distilling(was_used), each, loader(8, 4)) for each in (strategy, "auto"))
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-5, atol=1e-6)
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], tensor, rtol=1e-5, atol=1e-6)
