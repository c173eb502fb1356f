"""A running average of the weights, kept where the weights are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from .._lightning import EMAWeightAveraging, MisconfigurationException, TrainerFn, pl
from ..coordinator.deployment import Deployment
from ..errors import ModelError
from ..model.tensors import is_frozen
from ..pipeline.optimizer import AveragingAction, WeightAverages, averaged_tensors
from ..plan import Plan


class StageWeightAveraging(EMAWeightAveraging):
    """Lightning's ``EMAWeightAveraging`` for layers on workers: every process averages its own.

    Validation runs with the averages, and after training the module has them. Checkpoints have the
    form of ``EMAWeightAveraging``, with the averages in their ``state_dict``, so a run may continue
    with Lightning's callback on one device. Frozen parameters are not averaged until they train.
    This callback also works on one device.

    Args:
        decay: The remaining share of the average at each update; None weighs all updates equally,
            as stochastic weight averaging does.
        update_every_n_steps: The number of optimizer steps from one update to the next.
        update_starting_at_step: The first optimizer step with an update of the average after it.
        update_starting_at_epoch: The first epoch with an update of the average at its end; each
            later epoch has one too.

    Raises:
        MisconfigurationException: If ``decay`` is not between 0 and 1.

    Attributes:
        averages_on_stages: Shows the strategy that each process averages its own weights.
    """

    averages_on_stages = True

    def __init__(
        self,
        decay: float | None = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
    ) -> None:
        if decay is not None and not 0 <= decay <= 1:
            raise MisconfigurationException(
                f"The argument decay is {decay}; it must be between 0 and 1."
            )
        super().__init__(
            decay=decay or 0.0,
            update_every_n_steps=update_every_n_steps,
            update_starting_at_step=update_starting_at_step,
            update_starting_at_epoch=update_starting_at_epoch,
        )
        self._decay = decay
        self._num_averaged = 0
        self._averages: WeightAverages | None = None
        self._resumed: dict[str, Any] | None = None
        # The names of parameters with an average of their own in the checkpoint; they may be frozen
        # at present.
        self._averaged_before: frozenset[str] = frozenset()

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Forget the earlier run. The layers are not on their workers yet."""
        self._averages = None
        self._num_averaged = 0

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the averages at the weights, or at the averages of the checkpoint."""
        averages, self._resumed = self._resumed, None
        with _training(pl_module, self._averaged_before):
            self._averages = WeightAverages(averaged_tensors(pl_module))
            self._tell_stages(trainer, "begin")
        self._averaged_before = frozenset()
        if averages is not None:
            self._swap(trainer)
            _load(trainer, averages)
            self._swap(trainer)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Drop the averages; they have become the weights."""
        self._averages = None

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Average also parameters that were frozen at the start and train from now on."""
        self._made().include(averaged_tensors(pl_module))

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_args: Any, **_kwargs: Any) -> None:
        """Update the averages after an optimizer step, if it is time."""
        is_new = trainer.global_step > self._latest_update_step
        if is_new and self.should_update(step_idx=trainer.global_step - 1):
            self._update(trainer)
            self._latest_update_step = trainer.global_step

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Update the averages after an epoch, if it is time."""
        is_new = trainer.current_epoch > self._latest_update_epoch
        if is_new and self.should_update(epoch_idx=trainer.current_epoch):
            self._update(trainer)
            self._latest_update_epoch = trainer.current_epoch

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make the averages the weights."""
        self._made().adopt()
        self._tell_stages(trainer, "adopt")

    @override
    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Exchange the weights and their averages, before validation and again after it."""
        if self._averages is not None:
            self._swap(trainer)

    on_validation_epoch_end = on_validation_epoch_start

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save the averages as the state dict, and the weights beside them."""
        if self._averages is None or not checkpoint["state_dict"]:
            return  # there are no averages yet, or the weights could not be gathered
        checkpoint["current_model_state"] = checkpoint["state_dict"]
        self._swap(trainer)
        try:
            checkpoint["state_dict"] = trainer.strategy.lightning_module_state_dict()
        finally:
            self._swap(trainer)
        checkpoint["averaging_state"] = {"n_averaged": torch.tensor(self._num_averaged)}

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Continue with the averages and the weights of a checkpoint."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if "current_model_state" not in checkpoint or "averaging_state" not in checkpoint:
            rank_zero_warn(
                "The checkpoint was written without an average of the weights; averaging starts "
                "with its weights."
            )
            return
        self._num_averaged = int(checkpoint["averaging_state"]["n_averaged"])
        if self._averages is None:
            weights, self._resumed = checkpoint["current_model_state"], checkpoint["state_dict"]
            self._averaged_before = frozenset(
                name
                for name, average in self._resumed.items()
                if isinstance(average, Tensor) and not torch.equal(average, weights[name])
            )
        else:  # in the middle of a run, as the learning rate finder does it
            self._swap(trainer)
        _load(trainer, checkpoint["current_model_state"])

    def _update(self, trainer: pl.Trainer) -> None:
        averages = self._made()
        self._tell_stages(trainer, "update")
        averages.update(self._num_averaged, self._decay)
        self._num_averaged += 1

    def _swap(self, trainer: pl.Trainer) -> None:
        averages = self._made()
        self._tell_stages(trainer, "swap")  # first: if it raises, nothing has changed here either
        averages.swap()

    def _tell_stages(self, trainer: pl.Trainer, action: AveragingAction) -> None:
        """Have the stages on workers do the same with their averages."""
        average_weights = getattr(trainer.strategy, "average_weights", None)
        if average_weights is not None:
            average_weights(action, self._num_averaged, self._decay)

    @contextmanager
    def _averages_there(self, trainer: pl.Trainer) -> Iterator[None]:
        """Inside, the stages have their averages in the place of their weights."""
        self._tell_stages(trainer, "swap")
        try:
            yield
        finally:
            self._tell_stages(trainer, "swap")

    def _coming_home(
        self, trainer: pl.Trainer, deployment: Deployment, plan: Plan
    ) -> dict[str, Tensor]:
        """Fetch the averages of this process's new layers under a plan, by their paths.

        Raises:
            ModelError: If an average would be lost because its parameter is frozen by now.
        """
        if self._averages is None:
            return {}
        module, leaving = trainer.lightning_module, deployment.leaving_home(plan)
        for path, parameter in module.named_parameters():
            if parameter in leaving and is_frozen(parameter) and path in self._averages.present:
                raise ModelError(
                    f"{path} was frozen after its average began, and the average of a frozen "
                    "parameter does not move to a worker; keep its layer where it is, or freeze it "
                    "before the run."
                )
        paths, coming = deployment.paths(), deployment.coming_home(plan)
        names_of = deployment.tensors.names_of
        ever = {names_of[tensor] for tensor in deployment.trained.ever if tensor in names_of}
        buffers = {path for path, b in module.named_buffers() if b.is_floating_point()}
        names = [n for n in coming if n in paths and (n in ever or paths[n] in buffers)]
        with self._averages_there(trainer):
            found = deployment.tensors.fetch(names)
        return {paths[name]: found[name] for name in names}

    def _go_on(
        self, trainer: pl.Trainer, deployment: Deployment, coming: Mapping[str, Tensor]
    ) -> None:
        """Go on with averages after layers have moved, with the averages fetched before."""
        if self._averages is None:
            return
        module, present = trainer.lightning_module, {**self._averages.present, **coming}
        tensors = chain(module.named_parameters(), module.named_buffers())
        here = {path: t for path, t in tensors if path in present and not t.is_meta}
        self._averages = WeightAverages(averaged_tensors(module) | here, present)
        self._tell_stages(trainer, "go on")
        away = set(deployment.tensors.names_of.values())
        paths = ((name, path) for name, path in deployment.paths().items() if name in away)
        leaving = {name: present[path] for name, path in paths if path in present}
        with self._averages_there(trainer):
            deployment.tensors.store(leaving)

    def _made(self) -> WeightAverages:
        if self._averages is None:
            raise MisconfigurationException(
                "The averages of the weights are made when `fit` starts, and it has not started."
            )
        return self._averages


@contextmanager
def _training(module: pl.LightningModule, names: Collection[str]) -> Iterator[None]:
    """Inside, these parameters train, even if they are frozen."""
    frozen = [p for name, p in module.named_parameters() if name in names and not p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _load(trainer: pl.Trainer, state: dict[str, Any]) -> None:
    trainer.strategy.load_model_state_dict(
        {"state_dict": state}, strict=trainer.lightning_module.strict_loading
    )


@contextmanager
def moving_averages(
    trainer: pl.Trainer, plan: Plan, present: Callable[[], Deployment]
) -> Iterator[None]:
    """Inside, layers move; the averages of their weights move along.

    Args:
        trainer: Its callbacks average weights.
        plan: Where the layers move to.
        present: Returns the deployment at the time of the call.
    """
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    found = [one for one in callbacks if isinstance(one, StageWeightAveraging)]
    before = present()
    coming = [one._coming_home(trainer, before, plan) for one in found]
    yield
    for callback, averages in zip(found, coming, strict=True):
        callback._go_on(trainer, present(), averages)
