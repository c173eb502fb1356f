"""A net of runners in one process in which several runners share a stage."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetero.pipeline.boundary import Activation, Gradients, Surroundings, leaf_of
from lightning_hetero.pipeline.handover import Returned
from lightning_hetero.pipeline.placement import Placement
from lightning_hetero.pipeline.rule import Action, Key
from lightning_hetero.pipeline.runner import Runner
from lightning_hetero.pipeline.stage import Stage

from .chain import COORDINATOR, Chain


class ReplicaNet(Chain):
    """A `Chain` whose placement says who runs what; every worker has layers of its own.

    Args:
        layers: The layers by their numbers.
        placement: Who runs which stage on which micro-batch.
        seed: Start of a random timing.
    """

    def __init__(
        self, layers: Mapping[int, nn.Module], placement: Placement, seed: int | None
    ) -> None:
        super().__init__([], seed)
        self.placement = placement
        self.held = {
            (stage.number, name): nn.ModuleDict(
                {str(number): copy.deepcopy(layers[number]) for number in stage.layers}
            )
            for stage in placement.stages
            for name in stage.workers
        }
        cpu = torch.device("cpu")
        self.runner_of = {
            name: Runner(
                [Stage(self.held[n, name], cpu, n, seed=11) for n in placement.stages_of(name)]
            )
            for name in placement.workers
        }
        numbers = {name: number for number, name in enumerate(placement.processes)}
        self.runners = {numbers[name]: runner for name, runner in self.runner_of.items()}
        self._number_of = numbers
        self._routes: dict[Key, dict[int, str]] = {}
        self._counts: Counter[tuple[object, ...]] = Counter()

    def begin_step(self, *given: Any, **options: Any) -> None:
        super().begin_step(*given, **options)
        self._routes.clear()
        self._counts.clear()

    def send_forward(
        self, key: Key, hidden: Tensor, surroundings: Surroundings, is_whole: bool = False
    ) -> None:
        route = dict(self.placement.route(key.microbatch, is_whole))
        self._routes[key] = route
        for number, name in route.items():
            layers = self.held[number, name]
            calls = [call for call in surroundings.calls if str(call.layer_index) in layers]
            place = self._counted("forward", number, name, key.visit)
            own = replace(surroundings, calls=calls, place=place, batch=self._batch)
            self._tell(COORDINATOR, number, key, own)
        requires_grad = surroundings.grad_enabled and hidden.requires_grad
        incoming = Activation(hidden.detach().clone().requires_grad_(requires_grad))
        self._tell(COORDINATOR, min(route), key, incoming)

    def send_backward(
        self, key: Key, gradients: Gradients, unsent: Collection[int] | None = None
    ) -> None:
        route = self._routes[key]
        stages = sorted(route, reverse=True)
        places = tuple(self._counted("backward", number, route[number]) for number in stages)
        tensors = tuple(None if each is None else each.clone() for each in gradients.tensors)
        self._tell(COORDINATOR, stages[0], key, Gradients(tensors, places=places))

    def _counted(self, *what: object) -> int:
        self._counts[what] += 1
        return self._counts[what] - 1

    def _tell(
        self, source: int, stage: int, key: Key, content: Activation | Gradients | Surroundings
    ) -> None:
        name = self._routes[key][stage]
        take = partial(self.runner_of[name].take, self.step, stage, key, content)
        self._links[source, self._number_of[name]].append(take)

    def _note(self, action: Action, is_kept: bool) -> None:
        self.actions.append(action)

    def _send_on(self, action: Action, step: int, output: Activation) -> None:
        self._pass(action, step, action.stage_index + 1, output.map(leaf_of))

    def _send_back(self, action: Action, step: int, gradients: Gradients) -> None:
        self._pass(action, step, action.stage_index - 1, gradients)

    def _pass(
        self, action: Action, step: int, target: int, content: Activation | Gradients
    ) -> None:
        route = self._routes[action.key]
        source = self._number_of[route[action.stage_index]]
        if target in route:
            self._tell(source, target, action.key, content)
        else:
            returned = step, Returned(action.key, content)
            self._links[source, COORDINATOR].append(partial(self._arrived.append, returned))
