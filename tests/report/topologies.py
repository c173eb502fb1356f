"""Topologies with everything that a picture can show, and names that are hard to place."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from lightning_hetero.plan import Plan, StagePlan
from lightning_hetero.planner.profile import Link
from lightning_hetero.report.topology import (
    DrawnHop,
    DrawnLink,
    DrawnPlace,
    Memory,
    Topology,
    topology_of,
)
from lightning_hetero.telemetry.layer_ranges import Range

GIB = 2**30
LAYERS_EACH = 5
MARKS = ((), ("recomputed",), ("4-bit", "frozen"), ("recomputed", "4-bit", "float16", "frozen"))
WORKERS = (
    ("strix.local:9999", "AMD Radeon 8060S Graphics (Strix Halo)", 96),
    ("old-tower:9999", "NVIDIA GeForce GTX 1080 Ti", 11),
    ("192.168.178.142:65535", "Apple M3 Max", 64),
    ("lab-7:9999", "Tesla V100-PCIE-32GB", 32),
    ("lab-7:9998", "Tesla V100-PCIE-32GB", 32),
    ("workstation-with-a-long-name.example.org:9999", "NVIDIA RTX PRO 6000 Blackwell " * 3, 96),
    ("local-1", "Intel(R) Xeon(R) Platinum 8370C CPU @ 2.80GHz", 15),
    ("W" * 60, "", 32),
    ("[2001:db8:85a3::8a2e:370:7334]:9999", "NVIDIA GeForce RTX 4090 Laptop GPU", 16),
    ("計算機.example:9999", "華為昇騰910B計算加速卡・特別長い名前の装置です", 8),
    ("mini:9999", "M" * 80, 16),
    ("x:1", "NVIDIA A100-SXM4-80GB", 80),
)


def memory(gib: float) -> Memory:
    """A memory that is half full."""
    shares = {"weights": 0.3, "training": 0.1, "in flight": 0.07, "other": 0.03}
    return Memory(gib * GIB, {name: share * gib * GIB for name, share in shares.items()})


def topology(num_stages: int, coordinator_layers: int = 3) -> Topology:
    """A topology with every fact."""
    workers = []
    for number, (name, device, gib) in enumerate(WORKERS[:num_stages]):
        first = coordinator_layers + number * LAYERS_EACH
        ranges = (Range(number + 1, (first, first + LAYERS_EACH)),)
        marks = MARKS[number % len(MARKS)]
        host = "this machine" if name.startswith("local") else ""
        workers.append(DrawnPlace(name, number + 1, host, device, ranges, memory(gib), marks))
    return Topology(
        title="Meta-Llama-3.1-8B-Instruct with a title that goes on",
        num_layers=coordinator_layers + num_stages * LAYERS_EACH,
        coordinator=DrawnPlace(
            "coordinator",
            0,
            "this machine",
            "NVIDIA GeForce RTX 5090",
            (Range(0, (0, coordinator_layers)),) if coordinator_layers else (),
            memory(31.4),
            ("recomputed",),
        ),
        workers=workers,
        hops=along([*range(num_stages + 1), 0] if workers else [], link),
        facts=["8 micro-batches, at most 4 in flight", "predicted: 12,345 tokens/s, bubble 9 %"],
        frozen_ends=frozenset({"embedding", "head"}),
    )


def coordinator_last(num_stages: int) -> Topology:
    """The same with the last layers on the coordinator, and the embedding on the first worker."""
    full = topology(num_stages)
    end = full.num_layers
    moved = [replace(place, ranges=(_earlier(*place.ranges),)) for place in full.workers]
    first = replace(moved[0], marks=("embedding", *moved[0].marks))
    return replace(
        full,
        coordinator=replace(full.coordinator, ranges=(Range(0, (end - 3, end)),)),
        workers=[first, *moved[1:]],
        hops=[replace(hop, link=replace(hop.link, is_one_way=hop.stage == 0)) for hop in full.hops],
    )


def _earlier(held: Range) -> Range:
    first, end = held.layers
    return Range(held.stage, (first - 3, end - 3))


def shaped(*names: str, **options: Any) -> Topology:
    """The topology of a plan with one layer for each of these names, with every fact.

    ``C`` is the coordinator, and a word of small letters is a worker. ``a2+b1`` is a stage of two
    replicas with their shares.
    """
    stages = [_stage(name, number, **options) for number, name in enumerate(names)]
    found = topology_of(Plan(stages), title="shaped")
    return replace(
        found,
        workers=[
            replace(place, device=device, memory=memory(gib))
            for place, (_, device, gib) in zip(found.workers, WORKERS, strict=False)
        ],
        coordinator=replace(found.coordinator, device="NVIDIA RTX 5090", memory=memory(31.4)),
        hops=[
            replace(hop, link=replace(link(number), is_one_way=hop.link.is_one_way))
            for number, hop in enumerate(found.hops)
        ],
    )


def _stage(names: str, number: int, **options: Any) -> StagePlan:
    found = [re.fullmatch("([a-zC]+)([0-9]*)", name) for name in names.split("+")]
    pairs = [(match[1], int(match[2] or 1)) for match in found if match is not None]
    called = ["coordinator" if name == "C" else f"{name}:9999" for name, _ in pairs]
    shares = [share for _, share in pairs] if len(pairs) > 1 else None
    return StagePlan(called, (number, number + 1), shares=shares, **options)


def along(route: Sequence[int], link_of: Callable[[int], DrawnLink]) -> list[DrawnHop]:
    """The hops of a way through these places."""
    return [DrawnHop(number, *ends, link_of(number)) for number, ends in enumerate(pairwise(route))]


def link(number: int) -> DrawnLink:
    """Links that differ in what is known of them."""
    there, back = Link("a", "b", 0.0004, 118e6), Link("b", "a", 0.0125, 118e6 / (1 + number % 2))
    if number % 3 == 1:
        return DrawnLink(there, back, "bfloat16", "bfloat16")
    return DrawnLink(there, back)


def narrowed(num_stages: int) -> Topology:
    """The same with as much to say of every link as there can be, and shorter names of the ends."""
    slow, slower = Link("a", "b", 0.00088, 888e6), Link("b", "a", 0.00088, 444e6)
    full = topology(num_stages)
    full_of = DrawnLink(slow, slower, "bfloat16", "bfloat16")
    hops = [replace(hop, link=full_of) for hop in full.hops]
    return replace(full, hops=hops, frozen_ends=frozenset())


def bare(num_stages: int) -> Topology:
    """The same without what only measurements tell."""
    full = topology(num_stages)
    return replace(
        full,
        title="",
        coordinator=_bare_place(full.coordinator),
        workers=[_bare_place(place) for place in full.workers],
        hops=[replace(hop, link=DrawnLink()) for hop in full.hops],
        facts=full.facts[:1],
        frozen_ends=frozenset(),
    )


def _bare_place(place: DrawnPlace) -> DrawnPlace:
    return replace(place, device="", memory=None)
