"""A pipeline in one process: `Stages` over a net of `Runner`s, with queues for sockets.

    coordinator (0) ──▶ stage 1 ──▶ stage 2 ──▶ … ──▶ coordinator

A runner has any of the stages. Every arrow between two processes is a link of its own, and the
coordinator has one to each runner for arguments. A link keeps its order; which link delivers next
and which runner acts next is a matter of timing, and a `seed` makes that timing a random one.
Things happen only while the coordinator waits.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from lightning_hetero.model.layer_call import LayerCall
from lightning_hetero.pipeline.boundary import (
    Activation,
    BatchNumbers,
    Gradients,
    Surroundings,
    leaf_of,
)
from lightning_hetero.pipeline.handover import Request, Returned, surroundings_here
from lightning_hetero.pipeline.rule import Action, Key
from lightning_hetero.pipeline.runner import Runner
from lightning_hetero.pipeline.stage import Stage
from lightning_hetero.pipeline.turns import TurnThreads

COORDINATOR = 0
# Of all drivers.
threads = TurnThreads()
Event = Callable[[], None]


class Chain:
    """Implements `Stages`.

    Args:
        stages: Stages 1, 2, … in their order.
        seed: Start of a random timing; None delivers everything at once and lets the runners act
            in their order.
        processes: The process of each stage, from 1 on; None gives each stage a process of its own.

    ``actions`` is what all runners did, in time, and ``most_in_flight`` the greatest number of
    micro-batches that each process ever held.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        seed: int | None = None,
        processes: Sequence[int] | None = None,
    ) -> None:
        self.stages = {stage.stage_index: stage for stage in stages}
        self.process_of = dict(zip(self.stages, processes or self.stages, strict=True))
        self.runners = {
            process: Runner([s for n, s in self.stages.items() if self.process_of[n] == process])
            for process in sorted(set(self.process_of.values()))
        }
        self.step = self.num_ends = 0
        self._batch = BatchNumbers()
        self.actions: list[Action] = []
        self.most_in_flight: Counter[int] = Counter()
        self._timing = None if seed is None else random.Random(seed)
        self._links: defaultdict[tuple[int, int], deque[Event]] = defaultdict(deque)
        self._arrived: deque[tuple[int, Returned]] = deque()
        self._unfinished: defaultdict[int, Counter[int]] = defaultdict(Counter)

    # what the coordinator says

    def begin_step(
        self,
        max_in_flight: int,
        accumulate: bool,
        dropout_step: int | None = None,
        *,
        first_microbatch: int = 0,
        forwards_first: bool = False,
    ) -> None:
        self.step += 1
        counted = self._batch.dropout_step + 1
        numbered = counted if dropout_step is None else dropout_step
        self._batch = BatchNumbers(numbered, first_microbatch)
        self._unfinished.clear()
        for process, runner in self.runners.items():
            begin = partial(runner.begin, self.step, max_in_flight, accumulate, forwards_first)
            self._links[COORDINATOR, process].append(begin)

    def next_batch(self, first_microbatch: int, dropout_step: int) -> None:
        self._batch = BatchNumbers(dropout_step, first_microbatch)

    def abort_step(self) -> None:
        self._unfinished.clear()
        for process, runner in self.runners.items():
            self._links[COORDINATOR, process].append(runner.abort)

    def send_forward(
        self, key: Key, hidden: Tensor, surroundings: Surroundings, is_whole: bool = False
    ) -> None:
        for number, stage in self.stages.items():
            calls = [c for c in surroundings.calls if str(c.layer_index) in stage.layers]
            own = replace(surroundings, calls=calls, batch=self._batch)
            runner = self._runner(number)
            self._post(0, number, partial(runner.take, self.step, number, key, own))
        requires_grad = surroundings.grad_enabled and hidden.requires_grad
        incoming = Activation(hidden.detach().clone().requires_grad_(requires_grad))
        take = self._runner(1).take
        self._post(0, 1, partial(take, self.step, 1, key, incoming))

    def send_backward(
        self, key: Key, gradients: Gradients, unsent: Collection[int] | None = None
    ) -> None:
        last = len(self.stages)
        tensors = tuple(None if each is None else each.clone() for each in gradients.tensors)
        copies = replace(gradients, tensors=tensors)
        take = self._runner(last).take
        self._post(0, last, partial(take, self.step, last, key, copies))

    def reduce(self) -> None:
        self.num_ends += 1

    def receive(self) -> Returned:
        self._let_time_pass()
        while True:
            while self._arrived:
                step, returned = self._arrived.popleft()
                if step == self.step:
                    return returned
            self._let_something_happen()

    def take_arrived(self) -> list[Returned]:
        self._let_time_pass()
        found = [returned for step, returned in self._arrived if step == self.step]
        self._arrived.clear()
        return found

    # what happens meanwhile

    def _runner(self, stage: int) -> Runner:
        return self.runners[self.process_of[stage]]

    def _post(self, source: int, target: int, event: Event) -> None:
        """Send something from a stage to another one; 0 is the coordinator's."""
        processes = {COORDINATOR: COORDINATOR, **self.process_of}
        self._links[processes[source], processes[target]].append(event)

    def _let_time_pass(self) -> None:
        """The coordinator was busy for a while."""
        if self._timing is not None:
            for _ in range(self._timing.randrange(6)):
                if self._possible_events():
                    self._let_something_happen()

    def _let_something_happen(self) -> None:
        events = self._possible_events()
        assert events, f"Nothing can happen any more in step {self.step}: {self.actions}"
        event = events[0] if self._timing is None else self._timing.choice(events)
        event()

    def _possible_events(self) -> list[Event]:
        deliveries = [partial(self._deliver, link) for link in self._links.values() if link]
        runners = [runner for runner in self.runners.values() if runner.next_action() is not None]
        return [*deliveries, *(partial(self._act, runner) for runner in runners)]

    def _deliver(self, link: deque[Event]) -> None:
        link.popleft()()

    def _act(self, runner: Runner) -> None:
        action = runner.next_action()
        assert action is not None
        # A worker's random numbers are not the coordinator's.
        with torch.random.fork_rng(devices=[]):
            content = runner.run(action)
        self._note(action, isinstance(content, Activation) and content.requires_grad)
        if isinstance(content, Activation):
            self._send_on(action, runner.step, content)
        else:
            self._send_back(action, runner.step, content)

    def _note(self, action: Action, is_kept: bool) -> None:
        self.actions.append(action)
        process = self.process_of[action.stage_index]
        held = self._unfinished[process]
        if action.kind == "B":
            held[action.key.microbatch] -= 1
        elif is_kept:
            held[action.key.microbatch] += 1
        number = sum(count > 0 for count in held.values())
        self.most_in_flight[process] = max(number, self.most_in_flight[process])

    def _send_on(self, action: Action, step: int, output: Activation) -> None:
        number, key = action.stage_index, action.key
        copy = output.map(leaf_of)
        if number == len(self.stages):
            self._return(number, step, Returned(key, copy))
        else:
            take = self._runner(number + 1).take
            self._post(number, number + 1, partial(take, step, number + 1, key, copy))

    def _send_back(self, action: Action, step: int, gradients: Gradients) -> None:
        number, key = action.stage_index, action.key
        if number == 1:
            self._return(number, step, Returned(key, gradients))
        else:
            take = self._runner(number - 1).take
            self._post(number, number - 1, partial(take, step, number - 1, key, gradients))

    def _return(self, source: int, step: int, returned: Returned) -> None:
        self._post(source, COORDINATOR, partial(self._arrived.append, (step, returned)))


def cut_into_stages(
    layers: Mapping[int, nn.Module], num_stages: int, recompute: bool = False, seed: int = 0
) -> list[Stage]:
    """Stages 1, 2, … with nearly equal runs of the layers."""
    numbers = sorted(layers)
    ends = [len(numbers) * i // num_stages for i in range(num_stages + 1)]
    return [
        Stage(
            nn.ModuleDict({str(n): layers[n] for n in numbers[start:end]}),
            torch.device("cpu"),
            stage_index,
            recompute,
            seed,
        )
        for stage_index, (start, end) in enumerate(zip(ends[:-1], ends[1:], strict=True), start=1)
    ]


def request_for(hidden: Tensor, layers: Mapping[int, nn.Module], training: bool = True) -> Request:
    """What a model asks for whose layers take nothing but hidden states."""
    calls = [LayerCall(number, training, (), {}) for number in sorted(layers)]
    return Request(hidden, surroundings_here(hidden, calls))
