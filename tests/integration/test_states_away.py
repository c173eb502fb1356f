"""Between layers on workers a model may hand hidden states on and add to them, and not look."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.errors import ModelError

from ..models import TinyModule, fit, loader, trainer
from ..pairwise import keeping, repeats

NUM_LAYERS = 5
Between = Callable[["OwnLoop", Tensor, int], Any]


class OwnLoop(TinyModule):
    """Calls the layers of a Llama by itself, with something between them.

    ``kept`` holds what it gathered in the latest forward.
    """

    def __init__(self, between: Between, call: Any = None, rounds: int = 1) -> None:
        super().__init__(NUM_LAYERS)
        self.between, self.call, self.rounds = between, call, rounds
        self.kept: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.logits(batch)
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        if self.between in (deep_supervision, mixing):
            loss = loss + 0.1 * torch.stack([h.square().mean() for h in self.kept]).mean()
        self.log("train_loss", loss)
        return loss

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.logits(batch)

    def logits(self, batch: dict[str, Tensor]) -> Tensor:
        self.kept = []
        model: Any = self.model.model
        hidden = model.embed_tokens(batch["input_ids"])
        positions = model.rotary_emb(
            hidden, torch.arange(hidden.shape[1], device=self.device)[None]
        )
        for _ in range(self.rounds):
            for number, layer in enumerate(model.layers):
                hidden = self.layer(layer, hidden, positions)
                found = self.between(self, hidden, number)
                hidden = hidden if found is None else found
        logits: Tensor = self.model.lm_head(model.norm(hidden))
        return logits

    def layer(self, layer: nn.Module, hidden: Tensor, positions: Any) -> Tensor:
        if self.call is None:
            found: Tensor = layer(hidden, position_embeddings=positions)
        else:
            found = self.call(lambda h: layer(h, position_embeddings=positions), hidden)
        return found


def nothing(_module: OwnLoop, _hidden: Tensor, _number: int) -> None:
    """Hidden states go straight from layer to layer."""


def form(_module: OwnLoop, hidden: Tensor, _number: int) -> Tensor:
    """Looks at what is known of them, as many a model does before it makes a mask."""
    assert hidden.shape[1:] == (10, 16)
    assert hidden.device.type == "cpu"
    return hidden.to(hidden.device).to(torch.float32).contiguous()


def deep_supervision(module: OwnLoop, hidden: Tensor, _number: int) -> None:
    module.kept.append(hidden)


def mixing(module: OwnLoop, hidden: Tensor, number: int) -> Tensor | None:
    """Kept by one layer, used behind the last one."""
    module.kept.append(hidden)
    return sum(module.kept) if number == NUM_LAYERS - 1 else None  # type: ignore[return-value]


def logged_norm(module: OwnLoop, hidden: Tensor, number: int) -> None:
    module.log(f"norm {number}", hidden.detach().norm())


def logged(module: OwnLoop, hidden: Tensor, number: int) -> None:
    if number == 1:
        module.log(f"hidden {number}", hidden)


def halting(_module: OwnLoop, hidden: Tensor, _number: int) -> Tensor | None:
    return hidden if hidden.abs().mean() > 1e9 else None


def residual(_module: OwnLoop, hidden: Tensor, _number: int) -> Tensor:
    return hidden + 0.1


# What uses hidden states, and whether it does so only behind all layers on workers.
USES = {
    deep_supervision: True,
    mixing: True,
    logged_norm: False,
    logged: False,
    halting: False,
}
WAYS = ("step", "boundary")
REFUSED = [(use, way) for use, goes_on in USES.items() if not goes_on for way in WAYS]
EQUAL = [(use, way) for use, goes_on in USES.items() if goes_on for way in WAYS]
EQUAL += [(residual, way) for way in WAYS]


def over(workers: list[str], first: int = 1, last: int = NUM_LAYERS, **options: Any) -> Any:
    """The layers from the first to the last on two workers, the others with the coordinator."""
    middle = max(first, (first + last) // 2)
    stages = [
        StagePlan([workers[0]], (first, middle), embedding=options.pop("embedding", False)),
        StagePlan([workers[1]], (middle, last)),
    ]
    if first:
        stages.insert(0, StagePlan(["coordinator"], (0, first)))
    if last < NUM_LAYERS:
        stages.append(StagePlan(["coordinator"], (last, NUM_LAYERS)))
    plan = Plan(stages, micro_batches=2)
    return HeteroPipelineStrategy(workers[:2], plan, **options)


def train(module: TinyModule, strategy: Any = "auto", **options: Any) -> TinyModule:
    return fit(module, strategy, loader(12, 4), **options)


def assert_same_weights(found: nn.Module, expected: nn.Module) -> None:
    others = expected.state_dict()
    for name, tensor in found.state_dict().items():
        torch.testing.assert_close(tensor, others[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(("between", "way"), keeping([(halting, "boundary")], REFUSED))
def test_looking_between_layers_on_workers_is_refused(
    between: Between, way: str, workers: list[str]
) -> None:
    with pytest.raises(ModelError, match=r"hidden states behind layer \d, .*give the coordinator"):
        train(OwnLoop(between), over(workers, micro_batching=way))


@pytest.mark.parametrize(
    ("between", "way"), keeping([(mixing, "step"), (residual, "boundary")], EQUAL)
)
@pytest.mark.filterwarnings("ignore:`training_step` changes kept")
def test_sums_and_what_is_used_behind_the_layers_equal_one_device(
    between: Between, way: str, workers: list[str]
) -> None:
    found = train(OwnLoop(between), over(workers, micro_batching=way))
    assert_same_weights(found, train(OwnLoop(between), "auto"))


def test_looking_in_an_evaluation_is_refused(workers: list[str]) -> None:
    with pytest.raises(ModelError, match="hidden states behind layer 1.*give the coordinator"):
        trainer(over(workers)).predict(OwnLoop(halting), loader(4, 4))


def test_sums_in_an_evaluation_equal_one_device(workers: list[str]) -> None:
    found, expected = (
        trainer(strategy).predict(OwnLoop(residual), loader(4, 4))
        for strategy in (over(workers), "auto")
    )
    torch.testing.assert_close(found, expected)


class AtTheEnd(OwnLoop):
    """Looks at the hidden states behind layer 2 alone."""

    def __init__(self) -> None:
        super().__init__(lambda _, hidden, number: hidden.tanh() if number == 2 else None)


@pytest.mark.parametrize(("first", "last"), keeping([(0, 3)], [(3, NUM_LAYERS), (0, 3)]))
def test_the_remedy_is_one(first: int, last: int, workers: list[str]) -> None:
    with pytest.raises(ModelError, match="coordinator layers 0 to 2, or all layers from 3 on"):
        train(AtTheEnd(), over(workers))
    assert_same_weights(train(AtTheEnd(), over(workers, first, last)), train(AtTheEnd(), "auto"))


def saving(use_reentrant: bool) -> Any:
    return lambda layer, hidden: checkpoint(layer, hidden, use_reentrant=use_reentrant)


GOES_ON: dict[str, Callable[[], TinyModule]] = {
    "own loop": lambda: OwnLoop(nothing),
    "form": lambda: OwnLoop(form),
    "checkpoint": lambda: OwnLoop(form, saving(use_reentrant=False)),
    "twice": lambda: OwnLoop(nothing, rounds=2),
}


@pytest.mark.follows(
    "which is on a worker. Pass `use_reentrant=False`.",
)
@pytest.mark.parametrize(
    ("kind", "way"),
    keeping(
        [("checkpoint", "step"), ("twice", "boundary")], product(GOES_ON, ["step", "boundary"])
    ),
)
def test_handing_them_on_equals_one_device(kind: str, way: str, workers: list[str]) -> None:
    found = train(GOES_ON[kind](), over(workers, 0, NUM_LAYERS, micro_batching=way))
    assert_same_weights(found, train(GOES_ON[kind](), "auto"))


@pytest.mark.parametrize("use_reentrant", keeping([True], [False, True]))
def test_checkpointing_of_transformers_equals_one_device(
    use_reentrant: bool, workers: list[str]
) -> None:
    def module() -> TinyModule:
        made = TinyModule(NUM_LAYERS)
        made.model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        return made

    assert_same_weights(train(module(), over(workers)), train(module(), "auto"))


@pytest.mark.parametrize("way", keeping(["step"], ["step", "boundary"]))
def test_reentrant_checkpoints_around_layers_are_refused(way: str, workers: list[str]) -> None:
    with pytest.raises(ModelError, match="without `use_reentrant=False`"):
        train(OwnLoop(nothing, saving(use_reentrant=True)), over(workers, micro_batching=way))


class AllInOne(OwnLoop):
    """All layers in one reentrant checkpoint, whose backward calls them again."""

    def __init__(self) -> None:
        super().__init__(nothing)

    def logits(self, batch: dict[str, Tensor]) -> Tensor:
        model: Any = self.model.model
        hidden = model.embed_tokens(batch["input_ids"])
        positions = model.rotary_emb(
            hidden, torch.arange(hidden.shape[1], device=self.device)[None]
        )

        def all_layers(hidden: Tensor) -> Tensor:
            for layer in model.layers:
                hidden = layer(hidden, position_embeddings=positions)
            return hidden

        hidden = checkpoint(all_layers, hidden, use_reentrant=True)
        logits: Tensor = self.model.lm_head(model.norm(hidden))
        return logits


@pytest.mark.follows(
    "give `checkpoint` `use_reentrant=False`, or use the safe mode, `micro_batching='boundary'`"
)
def test_a_reentrant_checkpoint_around_all_layers_is_for_whole_batches(workers: list[str]) -> None:
    with pytest.raises(ModelError, match="give `checkpoint` `use_reentrant=False`, or.*boundary"):
        train(AllInOne(), over(workers))
    found = train(AllInOne(), over(workers, micro_batching="boundary"))
    assert_same_weights(found, train(AllInOne(), "auto"))


class Looking(OwnLoop):
    """Calls the model once more in the backward, or behind it."""

    def __init__(self, in_hook: bool) -> None:
        super().__init__(nothing)
        self.in_hook = in_hook

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.batch = batch
        loss = super().training_step(batch, batch_idx)
        if self.in_hook:
            loss.register_hook(lambda _: self.look())
        return loss

    def on_after_backward(self) -> None:
        if not self.in_hook:
            self.look()

    @torch.no_grad()
    def look(self) -> None:
        for sample in range(2):
            self.logits({name: each[sample : sample + 1] for name, each in self.batch.items()})


@pytest.mark.follows("or in `on_after_backward` with `micro_batching='boundary'`")
def test_the_model_is_called_behind_a_backward_and_not_in_it(workers: list[str]) -> None:
    with pytest.raises(ModelError, match="outside of a micro-batch's.*or in `on_after_backward`"):
        train(Looking(in_hook=True), over(workers))
    whole = over(workers, micro_batching="boundary")
    with pytest.raises(ModelError, match=r"in the backward of a batch.*or in `on_after_backward`"):
        train(Looking(in_hook=True), whole)
    found = train(Looking(in_hook=False), over(workers, micro_batching="boundary"))
    assert_same_weights(found, train(OwnLoop(nothing), "auto"))


def test_an_own_loop_from_the_embedding_on_equals_one_device(workers: list[str]) -> None:
    found = train(OwnLoop(form), over(workers, 0, NUM_LAYERS, embedding=True))
    assert_same_weights(found, train(OwnLoop(form), "auto"))


@pytest.mark.parametrize("inference_mode", keeping([True], [False, True]))
def test_predictions_are_those_of_one_device(inference_mode: bool, workers: list[str]) -> None:
    found = [
        trainer(strategy, inference_mode=inference_mode).predict(OwnLoop(form), loader(8, 4))
        for strategy in (over(workers), "auto")
    ]
    torch.testing.assert_close(*found)


@repeats(
    "test_handing_them_on_equals_one_device",
    "integration/test_mixed_precision.py::test_precision_over_stages_is_that_of_one_device",
)
def test_mixed_precision_goes_on(workers: list[str]) -> None:
    found = train(OwnLoop(form), over(workers), precision="bf16-mixed")
    assert found.losses == pytest.approx(
        train(OwnLoop(form), "auto", precision="bf16-mixed").losses, rel=1e-2
    )
