"""What sentences on batches, hidden states and steps say to do is right.

Each case does what is refused, with the words of its mark, and then what the words say.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.devices.copies import PlainCopies
from lightning_hetero.model.carried_tensors import entering
from lightning_hetero.model.layer_call import LayerCall
from lightning_hetero.model.recipe import NOTHING_ALLOWED
from lightning_hetero.pipeline import optimizer as optimizers
from lightning_hetero.pipeline.boundary import (
    Activation,
    Collected,
    Surroundings,
    join_activations,
)
from lightning_hetero.pipeline.handover import Request, SampleDimension, cut_request
from lightning_hetero.pipeline.microbatch import find_samples, loss_weights, split_batch
from lightning_hetero.pipeline.optimizer import optimizer_class_name
from lightning_hetero.pipeline.results import loss_of
from lightning_hetero.pipeline.rule import Key
from lightning_hetero.pipeline.stage import LayerState
from lightning_hetero.pipeline.stage_layers import describe_parameters

from .. import own_optimizers
from ..remedies import Act, come_and_follow, follows
from .remembering import Remembering, run, stage_of, use

ROWS = torch.arange(12.0).view(4, 3)


def cut(batch: Any, **options: Any) -> Act:
    """What cuts a batch into two micro-batches."""
    return lambda: split_batch(batch, 2, **options)


def weights(batch: Any, weighting: Any) -> Act:
    return lambda: loss_weights(split_batch(batch, 2), weighting, [2, 2], CPU_COPIES).all


CPU_COPIES = PlainCopies(torch.device("cpu"))


def padded() -> dict[str, Tensor]:
    return {"input_ids": torch.ones(4, 3).long(), "labels": torch.tensor([[1, 2, -100]] * 4)}


BATCHES = [
    follows(
        "holds no tensor to be cut. Return tensors with a dimension of samples from the data "
        "loader.",
        cut({"scale": torch.tensor(1.0)}),
        cut({"scale": torch.tensor(1.0), "x": ROWS}),
    ),
    follows(
        "Return tensors, numbers, texts, or containers of these from the data loader, or use the "
        "safe mode, `micro_batching='boundary'`.",
        cut({"x": ROWS, "array": ROWS.numpy()}),
        cut({"x": ROWS, "array": ROWS, "text": "a", "number": 1.0, "several": [ROWS]}),
    ),
    follows(
        "Return dense tensors from the data loader, or use the safe mode, "
        "`micro_batching='boundary'`.",
        cut({"x": ROWS, "sparse": torch.eye(4).to_sparse()}),
        cut({"x": ROWS, "sparse": torch.eye(4)}),
    ),
    follows(
        "Name the dimension with `batch_dim`, or use the safe mode, `micro_batching='boundary'`.",
        cut({"x": ROWS, "y": torch.zeros(3, 4)}),
        cut({"x": ROWS.T, "y": torch.zeros(3, 4)}, samples=find_samples({"x": ROWS.T}, dim=1)),
    ),
    follows(
        "Give them equal batch sizes, or use the safe mode, `micro_batching='boundary'`.",
        cut([{"x": ROWS}, {"x": ROWS[:1]}], of_several_loaders=True),
        cut([{"x": ROWS}, {"x": ROWS}], of_several_loaders=True),
    ),
    follows(
        "must not be negative. Correct the function that you pass as `loss_weighting`.",
        weights(padded(), lambda batch: -1.0),
        weights(padded(), lambda batch: 1.0),
    ),
    follows(
        "but this batch is a … without it. Use 'samples' or pass a function.",
        weights({"x": ROWS}, "labels"),
        lambda: (weights({"x": ROWS}, "samples")(), weights({"x": ROWS}, lambda batch: 1.0)()),
    ),
    follows(
        "Return the loss, a dict with a 'loss' entry, or None to skip the batch.",
        lambda: loss_of(1.0),
        lambda: (loss_of(torch.ones(())), loss_of({"loss": torch.ones(())}), loss_of(None)),
    ),
]


def dimension(choice: int | None, *shape: int, count: int = 4) -> Act:
    """What looks for the dimension that counts samples."""
    return lambda: SampleDimension(choice, is_sequence_first=True).find(torch.ones(*shape), count)


def pieces(*tables: Tensor) -> Act:
    """What joins pieces with a tensor besides their hidden states."""
    rows = [torch.ones(2, 5, 3) for _ in tables]
    made = [
        Activation(hidden, (Collected(entering(1), table),))
        for hidden, table in zip(rows, tables, strict=True)
    ]
    return lambda: join_activations(made)


def request(*shape: int, collect: tuple[str, ...] = (), **arguments: Any) -> Request:
    """Hidden states of this shape for a layer with these arguments."""
    calls = [LayerCall(4, False, (), arguments)]
    return Request(torch.ones(*shape), Surroundings(False, None, calls, collect))


HIDDEN_STATES = [
    follows(
        "Name the dimension that counts samples: `batch_dim=0`, or `batch_dim=1` for layers that",
        dimension(None, 5, 6, 3),
        lambda: (dimension(0, 4, 6, 3)(), dimension(1, 6, 4, 3)()),
    ),
    follows(
        "which has no dimension of samples and differs between the pieces of a batch. Use "
        "`micro_batches=1`.",
        pieces(torch.ones(7), torch.zeros(7)),
        pieces(torch.ones(7)),
    ),
    follows(
        "Collect no outputs, or use layers that take samples first.",
        lambda: cut_request(request(6, 4, 3, collect=("hidden_states",)), 2, dim=1),
        lambda: (
            cut_request(request(6, 4, 3), 2, dim=1),
            cut_request(request(4, 6, 3, collect=("hidden_states",)), 2),
        ),
    ),
    follows(
        "one row per sample or one per position, because the batch has … samples of length …. Use "
        "another batch size.",
        lambda: cut_request(request(4, 4, 3, table=torch.ones(4)), 2),
        lambda: cut_request(request(5, 4, 3, table=torch.ones(4)), 2),
    ),
]


class ChangesTwice(nn.Module):
    """Updates a buffer at each call."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            self.mean += hidden.mean()
        return hidden


def forward(*, trains: bool = True, **options: Any) -> Act:
    """What runs a layer that updates a buffer, as several processes would."""

    def act() -> None:
        layer = ChangesTwice().train(trains)
        with LayerState({0: layer}, **options).watching(0, is_again=False):
            layer(torch.ones(1))

    return act


def stepped(make: Any) -> Act:
    return lambda: optimizer_class_name(make([nn.Parameter(torch.ones(2))]))


def found(name: str, devices: tuple[str, ...] = ("cpu",)) -> Act:
    """What a worker makes of the name of an optimizer's class."""

    def act() -> None:
        library = pytest.importorskip("bitsandbytes")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(library, "supported_torch_devices", {*devices})
            parameters = {"a": nn.Parameter(torch.ones(2))}
            optimizers._find_class(name, parameters, NOTHING_ALLOWED)

    return act


STEPS = [
    follows(
        "Use one of torch.optim other than LBFGS, one of bitsandbytes.optim, or one that steps "
        "each parameter by itself.",
        stepped(torch.optim.LBFGS),
        lambda: (
            stepped(torch.optim.SGD)(),
            stepped(lambda p: pytest.importorskip("bitsandbytes").optim.AdamW8bit(p))(),
            stepped(own_optimizers.Lion)(),
        ),
    ),
    follows(
        "cannot be cut over stages: …. Use one of torch.optim other than LBFGS",
        stepped(own_optimizers.Centering),
        stepped(own_optimizers.CenteringLater),
    ),
    follows(
        "Use one of torch.optim, or leave this worker out.",
        found("bitsandbytes.AdamW8bit", devices=("cuda",)),
        lambda: (found("AdamW", devices=("cuda",))(), found("bitsandbytes.AdamW8bit")()),
    ),
    follows(
        "has no optimizer … here. Install the coordinator's version of the library on this worker.",
        found("OptimizerOfALaterVersion"),
        found("AdamW"),
    ),
    follows(
        "Give the stage to one worker, or put these modules into evaluation mode.",
        forward(is_shared=True),
        lambda: (forward()(), forward(is_shared=True, trains=False)()),
    ),
    follows(
        "and the copies would differ. Keep the layers that share it with the coordinator.",
        forward(constants=["0.mean"]),
        forward(),
    ),
    follows(
        "Generate with `use_cache=False`, or keep the layer with the coordinator.",
        lambda: run(stage_of(Remembering(None)), use()),  # type: ignore[arg-type]
        lambda: stage_of(nn.Identity()).forward(
            Key(0), Activation(ROWS), request(4, 3).surroundings
        ),
    ),
    follows(
        "which cannot be sent to a worker; convert it to one of …, or keep the layer",
        lambda: describe_parameters({0: with_buffer(torch.complex32)}),
        lambda: describe_parameters({0: with_buffer(torch.complex64)}),
    ),
]


def with_buffer(dtype: torch.dtype) -> nn.Module:
    made = nn.Linear(2, 2)
    made.register_buffer("odd", torch.zeros(2, dtype=dtype))
    return made


@pytest.mark.parametrize(("wrong", "right"), [*BATCHES, *HIDDEN_STATES, *STEPS])
def test_the_words_are_said_and_what_they_say_is_right(
    wrong: Act, right: Act, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    come_and_follow(request, wrong, right, tmp_path)
