"""What sentences on plans, profiles, arguments and files say to do is right.

Each case does what is refused, with the words of its mark, and then what the words say. The tests
of single files have those that need a run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from msgspec.structs import replace
from torch.utils.data import DataLoader

from lightning_hetero import RayWorkers, SlurmWorkers, SshWorkers, StageMonitor, windows
from lightning_hetero.callbacks import StageWeightAveraging
from lightning_hetero.launch.cluster import read_cluster
from lightning_hetero.plan import Plan, StagePlan
from lightning_hetero.planner.candidates import Costs
from lightning_hetero.planner.feasibility import candidate_of
from lightning_hetero.planner.profile import HEAD, Profile
from lightning_hetero.planner.solver import (
    Wishes,
    _check_amount,
    even_plan,
    parse_pin,
    replicated_plan,
    solve,
    solve_replicated,
)
from lightning_hetero.strategy.arguments import (
    check_callbacks,
    check_num_nodes,
    check_precision,
    warn_of_idle_devices,
)
from lightning_hetero.strategy.strategy import HeteroPipelineStrategy
from lightning_hetero.transport.address import Address, checked_name
from lightning_hetero.transport.token import Token, read_token_file, write_token_file

from .models import scaled_precision
from .planner.profiles import GIB, content, coordinator, device, ends, profile, timing
from .remedies import Act, come_and_follow, follows

WORKERS = ["a:1", "b:1"]


def plan(*stages: StagePlan) -> Callable[[], object]:
    """What checks a plan for four layers on two workers."""
    return lambda: Plan([*stages]).check(4, WORKERS)


def here(first: int, end: int, *others: str, **options: Any) -> StagePlan:
    return StagePlan(["coordinator", *others], (first, end), **options)


def away(first: int, end: int, *names: str, **options: Any) -> StagePlan:
    return StagePlan([*(names or ("a:1",))], (first, end), **options)


def of_file(text: str) -> Callable[[Path], object]:
    """What reads a plan file with this text."""

    def read(folder: Path) -> None:
        (folder / "plan.yaml").write_text(text)
        Plan.from_yaml(folder / "plan.yaml").check(4, WORKERS)

    return read


WHOLE_FILE = "stages:\n- workers: [coordinator]\n  layers: [0, 4]\n"

PLANS = [
    follows(
        "let the last stage end at …",
        plan(here(0, 3)),
        plan(here(0, 4)),
    ),
    follows(
        "write them as one stage, […, …]",
        plan(here(0, 2), here(2, 4)),
        plan(here(0, 4)),
    ),
    follows(
        "or add it to `workers`",
        plan(away(0, 4, "c:1")),
        lambda: (
            plan(away(0, 4, "b:1"))(),
            plan(here(0, 4))(),
            Plan([away(0, 4, "c:1")]).check(4, [*WORKERS, "c:1"]),
        ),
    ),
    follows(
        "name at least one, and each only once",
        plan(away(0, 4, "a:1", "a:1")),
        plan(away(0, 4, "a:1", "b:1")),
    ),
    follows(
        "write one number for each, 0 or more, with a sum from 1 to …, or leave `shares` out",
        plan(away(0, 4, *WORKERS, shares=[1])),
        lambda: (
            plan(away(0, 4, *WORKERS, shares=[1, 0]))(),
            plan(away(0, 4, *WORKERS))(),
        ),
    ),
    follows(
        "Leave the key out, or take the coordinator from the stage.",
        plan(here(0, 4, "a:1", embedding=True)),
        lambda: (
            plan(here(0, 4, "a:1"))(),
            plan(away(0, 4, embedding=True))(),
        ),
    ),
    follows(
        "Elsewhere it stays with the coordinator: leave the key out.",
        plan(away(0, 2), away(2, 4, "b:1", embedding=True)),
        plan(away(0, 2), away(2, 4, "b:1")),
    ),
    follows(
        "the embedding is kept in the model's own dtype. Leave one of them out.",
        plan(away(0, 4, embedding=True, dtype="bfloat16")),
        lambda: (
            plan(away(0, 4, embedding=True))(),
            plan(away(0, 4, dtype="bfloat16"))(),
        ),
    ),
    follows(
        "The key … is missing…; add it.",
        of_file("stages:\n- workers: [coordinator]\n"),
        of_file(WHOLE_FILE),
    ),
    follows(
        "It is …; name …, …",
        of_file("version: 1\nmodel: {}\ndevices: []\n"),
        of_file(WHOLE_FILE),
    ),
    follows(
        "There is no file …; check the name.",
        lambda folder: Plan.from_yaml(folder / "plna.yaml"),
        of_file(WHOLE_FILE),
    ),
    follows(
        "The file … cannot be read: …; name another file.",
        lambda folder: Plan.from_yaml(folder),
        of_file(WHOLE_FILE),
    ),
]


def cluster(batch_size: int | None = 4) -> Profile:
    """A profile of two workers."""
    own = coordinator([*ends(), timing("layer", 1, 1)])
    workers = [device(name, 1, 2) for name in WORKERS]
    return profile(4, workers, own, batch_size=batch_size)


def many(kinds: list[int]) -> None:
    """Check the amount of work of a plan of 1000 layers over devices of these kinds."""
    workers = [device(f"w{number}", 1 + kind, 2) for number, kind in enumerate(kinds)]
    _check_amount(Costs(profile(1000, workers, batch_size=4), {}))


def wished(**wishes: Any) -> Callable[[], object]:
    return lambda: solve(cluster(), Wishes(**wishes))


def read(change: Callable[[Any], object]) -> Callable[[], object]:
    """What reads a profile whose content was changed."""

    def act() -> None:
        written = content(cluster())
        change(written)
        Profile.from_dict(written)

    return act


def removed(name: str, key: str) -> Callable[[Any], object]:
    """A change that takes a key away from each entry of a part of the profile."""

    def change(written: Any) -> None:
        entries = written["model"]["parts"] if name == "parts" else written["devices"][1]["timings"]
        for entry in entries:
            entry.pop(key, None)

    return change


def with_timing(**values: Any) -> Callable[[Any], object]:
    def change(written: Any) -> None:
        timings = written["devices"][1]["timings"]
        timings.append({**timings[0], **values})

    return change


def with_kind(name: str) -> Callable[[Any], object]:
    def change(written: Any) -> None:
        if name != HEAD:
            written["model"]["parts"].append({**written["model"]["parts"][-1], "name": name})
            for each in written["devices"]:
                each["timings"] += [{**t, "part": name} for t in each["timings"][:1]]
        written["model"]["layers"][0] = name

    return change


def nothing(written: Any) -> None:
    """Change nothing."""


PLANNING = [
    follows(
        "give one with --batch-size",
        lambda: solve(cluster(None)),
        lambda: solve(cluster(None), Wishes(batch_size=4)),
    ),
    follows(
        "Pin it to no layers with coordinator=0:0.",
        wished(exclude=["coordinator"]),
        lambda: solve(cluster(), Wishes(pins=dict([parse_pin("coordinator=0:0")]))),
    ),
    follows(
        "is pinned and excluded; take back one of the two",
        wished(pins={"a:1": (0, 2)}, exclude=["a:1"]),
        lambda: (wished(pins={"a:1": (0, 2)})(), wished(exclude=["a:1"])()),
    ),
    follows(
        "use 0 <= START < END <= …",
        wished(pins={"a:1": (3, 5)}),
        wished(pins={"a:1": (3, 4)}),
    ),
    follows(
        "in which every process holds all layers; take them back",
        lambda: solve_replicated(cluster(), Wishes(pins={"a:1": (0, 2)})),
        lambda: solve_replicated(cluster()),
    ),
    follows(
        "use a larger batch or more micro-batches, or exclude workers",
        lambda: solve_replicated(cluster(2)),
        lambda: (
            solve_replicated(cluster(4)),
            solve_replicated(cluster(2), Wishes(exclude=["a:1"])),
        ),
    ),
    follows(
        "too few for … workers; use … workers or fewer",
        lambda: even_plan(1, WORKERS),
        lambda: even_plan(1, WORKERS[:1]),
    ),
    follows(
        "The model has no decoder layers, so none for the … workers; run it without workers.",
        lambda: replicated_plan(0, WORKERS),
        lambda: replicated_plan(0, []),
    ),
    follows(
        "Measure the layers again, or write their seconds into the profile.",
        lambda: solve(
            profile(4, [device("a:1", 0, 0)], coordinator([*device("", 0, 0).timings, *ends()])),
            Wishes(batch_size=2),
        ),
        lambda: solve(cluster()),
    ),
    follows(
        "Exclude the slowest ones, or give equal devices equal measurements.",
        lambda: many(list(range(15))),
        lambda: (many(list(range(9))), many([number % 3 for number in range(15)])),
    ),
    follows(
        "ask for 1 to …",
        lambda: solve(cluster(), Wishes(micro_batches=5)),
        lambda: solve(cluster(), Wishes(micro_batches=4)),
    ),
    follows(
        "The profile names no batch size, so micro-batches have none; add it.",
        lambda: candidate_of(even_plan(4, WORKERS), cluster(None)),
        lambda: candidate_of(even_plan(4, WORKERS), replace(cluster(None), batch_size=8)),
    ),
    follows(
        "batch_size must be a multiple of window. Correct one of them.",
        lambda: replace(cluster(), window=3).check(),
        lambda: (replace(cluster(), window=4).check(), replace(cluster(9), window=3).check()),
    ),
    follows(
        "The model has no part …; its parts are …. Add it.",
        read(lambda written: written["model"]["layers"].append("other")),
        read(with_kind("other")),
    ),
    follows(
        "cannot be a kind of layer; give the kind another name",
        read(with_kind(HEAD)),
        read(with_kind("other")),
    ),
    follows(
        "add its profile",
        read(lambda written: written["devices"].pop(0)),
        read(nothing),
    ),
    follows(
        "The coordinator has no timing of its …; measure it.",
        read(lambda written: written["devices"][0].update(timings=[])),
        read(nothing),
    ),
    follows(
        "has no …; add them, or write `…: 0` if it has none, as a frozen part",
        read(removed("parts", "gradient_bytes")),
        read(nothing),
    ),
    follows(
        "add them, or write `saved_bytes: 0` if it keeps nothing",
        read(removed("timings", "saved_bytes")),
        read(
            lambda written: [
                each.update(saved_bytes=0) for each in written["devices"][1]["timings"]
            ]
        ),
    ),
    follows("There are two entries of the …; keep one.", read(with_timing()), read(nothing)),
    follows(
        "but not without; measure both",
        read(with_timing(recompute=True, micro_batch_size=7)),
        read(with_timing(recompute=True)),
    ),
    follows(
        "A link goes from … to itself; leave it out.",
        read(
            lambda written: written.setdefault("links", []).append(
                {
                    "source": "a:1",
                    "target": "a:1",
                    "latency_seconds": 0,
                    "bytes_per_second": 1,
                }
            )
        ),
        read(nothing),
    ),
    follows(
        "Add a worker, take back an exclusion, free memory, use more micro-batches, or quantise",
        lambda: solve(heavy(), Wishes(exclude=["b:1"])),
        lambda: (
            solve(heavy()),
            solve(heavy(), Wishes(exclude=["b:1"], memory_bytes={"a:1": 9 * GIB})),
        ),
    ),
]


def heavy() -> Profile:
    """Four layers of 1 GiB, of which a worker of two holds two or three."""
    measured = cluster()
    parts = [replace(p, parameter_bytes=GIB * (p.name == "layer")) for p in measured.model.parts]
    devices = [
        replace(d, memory_bytes=int(2.5 * GIB) if d.name in WORKERS else GIB)
        for d in measured.devices
    ]
    return replace(measured, model=replace(measured.model, parts=parts), devices=devices)


def strategy(*given: Any, **options: Any) -> Callable[[], object]:
    return lambda: HeteroPipelineStrategy(*given, **options)


def of_cluster(text: str) -> Callable[[Path], object]:
    def act(folder: Path) -> None:
        (folder / "cluster.yaml").write_text(f"machines: [{text}]")
        read_cluster(folder / "cluster.yaml")

    return act


def stepped(**options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], **options)


def called_back(callback: Any) -> Callable[[], object]:
    """What checks a callback of the Trainer."""
    trainer: Any = SimpleNamespace(callbacks=[callback])
    return lambda: check_callbacks(trainer)


def monitored(**options: Any) -> None:
    trainer = pl.Trainer(**options)
    StageMonitor().setup(trainer, pl.LightningModule(), "fit")


ARGUMENTS = [
    follows(
        "To train on this process alone, set `workers=0`.",
        strategy([], "even"),
        strategy(0),
    ),
    follows(
        "has … twice; name each worker once",
        strategy(["a:1", "a:1"]),
        strategy(["a:1"]),
    ),
    follows(
        "leave out `num_nodes`, run the script on one machine, and start workers on the others "
        "(`lightning-hetero worker`, or a launcher such as `SlurmWorkers`)",
        lambda: check_num_nodes(2),
        lambda: (check_num_nodes(1), SlurmWorkers(["-n2"])),
    ),
    follows(
        "Set `devices=1`, and start workers on the others.",
        lambda: warn_of_idle_devices([torch.device("cuda", 0), torch.device("cuda", 1)]),
        lambda: warn_of_idle_devices([torch.device("cuda", 0)]),
    ),
    follows(
        "takes the loss scale of precision '16-mixed' off by itself, without the stages; build it "
        "with `fused=False`",
        lambda: check_precision(scaled_precision(), stepped(fused=True)),
        lambda: check_precision(scaled_precision(), stepped(fused=False)),
    ),
    follows(
        "use `lightning_hetero.callbacks.StageWeightAveraging`, which averages the weights on the",
        called_back(WeightAveraging()),
        called_back(StageWeightAveraging(decay=0.9)),
    ),
    follows(
        "has no logger; give it one, such as `CSVLogger('logs')`, or take the callback away",
        lambda: monitored(logger=False),
        lambda folder: monitored(logger=CSVLogger(folder)),
    ),
    follows(
        "and only … has workers; name it under trainer.strategy",
        lambda: HeteroPipelineStrategy.of(pl.Trainer(logger=False)),
        lambda: HeteroPipelineStrategy.of(
            pl.Trainer(logger=False, strategy=HeteroPipelineStrategy(0))
        ),
    ),
    follows(
        "write host:port, such as strix.local:9999",
        lambda: Address.parse("strix.local"),
        lambda: Address.parse("strix.local:9999"),
    ),
    follows(
        "take up to 64 letters, digits, dots, colons, hyphens and underscores",
        lambda: checked_name("coordinator"),
        lambda: checked_name("gpu-1.lab_2:9999"),
    ),
    follows(
        "The argument `hosts` of SshWorkers is empty; name at least one machine.",
        lambda: SshWorkers([]),
        lambda: SshWorkers(["gpu1"]),
    ),
    follows(
        "is not a machine for ssh; write it as in `ssh machine`, such as me@gpu1",
        lambda: SshWorkers(["ssh gpu1"]),
        lambda: SshWorkers(["me@gpu1"]),
    ),
    follows(
        "lower `least`, or let it start more workers",
        lambda: SshWorkers(["gpu1"], least=2),
        lambda: (SshWorkers(["gpu1"], least=1), SshWorkers(["gpu1", "gpu2"], least=2)),
    ),
    follows(
        "write srun's options for at least one kind of node, such as '--gres=gpu:1 -n4'",
        lambda: SlurmWorkers([]),
        lambda: SlurmWorkers(["--gres=gpu:1 -n4"]),
    ),
    follows(
        "is not a list of options: …; close each quote",
        lambda: SlurmWorkers(["--comment='one"]),
        lambda: SlurmWorkers(["--comment='one'"]),
    ),
    follows(
        "name the resources of each worker, such as [{'GPU': 1}] * 4",
        lambda: RayWorkers([{}]),
        lambda: RayWorkers([{"GPU": 1}] * 4),
    ),
    follows(
        'write "auto" or the address of a cluster',
        lambda: RayWorkers([{"GPU": 1}], address="local"),
        lambda: (
            RayWorkers([{"GPU": 1}], address="auto"),
            RayWorkers([{"GPU": 1}], address="head:6379"),
        ),
    ),
    follows(
        "The key `machines` is empty; name at least one machine.",
        of_cluster(""),
        of_cluster("{name: a}"),
    ),
    follows(
        "Two machines are called …; give each a name of its own.",
        of_cluster("{name: a}, {name: a}"),
        of_cluster("{name: a}, {name: b}"),
    ),
    follows(
        "Two machines have the address …; give each worker a port of its own.",
        of_cluster("{name: a, address: 'h:1'}, {name: b, address: 'h:1'}"),
        of_cluster("{name: a, address: 'h:1'}, {name: b, address: 'h:2'}"),
    ),
    follows(
        "is empty; name a program, or leave the key out",
        of_cluster("{name: a, command: ''}"),
        of_cluster("{name: a, command: lightning-hetero}, {name: b}"),
    ),
    follows(
        "is not a name for a machine; take letters, digits, dots, hyphens and underscores",
        of_cluster("{name: a b}"),
        of_cluster("{name: a-b_c.d1}"),
    ),
    follows(
        "is …: …; close each quote.",
        of_cluster('{name: a, command: "\'x"}'),
        of_cluster("{name: a, command: \"'x'\"}"),
    ),
    follows(
        "is unknown; remove it, or correct its name",
        of_cluster("{name: a, commnad: x}"),
        of_cluster("{name: a, command: x}, {name: b}"),
    ),
    follows(
        "call `windows` once, with … as the size for windows of as many batches",
        lambda: windows(windows(DataLoader([1, 2, 3, 4]), 2), 2),  # type: ignore[arg-type]
        lambda: windows(DataLoader([1, 2, 3, 4]), 4),  # type: ignore[arg-type]
    ),
    follows(
        "`CombinedLoader(loaders, 'max_size_cycle')`, or for a list of batches "
        "`DataLoader(batches, batch_size=None)`",
        lambda: windows([1, 2, 3, 4], 2),
        lambda: [
            next(iter(windows(loader, 2)))
            for loader in (
                CombinedLoader([[1, 2], [3, 4]], "max_size_cycle"),
                DataLoader([1, 2, 3, 4], batch_size=None),  # type: ignore[arg-type]
            )
        ],
    ),
    follows(
        "give `windows` the loader that you would give the Trainer",
        lambda: windows(3, 2),  # type: ignore[arg-type]
        lambda: windows(DataLoader([1, 2, 3, 4]), 2),  # type: ignore[arg-type]
    ),
]


def token(folder: Path, name: str = "token") -> Path:
    """A new token file."""
    write_token_file(folder / name, Token.new())
    return folder / name


def damaged(folder: Path) -> Path:
    path = token(folder, "damaged")
    path.write_text("lightning-hetero-token:1:AAAA")
    return path


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def in_open_folder(folder: Path, mode: int) -> Path:
    (folder / "open").mkdir(exist_ok=True)
    (folder / "open").chmod(mode)
    path = folder / "open" / "token"
    return path if path.exists() else token(folder / "open")


FILES = [
    follows(
        "make one with `lightning-hetero token`, or copy the file of the other machines to this",
        lambda folder: read_token_file(folder / "token"),
        lambda folder: read_token_file(token(folder)),
    ),
    follows(
        "make one with `lightning-hetero token`, or copy the file of the other machines again",
        lambda folder: read_token_file(damaged(folder)),
        lambda folder: read_token_file(token(folder)),
    ),
    follows(
        "name a file that `lightning-hetero token` wrote",
        lambda folder: read_token_file(pipe(folder)),
        lambda folder: read_token_file(token(folder)),
    ),
    follows(
        "`chmod o-w …`, or name a file in a folder of your own",
        lambda folder: read_token_file(in_open_folder(folder, 0o777)),
        lambda folder: (
            read_token_file(in_open_folder(folder, 0o775)),
            read_token_file(token(folder)),
        ),
    ),
    follows(
        "name another file, or remove this one first",
        lambda folder: (token(folder), token(folder)),
        lambda folder: (
            token(folder, "other"),
            (folder / "token").unlink(),
            token(folder),
        ),
    ),
]


@pytest.mark.parametrize(("wrong", "right"), [*PLANS, *PLANNING, *ARGUMENTS, *FILES])
def test_the_words_are_said_and_what_they_say_is_right(
    wrong: Act, right: Act, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    come_and_follow(request, wrong, right, tmp_path)
