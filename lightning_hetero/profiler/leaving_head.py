"""Whether the head may be on a worker, and the head as workers measure it.

The head may leave if workers know its classes (`find_head`), and if the run does nothing that a
worker with the head refuses. This has two tests. Dry runs of ``training_step``, and of
``validation_step`` if the run validates, have the head away as in a real run, with a made-up loss
and made-up logits. Refusals end them, and logits in the result of a training or in an attribute are
noticed at their end. Code may also act on some batches only: so ``training_step`` has a dry run as
for a late batch, and some names in the user's code keep the head here too.
"""

from __future__ import annotations

import gc
import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from .._lightning import pl
from ..errors import ModelError
from ..model.head import LabelsSeen, find_head
from ..model.layer_call import LayerCall
from ..model.layers import LOGITS_LAYER, DecoderLayer
from ..model.placeholders import HiddenStatesAway, instances_in, is_away
from ..model.recipe import write_recipe
from ..model.tensors import gradient_bytes, named_tensors, stored_bytes
from ..pipeline.bench import LayerTrial
from ..pipeline.boundary import Surroundings
from ..pipeline.handover import surroundings_here
from ..pipeline.stage_layers import buffers_of, preparation
from ..protocol.frames import Content
from .embedding_and_head import EndsRunner, NoWorkers, hollow_for_trial
from .named_in_code import own_methods, said_in

logger = logging.getLogger(__name__)

# The beginnings of the names of methods for evaluations, in which logits are here.
_EVALUATING = ("validation_", "test_", "predict_", "on_validation_", "on_test_", "on_predict_")
_LOGITS = "logits"
# A worker with the head refuses these in evaluations too.
_REFUSED = frozenset(
    {
        *("generate", "logits_to_keep", "output_attentions", "output_hidden_states"),
        "output_router_logits",
    }
)
# These methods run before the weights leave.
_BEFORE = ("__init__", "configure_model", "configure_optimizers", "prepare_data", "setup")
# Other methods may read the weights or gradients of the output embedding, or change the loss.
_PARTS = frozenset({"get_output_embeddings", "set_output_embeddings", "loss_function"})
# A step that acts on each n-th batch acts on the batch of number 0, or on this one.
_LATE_BATCH = 720_720_000 - 1
# Logits, their copy in float32, and a gradient of each.
_COPIES_OF_LOGITS = 4
_DIGITS = 8


def head_setting(module: pl.LightningModule, layers: Sequence[DecoderLayer], is_cut: bool) -> str:
    """Whether the head could leave by its class and by the user's code, for the settings of a
    profile. The code of the steps belongs to it: it decides the answer of the dry runs.

    Args:
        module: The LightningModule.
        layers: All its decoder layers.
        is_cut: Whether ``training_step`` runs on each micro-batch.
    """
    if not is_cut or _head_of(module, layers) is None:
        return ""
    steps = ["training_step", *["validation_step"] * module.trainer.enable_validation]
    digest = hashlib.sha256(repr(said_in(type(module), steps)).encode()).hexdigest()
    return f"could leave {digest[:_DIGITS]}"


def _head_of(
    module: pl.LightningModule, layers: Sequence[DecoderLayer]
) -> dict[int, DecoderLayer] | None:
    """The parts of the head by their numbers, or None if its class or the user's code keeps it."""
    try:
        found = find_head(module, layers, has_embedding=False)
        hollow_for_trial(module, found, _NoWorker(found))
    except ModelError:
        return None
    output_embedding = found[LOGITS_LAYER].name.rpartition(".")[2]
    return None if _is_named(module, _PARTS | {output_embedding}) else found


def _is_named(module: pl.LightningModule, parts: frozenset[str]) -> bool:
    """Whether the user's code names what a worker with the head refuses.

    Args:
        module: The LightningModule.
        parts: Names for parts of the head.
    """
    callbacks: list[Any] = module.trainer.callbacks  # type: ignore[attr-defined]
    inner = [*module.modules()]
    held = [*inner, *(value for each in inner for value in vars(each).values())]
    return any(
        bool(_REFUSED & said)
        or (_LOGITS in said and not name.startswith(_EVALUATING))
        or (bool(parts & said) and name not in _BEFORE)
        for name, said in own_methods([module, *callbacks], held)
    )


@dataclass(frozen=True)
class HeadSample:
    """The head as workers measure it, with made-up weights.

    Args:
        content: The message for a worker to build it.
        trials: For each size of a micro-batch the trial of a forward and a backward.
        weight_bytes: Its weights.
        gradient_bytes: Their gradients.
        logits_bytes_per_sample: The logits, in the dtype of the hidden states.
    """

    content: Content
    trials: Mapping[int, LayerTrial]
    weight_bytes: int
    gradient_bytes: int
    logits_bytes_per_sample: int

    def bytes_at(self, size: int) -> int:
        """About the memory that a trial takes."""
        itemsize = self.trials[size].hidden_dtype.itemsize
        wide = max(1, torch.float32.itemsize // itemsize) * self.logits_bytes_per_sample
        return self.weight_bytes + self.gradient_bytes + _COPIES_OF_LOGITS * size * wide

    @property
    def bytes_of_optimizer(self) -> int:
        """About the memory that a trial of the optimizer takes."""
        return self.weight_bytes + 4 * self.gradient_bytes


def head_sample(runner: EndsRunner, batches: Mapping[int, Any]) -> HeadSample | None:
    """The head of a model, if it may leave.

    Args:
        runner: Runs ``training_step`` while the layers are idle.
        batches: Micro-batches by their sizes.
    """
    parts = _head_of(runner.module, runner.layers)
    if parts is None:
        return None
    try:
        found = {size: _called(runner, parts, batch) for size, batch in batches.items()}
        _called(runner, parts, batches[min(batches)], _LATE_BATCH)
        if runner.module.trainer.enable_validation:
            with _away(runner, parts, _NoWorker(parts)):
                runner.result(batches[min(batches)], evaluates=True)
    except Exception as error:
        # With the head here the same step may run well, so the error says only this.
        logger.debug("The head stays with the coordinator: %s", error)
        return None
    modules = {number: part.module for number, part in parts.items()}
    parameters = [p for module in modules.values() for p in module.parameters()]
    recipe = write_recipe(runner.module, [*parts.items()])
    size, (hidden, _) = min(found.items())
    num_rows = modules[LOGITS_LAYER].get_parameter("weight").shape[0]
    return HeadSample(
        preparation(recipe, modules, buffers_of(modules)),
        {
            size: LayerTrial(tuple(hidden.shape), hidden.dtype, True, around)
            for size, (hidden, around) in found.items()
        },
        stored_bytes(modules),
        gradient_bytes(parameters),
        hidden.shape[:-1].numel() * num_rows * hidden.itemsize // size,
    )


def _called(
    runner: EndsRunner, parts: Mapping[int, DecoderLayer], batch: Any, batch_index: int = 0
) -> tuple[Tensor, Surroundings]:
    """The hidden states and the calls for a worker with the head, of a micro-batch.

    Raises:
        ModelError: If ``training_step`` takes more than one loss.
    """
    worker = _NoWorker(parts)
    with _away(runner, parts, worker):
        result = runner.result(batch, batch_index)
        is_returned = any(map(is_away, instances_in(result, Tensor)))
        if is_returned or len(worker.asked) != 1 or worker.num_logits:
            raise ModelError("The `training_step` does not take one loss of the model alone.")
        del result
        gc.collect()
        if any(type(each) is HiddenStatesAway for each in gc.get_objects()):
            raise ModelError("The `training_step` keeps logits.")
    return worker.asked[0]


@contextmanager
def _away(
    runner: EndsRunner, parts: Mapping[int, DecoderLayer], worker: _NoWorker
) -> Iterator[None]:
    """Inside, the head is away as in a run."""
    hollow = hollow_for_trial(runner.module, parts, worker)
    held = named_tensors({number: part.module for number, part in parts.items()})
    # A parameter stays the same object, so another one keeps its content.
    content = {name: tensor.detach() for name, tensor in held}
    with ExitStack() as undo:
        undo.callback(hollow.refill, content)
        hollow.hollow()
        undo.callback(LabelsSeen().hand_over_loss(runner.module, runner.layers))
        yield
        hollow.check_finished()


class _NoWorker(NoWorkers):
    """Stands for a worker with the head: it notes calls for a loss, and makes up the answers."""

    def __init__(self, parts: Mapping[int, DecoderLayer]) -> None:
        self.asked: list[tuple[Tensor, Surroundings]] = []
        self.num_logits = 0
        self._num_rows = parts[LOGITS_LAYER].module.get_parameter("weight").shape[0]

    @override
    def exchange(
        self, hidden: Tensor, calls: list[LayerCall], kinds: list[str], _entering: object
    ) -> tuple[Tensor, Iterable[tuple[str, Tensor]]]:
        around = surroundings_here(hidden, calls, kinds)
        if around.has_loss:
            self.asked.append((torch.empty_like(hidden, device="meta"), around))
            return hidden.float().mean(), []
        self.num_logits += 1
        return hidden.new_zeros(*hidden.shape[:-1], self._num_rows), []
