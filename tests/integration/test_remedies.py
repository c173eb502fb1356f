"""What sentences on a way of training say to do is right.

Each case trains in a way that is refused, or warned of, with the words of its mark. Then it does
what the words say, and has the numbers of plain Lightning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan, windows
from lightning_hetero.callbacks import StageWeightAveraging

from ..equality import assert_close, weights_of
from ..models import TinyModule, fit, loader
from ..plans import plan_of
from ..remedies import Act, come_and_follow, follows
from .moves import Moves

Make = Callable[[], Any]
BOUNDARY = {"micro_batching": "boundary"}


def module(**methods: Any) -> Make:
    """A module with other methods."""
    return type("Changed", (TinyModule,), methods)


def manual(step: Callable[[Any, Any, int], Any], **methods: Any) -> Make:
    """A module that steps its optimizer by hand."""
    methods = {"automatic_optimization": False, "on_train_batch_end": lambda *_: None, **methods}
    return module(training_step=step, **methods)


def runs(make: Make, settings: dict[str, Any] | None = None, **options: Any) -> Act:
    """What trains a module over two workers and the coordinator."""

    def act(workers: list[str]) -> Any:
        chosen = {"plan": plan_of(workers, (1, 2, 2), 3), **(settings or {})}
        if callable(chosen["plan"]):
            chosen["plan"] = chosen["plan"](workers)
        given = {"data": loader(24, 12), **options}
        return fit(make(), HeteroPipelineStrategy(workers[:2], **chosen), **given)

    return act


def equals(
    make: Make, settings: dict[str, Any] | None = None, plain: Make | None = None, **options: Any
) -> Act:
    """What trains as well, and compares the weights with those of plain Lightning."""

    def act(workers: list[str]) -> None:
        found = runs(make, settings, **options)(workers)
        others = {"data": loader(24, 12), **options, "callbacks": []}
        expected = fit((plain or make)(), **others)
        assert_close(weights_of(found), weights_of(expected))

    return act


def both(*acts: Act) -> Act:
    """What does one thing after the other."""

    def act(workers: list[str]) -> None:
        for each in acts:
            each(workers)

    return act


def warns(words: str, act: Act) -> Act:
    """What does a thing that warns, and goes on."""

    def warned(workers: list[str]) -> None:
        with pytest.warns(UserWarning, match=words):
            act(workers)

    return warned


def without_warning(words: str, act: Act) -> Act:
    """What does a thing that would fail if it warned."""

    def done(workers: list[str]) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", f".*{words}")
            act(workers)

    return done


def quietly(words: str, act: Act) -> Act:
    """What does a thing that warns of something else too."""

    def done(workers: list[str]) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", words)
            act(workers)

    return done


def loss_of(module: Any, batch: Any) -> Tensor:
    loss: Tensor = module.model(**batch).loss
    return loss


# What the backward of `training_step`'s loss may be.
scaled = module(backward=lambda self, loss: (3 * loss).backward())
multiplied = module(training_step=lambda self, batch, _: 3 * loss_of(self, batch))


def backward_twice(self: Any, loss: Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def twice_by_hand(self: Any, batch: Any, _: int) -> None:
    optimizer, loss = self.optimizers(), loss_of(self, batch)
    optimizer.zero_grad()
    self.manual_backward(loss, retain_graph=True)
    self.manual_backward(loss)
    optimizer.step()


def look_for_gradient(self: Any, loss: Tensor) -> None:
    torch.autograd.grad(loss, self.model.lm_head.weight, retain_graph=True)


def step_that_looks(self: Any, batch: Any, _: int) -> Tensor:
    loss = loss_of(self, batch)
    look_for_gradient(self, loss)
    return loss


def step_that_freezes(self: Any, batch: Any, _: int) -> Tensor:
    self.model.lm_head.requires_grad_(bool(batch["input_ids"][0, 0] % 2))
    return loss_of(self, batch)


def replace_head(self: Any) -> None:
    self.model.lm_head.weight = nn.Parameter(self.model.lm_head.weight.detach().clone())


def step_that_replaces(self: Any, batch: Any, _: int) -> Tensor:
    replace_head(self)
    return loss_of(self, batch)


def step_that_skips(self: Any, batch: Any, _: int) -> Tensor | None:
    loss = loss_of(self, batch)
    return None if int(batch["input_ids"][-1, 0]) % 2 else loss


KEPT: dict[str, Any] = {}


def step_that_keeps(self: Any, batch: Any, _: int) -> Tensor:
    KEPT["labels"] = batch["labels"][:, 1:].flatten()
    logits = self.model(batch["input_ids"]).logits
    labels = KEPT["labels"]
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels)


def step_by_hand(self: Any, batch: Any, batch_idx: int) -> None:
    """One step for two batches."""
    optimizer = self.optimizers()
    if batch_idx % 2 == 0:
        optimizer.zero_grad()
    self.manual_backward(loss_of(self, batch) / 2)
    if batch_idx % 2:
        optimizer.step()


def count(self: Any, *_: Any) -> None:
    self.box["count"] = self.box["count"] + 1


class Boxed(TinyModule):
    """Its head's backward changes a number of the module."""

    def __init__(self, has_hook: bool = True) -> None:
        super().__init__()
        self.box = {"count": 0}
        if has_hook:
            self.model.lm_head.register_full_backward_hook(lambda *_: count(self))


def retaining(self: Any, batch: Any, _: int) -> Tensor:
    found = self.model(**batch)
    found.logits.retain_grad()
    self.logits = found.logits
    loss: Tensor = found.loss
    return loss


def gradient_of_logits(trained: Any) -> dict[str, Tensor]:
    """Of the last batch."""
    return {"gradient": trained.logits.grad}


TRAINING_STEPS = [
    follows(
        "scale it inside training_step, or use the safe mode, `micro_batching='boundary'`",
        runs(scaled),
        both(equals(multiplied), equals(scaled, BOUNDARY)),
    ),
    follows(
        "Multiply the loss instead, or use `micro_batching='boundary'` or manual optimization.",
        runs(module(backward=backward_twice)),
        both(
            equals(multiplied),
            equals(module(backward=backward_twice), BOUNDARY),
            equals(manual(twice_by_hand)),
        ),
    ),
    follows(
        "Look at `.grad` in `on_after_backward`; for tensors behind the layers on workers you may "
        "also call it in `training_step`, or use `micro_batching='boundary'`.",
        runs(module(on_before_backward=look_for_gradient)),
        both(
            equals(
                module(on_after_backward=lambda self: self.model.model.embed_tokens.weight.grad + 1)
            ),
            equals(module(training_step=step_that_looks)),
            equals(module(on_before_backward=look_for_gradient), BOUNDARY),
        ),
    ),
    follows(
        "so gradients would be lost. Set it in `on_train_batch_start` or earlier, or use the safe "
        "mode, `micro_batching='boundary'`.",
        runs(module(training_step=step_that_freezes)),
        both(
            equals(
                module(
                    on_train_batch_start=lambda self, _, number: (
                        self.model.lm_head.requires_grad_(number == 1) and None
                    )
                )
            ),
            equals(module(training_step=step_that_freezes), BOUNDARY),
        ),
    ),
    follows(
        "Replace it in `on_train_batch_start` or earlier, or use the safe mode, "
        "`micro_batching='boundary'`.",
        runs(module(training_step=step_that_replaces)),
        both(
            equals(module(on_train_batch_start=lambda self, *_: replace_head(self))),
            equals(module(training_step=step_that_replaces), BOUNDARY),
        ),
    ),
    follows(
        "On one device it skips whole batches; in the safe mode, `micro_batching='boundary'`, it "
        "does so here.",
        runs(module(training_step=step_that_skips, on_train_batch_end=lambda *_: None)),
        equals(module(training_step=step_that_skips, on_train_batch_end=lambda *_: None), BOUNDARY),
    ),
    follows(
        "Change it in `on_after_backward` or later, or use the safe mode, "
        "`micro_batching='boundary'`.",
        quietly(
            "`training_step` changes box in place",
            runs(Boxed, {"plan": lambda workers: plan_of(workers, (1, 2, 2), 12)}),
        ),
        both(
            equals(lambda: type("Later", (Boxed,), {"on_after_backward": count})(has_hook=False)),
            equals(Boxed, BOUNDARY),
        ),
    ),
    follows(
        "Keep it in a local variable, or use the safe mode, `micro_batching='boundary'`, where "
        "`training_step` runs once for each batch.",
        runs(module(training_step=step_that_keeps)),
        both(
            equals(TinyModule),
            equals(module(training_step=step_that_keeps), BOUNDARY),
            warns(
                "have other losses in their step",
                runs(module(training_step=step_that_keeps), {"check_first_batch": "warn"}),
            ),
        ),
    ),
    follows(
        "With `micro_batching='boundary'` it gets that of the batch.",
        runs(module(training_step=retaining)),
        lambda workers: assert_close(
            gradient_of_logits(runs(module(training_step=retaining), BOUNDARY)(workers)),
            gradient_of_logits(fit(module(training_step=retaining)(), data=loader(24, 12))),
        ),
    ),
    follows(
        "Give the Trainer the loader without `windows(...)`, and step after every n-th batch in "
        "`training_step`; or set automatic_optimization=True.",
        runs(manual(step_by_hand), data=windows(loader(24, 12), 2)),
        both(
            equals(manual(step_by_hand)),
            lambda workers: assert_close(
                weights_of(runs(TinyModule, data=windows(loader(24, 12), 2))(workers)),
                weights_of(fit(TinyModule(), data=loader(24, 12), accumulate_grad_batches=2)),
            ),
        ),
    ),
    follows(
        "Unfreeze a parameter, or look for a detach() on the way to the loss.",
        runs(module(training_step=lambda self, batch, _: loss_of(self, batch).detach())),
        equals(TinyModule),
    ),
]


# What `training_step` logs and returns.


def logging_size(self: Any, batch: Any, _: int) -> Tensor:
    self.log("size", float(len(batch["labels"])))
    return loss_of(self, batch)


def logging_sum(self: Any, batch: Any, _: int) -> Tensor:
    self.log("size", float(len(batch["labels"])), reduce_fx="sum")
    return loss_of(self, batch)


def returning_size(self: Any, batch: Any, _: int) -> dict[str, Any]:
    return {"loss": loss_of(self, batch), "size": float(len(batch["labels"]))}


def returning_parity(self: Any, batch: Any, _: int) -> dict[str, Any]:
    return {"loss": loss_of(self, batch), "odd": bool(batch["input_ids"][0, 0] % 2)}


def logs_equally(make: Make, settings: dict[str, Any] | None = None) -> Act:
    """What trains, and compares what was logged with plain Lightning."""

    def act(workers: list[str]) -> None:
        found = runs(make, settings)(workers).trainer.callback_metrics
        assert float(found["size"]) == float(
            fit(make(), data=loader(24, 12)).trainer.callback_metrics["size"]
        )

    return act


class Hooked(TinyModule):
    """A hook notes something in the backward, and may log it there."""

    def __init__(self, logs: bool) -> None:
        super().__init__()
        self.norms = MeanMetric()
        self.logs = logs
        self.model.lm_head.register_full_backward_hook(lambda *_: self.note())

    def note(self) -> None:
        if self.logs:
            self.log("norm", 1.0)
        else:
            self.norms.update(1.0)

    def on_after_backward(self) -> None:
        if not self.logs:
            self.log("norm", self.norms.compute())
            self.norms.reset()


def seen(number: int, act: Callable[[Any], object]) -> Any:
    """A callback that does a thing before a batch."""

    class Doing(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            if index == number:
                act(module)

    return Doing()


LOGS = [
    follows(
        "log a sum with `reduce_fx='sum'`, and anything else with a torchmetrics object or in",
        runs(module(training_step=logging_size)),
        both(
            logs_equally(module(training_step=logging_sum)),
            logs_equally(module(training_step=logging_size), BOUNDARY),
        ),
        "`micro_batching='boundary'` logs as one device does",
    ),
    follows(
        "compute anything else in `on_train_batch_end`. `micro_batching='boundary'` returns what",
        runs(module(training_step=returning_size)),
        both(equals(TinyModule), equals(module(training_step=returning_size), BOUNDARY)),
    ),
    follows(
        "so its value for the batch is unknown. Leave it out, or use the safe mode, "
        "`micro_batching='boundary'`.",
        runs(module(training_step=returning_parity)),
        both(equals(TinyModule), equals(module(training_step=returning_parity), BOUNDARY)),
    ),
    follows(
        "Let the hook update a metric of torchmetrics, and log its `compute()` in "
        "`on_after_backward`; or use the safe mode, `micro_batching='boundary'`",
        runs(lambda: Hooked(logs=True)),
        both(
            without_warning("changes", equals(lambda: Hooked(logs=False))),
            equals(lambda: Hooked(logs=True), BOUNDARY),
        ),
    ),
    follows(
        "It seems that …; … repairs it.",
        runs(
            module(training_step=lambda self, batch, _: len(batch["labels"]) * loss_of(self, batch))
        ),
        equals(
            module(
                training_step=lambda self, batch, _: len(batch["labels"]) * loss_of(self, batch)
            ),
            {"loss_weighting": "sum"},
        ),
    ),
]


# Backwards under manual optimization, and what moves.


def second_derivative(self: Any, batch: Any, _: int) -> None:
    optimizer = self.optimizers()
    optimizer.zero_grad()
    self.manual_backward(loss_of(self, batch), create_graph=True)
    optimizer.step()


def penalized_head(self: Any, batch: Any, _: int) -> None:
    """Only the head, which is here, is derived twice."""
    optimizer = self.optimizers()
    optimizer.zero_grad()
    given = torch.ones(2, 16, requires_grad=True)
    judged = self.model.lm_head(given).square().sum()
    (gradient,) = torch.autograd.grad(judged, given, create_graph=True)
    self.manual_backward(loss_of(self, batch) + gradient.square().mean())
    optimizer.step()


def two_optimizers(self: Any) -> list[torch.optim.Optimizer]:
    names = [n for n, _ in self.named_parameters()]
    own = dict(self.named_parameters())
    here = [own[n] for n in names if "layers" not in n]
    return [
        torch.optim.SGD(here, lr=0.1),
        torch.optim.SGD([own[n] for n in names if "layers" in n], lr=0.1),
    ]


def some_gradients(self: Any, batch: Any, _: int) -> None:
    first, _second = self.optimizers()
    first.zero_grad()
    loss_of(self, batch).backward(inputs=list(first.param_groups[0]["params"]))
    first.step()


def toggled(self: Any, batch: Any, _: int) -> None:
    first, _second = self.optimizers()
    self.toggle_optimizer(first)
    first.zero_grad()
    self.manual_backward(loss_of(self, batch))
    first.step()
    self.untoggle_optimizer(first)


def plain_by_hand(self: Any, batch: Any, _: int) -> None:
    optimizer = self.optimizers()
    optimizer.zero_grad()
    self.manual_backward(loss_of(self, batch))
    optimizer.step()


def moves(layers: tuple[int, ...], make: Make = TinyModule, number: int = 1, **options: Any) -> Act:
    """What moves the layers before a batch, and has the numbers of plain Lightning."""

    def act(workers: list[str]) -> None:
        if layers[0] == 5:
            plan = Plan([StagePlan(["coordinator"], (0, 5))], micro_batches=3)
        else:
            plan = plan_of(workers, layers, 3)
        callbacks = [Moves({number: plan}), *options.get("callbacks", [])]
        equals(make, **{**options, "data": loader(24, 6), "callbacks": callbacks})(workers)

    return act


def counting_twice() -> Any:
    found = TinyModule()
    found.model.model.embed_tokens.scale_grad_by_freq = True
    return found


def frozen_first() -> Any:
    found = TinyModule()
    found.model.model.layers[0].requires_grad_(False)
    return found


class Rows(pl.LightningModule):
    """Has layers that no Hugging Face model declares."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def named_layers(layers: str | None) -> Act:
    def act(workers: list[str]) -> None:
        rows: Any = torch.arange(36.0).view(12, 3)
        plan = plan_of(workers, (0, 2, 1), 2)
        strategy = HeteroPipelineStrategy(workers[:2], plan, layers=layers)
        found = fit(Rows(), strategy, DataLoader(rows, 4))
        assert_close(weights_of(found), weights_of(fit(Rows(), data=DataLoader(rows, 4))))

    return act


def stays_or_begins_anew(workers: list[str]) -> None:
    """A run ends, and another one goes on from its checkpoint with a plan without workers."""
    found = runs(TinyModule, data=loader(12, 6))(workers)
    with TemporaryDirectory() as folder:
        found.trainer.save_checkpoint(f"{folder}/last.ckpt")
        alone = HeteroPipelineStrategy(0, Plan([StagePlan(["coordinator"], (0, 5))], 3))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The plan has no stage on a worker")
            again = fit(
                TinyModule(), alone, loader(12, 6), ckpt_path=f"{folder}/last.ckpt", max_epochs=2
            )
    expected = fit(TinyModule(), data=loader(12, 6), max_epochs=2)
    assert_close(weights_of(again), weights_of(expected))


def ends_here(workers: list[str]) -> Plan:
    """A plan whose last two layers are here."""
    return Plan(
        [
            StagePlan(workers[:1], (0, 1)),
            StagePlan(workers[1:2], (1, 3)),
            StagePlan(["coordinator"], (3, 5)),
        ],
        micro_batches=3,
    )


def averaging(number: int, **options: Any) -> list[Any]:
    """The average of the weights, and a layer of the coordinator that is frozen at a batch."""
    return [
        StageWeightAveraging(decay=0.8),
        seen(number, lambda module: module.model.model.layers[0].requires_grad_(False)),
    ]


class EndingEarly(TinyModule):
    """Never runs its last two layers."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inner = self.model.model
        hidden = inner.embed_tokens(batch["input_ids"])
        rotated = inner.rotary_emb(hidden, torch.arange(hidden.shape[1])[None])
        for layer in inner.layers[:3]:
            hidden = layer(hidden, position_embeddings=rotated)
        logits = self.model.lm_head(hidden)
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"].flatten())


class Flat(Rows):
    """Its hidden states have no dimension of samples."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = batch[0]
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.square().mean()


def flat(num_here: int) -> Act:
    """What trains with some layers here and the others on a worker, and raises what it warns of."""

    def act(workers: list[str]) -> None:
        rows: Any = torch.arange(36.0).view(12, 3)
        stages = [StagePlan(["coordinator"], (0, num_here))]
        stages += [StagePlan(workers[:1], (num_here, 3))] * (num_here < 3)
        plan = Plan(stages, 2)
        strategy = HeteroPipelineStrategy(workers[:1], plan, layers="blocks", **BOUNDARY)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "The batch goes through the stages in one piece")
            warnings.filterwarnings("ignore", "The plan has no stage on a worker")
            found = fit(Flat(), strategy, DataLoader(rows, 4))
        assert_close(weights_of(found), weights_of(fit(Flat(), data=DataLoader(rows, 4))))

    return act


BY_HAND = [
    follows(
        "so they cannot be measured; use a plan of your own with these layers on the",
        runs(EndingEarly, {"plan": "auto"}),
        equals(EndingEarly, {"plan": ends_here}),
    ),
    follows(
        "have no dimension that counts samples. Keep the layers that take them with the "
        "coordinator.",
        flat(1),
        flat(3),
    ),
    follows(
        "Keep the model that needs them, such as the discriminator of a gradient penalty, with",
        runs(manual(second_derivative)),
        equals(manual(penalized_head)),
    ),
    follows(
        "Use a whole `backward`, and `toggle_optimizer` to leave parameters out.",
        runs(manual(some_gradients, configure_optimizers=two_optimizers)),
        equals(manual(toggled, configure_optimizers=two_optimizers)),
    ),
    follows(
        "so that gradients differ from those of the batch. Keep the embedding with the coordinator "
        "and set micro_batching='boundary', or micro_batches=1.",
        runs(counting_twice),
        both(
            equals(counting_twice, BOUNDARY),
            equals(counting_twice, {"plan": lambda workers: plan_of(workers, (1, 2, 2), 1)}),
        ),
    ),
    follows(
        "to fine-tune in phases, give the optimizer all parameters and set `requires_grad` in "
        "`on_train_epoch_start`",
        runs(TinyModule, callbacks=[ModelPruning("l1_unstructured")]),
        equals(
            module(
                on_train_epoch_start=lambda self: (
                    self.model.model.layers[3].requires_grad_(False) and None
                )
            )
        ),
    ),
    follows(
        "where only your code knows whether gradients are still needed; set "
        "`automatic_optimization = True`",
        moves((2, 2, 1), manual(plain_by_hand)),
        moves((2, 2, 1)),
    ),
    follows(
        "do it in `on_train_batch_start` of a batch that begins an accumulation window",
        moves((2, 2, 1), number=1, accumulate_grad_batches=2),
        moves((2, 2, 1), number=2, accumulate_grad_batches=2),
    ),
    follows(
        "leave a layer with one, or end the run and start it again with this plan and `ckpt_path`",
        moves((5, 0, 0)),
        both(moves((4, 1)), stays_or_begins_anew),
    ),
    follows(
        "keep its layer where it is, or freeze it before the run",
        moves((0, 3, 2), number=2, callbacks=averaging(1)),
        both(
            runs(TinyModule, data=loader(24, 6), callbacks=averaging(1)),
            lambda workers: runs(
                frozen_first,
                data=loader(24, 6),
                callbacks=[
                    StageWeightAveraging(decay=0.8),
                    Moves({2: plan_of(workers, (0, 3, 2), 3)}),
                ],
            )(workers),
        ),
    ),
    follows(
        "so it runs on this process alone; name them with `layers=`",
        named_layers(None),
        named_layers("blocks"),
    ),
]


def clipped_by(act: Callable[[Any, Any], object]) -> Make:
    return module(on_before_optimizer_step=act)


clipped_by_torch = clipped_by(lambda self, _: nn.utils.clip_grad_norm_(self.parameters(), 0.05))


def hosted(workers: list[str]) -> Plan:
    return Plan([StagePlan([workers[0], "coordinator"], (0, 5))], micro_batches=3)


def over_one(workers: list[str]) -> Plan:
    return Plan([StagePlan([workers[0]], (0, 5))], micro_batches=3)


def of_window(hook: str, act: Callable[[Any], object]) -> dict[str, Any]:
    """Options of a run with two batches in a window, in a hook of which something happens."""
    made = type("Acting", (pl.Callback,), {hook: lambda self, trainer, module, *_: act(module)})
    return {"data": loader(24, 6), "accumulate_grad_batches": 2, "callbacks": [made()]}


def halve_gradients(module: Any) -> None:
    for parameter in module.parameters():
        parameter.grad.mul_(0.5)


class Halving(TinyModule):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        halve_gradients(self)


def without_backward(self: Any, loss: Tensor) -> None:
    """Leave the backward out."""


def skipping(self: Any, batch: Any, batch_idx: int) -> Tensor | None:
    return None if batch_idx == 0 else loss_of(self, batch)


class LaterGroup(TinyModule):
    """The optimizer gets a weight of the last layer after the first step, or has it from the
    beginning and frozen for a while."""

    def __init__(self, is_there: bool) -> None:
        super().__init__()
        self.is_there = is_there

    def configure_optimizers(self) -> Any:
        late = self.model.model.layers[4].mlp.up_proj.weight
        late.requires_grad_(not self.is_there)
        own = [p for p in self.parameters() if self.is_there or p is not late]
        return torch.optim.SGD(own, lr=0.1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        late = self.model.model.layers[4].mlp.up_proj.weight
        if batch_idx == 1 and self.is_there:
            late.requires_grad_(True)
        elif batch_idx == 1:
            self.trainer.optimizers[0].add_param_group({"params": [late]})


GRADIENTS = [
    follows(
        "clip them with `self.clip_gradients(...)`, with the Trainer's `gradient_clip_val`, or "
        "with `trainer.strategy.clip_grad_norm_(...)`; read their norms with "
        "`trainer.strategy.grad_norms()`",
        runs(clipped_by_torch),
        both(
            equals(
                clipped_by(lambda self, optimizer: self.clip_gradients(optimizer, 0.05, "norm")),
                plain=clipped_by_torch,
            ),
            equals(
                clipped_by(lambda self, _: self.trainer.strategy.clip_grad_norm_(0.05)),
                plain=clipped_by_torch,
            ),
            equals(TinyModule, gradient_clip_val=0.05),
            equals(
                clipped_by(lambda self, _: self.trainer.strategy.grad_norms()), plain=TinyModule
            ),
        ),
    ),
    follows(
        "Take the coordinator from the stage, or use automatic optimization with "
        "`micro_batching='step'`.",
        runs(TinyModule, {"plan": hosted, **BOUNDARY}),
        both(
            equals(TinyModule, {"plan": over_one, **BOUNDARY}),
            equals(TinyModule, {"plan": hosted}),
        ),
    ),
    follows(
        "Change gradients in `on_before_optimizer_step`, which sees the sums of all replicas.",
        runs(TinyModule, {"plan": hosted}, **of_window("on_after_backward", halve_gradients)),
        equals(Halving, {"plan": hosted}, data=loader(24, 6), accumulate_grad_batches=2),
    ),
    follows(
        "Look at gradients in `on_after_backward` or later; to leave a batch out, return None from "
        "`training_step`, and do not leave out the backward.",
        runs(module(backward=without_backward)),
        both(
            equals(module(training_step=skipping, on_train_batch_end=lambda *_: None)),
            equals(module(on_after_backward=lambda self: self.model.lm_head.weight.grad.norm())),
        ),
    ),
    follows(
        "give it all parameters in `configure_optimizers`, and freeze and unfreeze them by "
        "`requires_grad`, which they follow",
        runs(lambda: LaterGroup(is_there=False)),
        equals(lambda: LaterGroup(is_there=True)),
    ),
]


@pytest.mark.parametrize(("wrong", "right"), [*TRAINING_STEPS, *LOGS, *BY_HAND, *GRADIENTS])
def test_the_words_are_said_and_what_they_say_is_right(
    wrong: Act, right: Act, request: pytest.FixtureRequest, workers: list[str]
) -> None:
    come_and_follow(request, wrong, right, workers)
