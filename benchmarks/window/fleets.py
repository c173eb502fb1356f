"""Batches of one sequence on unlike cards: what the planner makes of them, and sleeping layers.

An 8B Llama in NF4 with an adapter. Speeds are half of the cards' published peaks, links are
gigabit Ethernet. For each fleet the planner plans the batches as they come
(`accumulate_grad_batches`) and as windows. With ``--train`` each plan then trains sleeping layers
of those speeds over local workers; its prediction is made anew for links that cost next to nothing.
Plans have no replicas here.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.processes import be_quiet, machine, wide_console
from benchmarks.sleeping_stages.main import (
    HIDDEN_SIZE,
    SEQUENCE_LENGTH,
    SleepingBlock,
    Sleepy,
)
from benchmarks.window.main import Way, trained_seconds
from examples.fine_tune.cards import (
    FRAMEWORK_BYTES,
    MODELS,
    Layer,
    count_layer,
    layer_timings,
    model_profile,
)
from examples.fine_tune.loading import Lora
from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.plan import COORDINATOR
from lightning_hetero.planner.candidates import Candidate
from lightning_hetero.planner.cards import Card, find_card
from lightning_hetero.planner.feasibility import candidate_of
from lightning_hetero.planner.profile import (
    EMBEDDING,
    HEAD,
    VERSION,
    DeviceProfile,
    LinkSpeed,
    ModelProfile,
    Profile,
    Timing,
)
from lightning_hetero.planner.solver import Wishes, solve
from lightning_hetero.planner.verdict import judge

MODEL = "Llama 3.1 8B"
EFFICIENCY = 0.5
"""The share of the published peak that layers reach; assumed."""
ETHERNET = LinkSpeed(0.0002, 117e6)
LOOPBACK = LinkSpeed(0.0001, 2e9)


@dataclass(frozen=True)
class Fleet:
    """Cards, of which the first has the coordinator.

    Args:
        cards: Their names in the planner's table.
        tokens: Of a sequence, which is a batch.
        accumulate: Batches for each optimizer step.
    """

    cards: tuple[str, ...]
    tokens: int
    accumulate: int

    @property
    def name(self) -> str:
        return f"{', '.join(self.cards)}, 1 x {self.accumulate}, {self.tokens}"


FLEETS = (
    Fleet(("RTX 5090", "Radeon 8060S"), 512, 4),
    Fleet(("RTX 5090", "Radeon 8060S"), 2048, 4),
    Fleet(("RTX 4090", "RTX 3090", "V100 PCIe 16GB", "M40"), 1024, 8),
)


def profile_of(fleet: Fleet, link: LinkSpeed) -> Profile:
    """What a measurement of the fleet would say, if cards reached half of their peaks."""
    config = MODELS[MODEL]
    layer = count_layer(config, fleet.tokens, Lora())
    model = model_profile(config, fleet.tokens, layer)
    head = 2.0 * fleet.tokens * config.vocab_size * config.hidden_size
    devices = [
        _device(number, find_card(name), model, layer, head)
        for number, name in enumerate(fleet.cards)
    ]
    found = Profile(VERSION, model, devices, default_link=link, batch_size=1)
    found.check()
    return found


def _device(
    number: int, card: Card, model: ModelProfile, layer: Layer, head_operations: float
) -> DeviceProfile:
    """A card; one without bfloat16 computes in its fastest other dtype."""
    peaks = card.operations_per_second
    speed = EFFICIENCY * peaks.get("bfloat16", max(peaks.values()))
    timings = layer_timings(layer, model, speed)
    if number == 0:
        each, inputs = head_operations / speed, model.activation_bytes_per_sample
        timings += [
            Timing(EMBEDDING, 1, 0.0, 0.0, inputs, inputs, "bfloat16"),
            Timing(HEAD, 1, each, each, inputs, inputs, "bfloat16"),
        ]
    name = f"{number}: {card.name}" if number else COORDINATOR
    return DeviceProfile(name, card.name, card.memory_bytes, FRAMEWORK_BYTES, timings)


class SleepyWithHead(Sleepy):
    """Sleeping blocks, and a head that sleeps too."""

    def __init__(self, blocks: list[SleepingBlock], head: SleepingBlock) -> None:
        super().__init__(blocks)
        self.head = head

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = batch * self.embedding
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden).square().mean()  # type: ignore[no-any-return]


def sleeping_seconds(
    plan: Plan, profile: Profile, way: Way, accumulate: int, steps: int, scale: float
) -> float:
    """The median optimizer step of sleeping layers under a plan, the first left out.

    Layers sleep ``scale`` times as long, as the blocks themselves take some tenths of a
    millisecond, and the step is divided by that.
    """
    devices = {device.name: device for device in profile.devices}
    names = {COORDINATOR: COORDINATOR}
    names |= {name: f"local-{n}" for n, name in enumerate(profile.workers, 1)}
    blocks, stages = [], []
    for stage in plan.stages:
        [holder] = stage.workers
        blocks += [
            _sleeping(devices[holder], "layer", scale, recompute=stage.recompute)
            for _ in range(*stage.layers)
        ]
        stages.append(StagePlan([names[holder]], stage.layers))
    module = SleepyWithHead(blocks, _sleeping(devices[COORDINATOR], HEAD, scale))
    data = torch.randn(steps * accumulate, SEQUENCE_LENGTH, HIDDEN_SIZE)
    strategy = HeteroPipelineStrategy(
        workers=len(profile.workers),
        plan=Plan(stages, plan.micro_batches, plan.in_flight),
        layers="blocks",
    )
    loader = DataLoader(data, batch_size=1)
    return trained_seconds(module, loader, strategy, way, accumulate) / scale


def _sleeping(
    device: DeviceProfile, part: str, scale: float, recompute: bool = False
) -> SleepingBlock:
    [timing] = [
        each for each in device.timings if each.part == part and each.recompute == recompute
    ]
    return SleepingBlock(scale * timing.forward_seconds, scale * timing.backward_seconds)


def rows(fleet: Fleet, steps: int, scale: float) -> list[list[str]]:
    """The rows of both ways."""
    found = []
    profile = profile_of(fleet, ETHERNET)
    ways: dict[Way, dict[str, int]] = {
        "accumulated": {"accumulate_grad_batches": fleet.accumulate},
        "windows": {"batch_size": fleet.accumulate, "window": fleet.accumulate},
    }
    for way, settings in ways.items():
        solution = solve(replace(profile, **settings), Wishes(replicas=False))
        verdict, chosen = judge(solution), solution.chosen
        assert verdict.best_single is not None
        name, alone = verdict.best_single
        row = [
            fleet.name,
            way,
            _layers(chosen),
            f"{chosen.step_seconds:.3f}",
            f"{chosen.tokens_per_second / alone:.2f} x {name}",
        ]
        if steps:
            near = replace(profile, **settings, default_link=LOOPBACK)
            predicted = candidate_of(solution.plan, near).step_seconds
            measured = sleeping_seconds(solution.plan, near, way, fleet.accumulate, steps, scale)
            row += [f"{predicted:.3f}", f"{measured:.3f}", f"{predicted / measured:.3f}"]
        found.append(row)
    return found


def _layers(chosen: Candidate) -> str:
    return ", ".join(
        f"{name.partition(':')[0]}: {sum(seat.num_layers for seat in chosen.seats_of(name))}"
        for name in chosen.processes
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", type=int, default=0, metavar="STEPS", help="sleeping steps")
    parser.add_argument("--scale", type=float, default=5, help="layers sleep so many times as long")
    parser.add_argument("--cases", default="", help="only those fleets with this in their name")
    options = parser.parse_args()
    be_quiet()
    console: Console = wide_console()
    columns = ["fleet, batches, tokens", "way", "layers", "step, s", "speed"]
    columns += ["on loopback, s", "measured, s", "ratio"] if options.train else []
    table = Table(*columns, title=f"{MODEL}, NF4 and an adapter; peaks x {EFFICIENCY}")
    for fleet in FLEETS:
        if options.cases in fleet.name:
            for row in rows(fleet, options.train, options.scale):
                table.add_row(*row)
    console.print(table)
    console.print(machine())


if __name__ == "__main__":
    main()
