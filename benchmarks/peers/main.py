"""The same training by one core, torch's pipelines, a parameter server, and this strategy.

Two processes on two cores; the second core may be slowed, the link between the two may be slow.
Rounds are interleaved: each runs one core, the slowed core, and every peer. The medians of the
rounds' ratios are printed, beside the sum of the two cores' own speeds and what whole layers allow
of it. All peers must have the same losses.
"""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
from pathlib import Path

from rich.console import Console

from benchmarks.peers import report
from benchmarks.peers.arena import (
    CUT,
    DDP,
    EVEN,
    HETERO,
    PLANNED,
    SHARING,
    TORCH,
    UNEQUAL_DDP,
    Arena,
    Outcome,
    Setting,
)
from benchmarks.peers.links import bits_per_second, missing
from benchmarks.peers.one_device import WHOLE_BATCHES
from benchmarks.peers.report import ONE_CORE, SLOWED_CORE, Measured
from benchmarks.peers.splits import climb, largest_deviation
from benchmarks.peers.throttle import best_way
from benchmarks.peers.workload import NUM_LAYERS, SMALL, WORKLOADS
from benchmarks.processes import machine, two_cores, wide_console

SERVER = "Ray server"
SHORT = NUM_LAYERS // 2
PEERS = [WHOLE_BATCHES, *TORCH, DDP, UNEQUAL_DDP, SERVER, *HETERO]

TOLERANCE = 1e-4
# Rounded boundaries are another computation; the losses only have to be nearly the same.
NARROW_TOLERANCE = 1e-2


def main() -> None:
    options = parse(sys.argv[1:])
    # Or a run that is ended would leave its namespaces and its cgroup.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    console = wide_console()
    how = best_way() if options.throttle == "auto" else options.throttle
    console.print(f"{machine()}; the second core is slowed by {how}")
    all_measured = []
    for setting in settings(options, console):
        arena = Arena(
            two_cores(),
            setting,
            how,
            options.steps,
            options.micro_batches,
            plan=options.plan,
            in_flight=options.in_flight,
            trains=options.trains,
        )
        with arena.linked() as linked:
            measured = measure(linked, options, console)
        report.print_table(measured, console)
        all_measured.append(measured)
        # A long run that is interrupted keeps what it has measured.
        report.write_json(all_measured, machine(), vars(options), options.output / "peers.json")
    if all_measured:
        console.print(report.plot(all_measured, options.output / "peers.png"))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="per run; the first is not timed")
    parser.add_argument("--micro-batches", type=int, default=8, help="of 2 samples, in each batch")
    parser.add_argument(
        "--speeds", type=float, nargs="*", default=[1, 0.5], help="of the second core"
    )
    parser.add_argument(
        "--links", nargs="*", default=["100mbit"], type=rate, help="such as 1gbit or 20mbit"
    )
    parser.add_argument("--trains", choices=[*WORKLOADS], default=SMALL, help="model and weights")
    parser.add_argument("--peers", nargs="*", default=PEERS, choices=PEERS)
    parser.add_argument(
        "--split",
        action="append",
        default=[],
        type=one_split,
        metavar="PEER=N",
        help="layers (server: micro-batches) of the first process; repeatable (default: half)",
    )
    parser.add_argument(
        "--best-split", action="store_true", help="look for each peer's best split first"
    )
    parser.add_argument(
        "--plan",
        help="of the strategy: auto, even, or a file that calls its one worker `worker` "
        "(default: that of its split)",
    )
    parser.add_argument("--in-flight", type=int, help="of the strategy (default: its own)")
    parser.add_argument("--throttle", choices=["auto", "cgroup", "signals"], default="auto")
    parser.add_argument("--output", type=Path, default=Path(), help="folder of JSON and plot")
    options = parser.parse_args(arguments)
    if options.steps < 2:
        parser.error("--steps is 1, and the first step is not timed; give 2 or more")
    if options.micro_batches < 1:
        parser.error(f"--micro-batches is {options.micro_batches}; give 1 or more")
    if wrong := wrong_splits(options):
        parser.error(f"--split {', '.join(wrong)}")
    options.output.mkdir(parents=True, exist_ok=True)
    return options


def rate(text: str) -> str:
    """A rate as `tc` writes it."""
    try:
        bits_per_second(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def one_split(text: str) -> tuple[str, int]:
    """``torch 1F1B=5`` as its two parts."""
    peer, _, number = text.rpartition("=")
    if not number.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no split such as 'torch 1F1B=5'")
    return peer, int(number)


def ranges(micro_batches: int) -> dict[str, tuple[int, int]]:
    """The least and the most layers (micro-batches) of each peer's first process."""
    return {
        **dict.fromkeys(TORCH, (0, NUM_LAYERS)),
        **dict.fromkeys(HETERO, (0, NUM_LAYERS - 1)),
        CUT: (0, 2 * NUM_LAYERS - 1),
        SERVER: (0, micro_batches),
        EVEN: (NUM_LAYERS // 2, NUM_LAYERS // 2),
        DDP: (micro_batches // 2, micro_batches // 2),
        **dict.fromkeys((UNEQUAL_DDP, *SHARING), (1, micro_batches - 1)),
    }


def wrong_splits(options: argparse.Namespace) -> list[str]:
    """The splits that were given and are none, each with what it could be."""
    allowed = ranges(options.micro_batches)
    return [
        f"{peer}={number} (it is {allowed.get(peer, 'no peer with a split')})"
        for peer, number in options.split
        if peer not in allowed or not allowed[peer][0] <= number <= allowed[peer][1]
    ]


def settings(options: argparse.Namespace, console: Console) -> list[Setting]:
    """What was asked for, as far as this machine allows it."""
    chosen = [Setting(f"second core at {share:g}", share) for share in options.speeds]
    reason = missing() if options.links else None
    if reason is not None:
        console.print(f"links {', '.join(options.links)} skipped: {reason}")
        return chosen
    return [*chosen, *(Setting(f"link of {rate}", rate=rate) for rate in options.links)]


def measure(arena: Arena, options: argparse.Namespace, console: Console) -> Measured:
    """All rounds on one setting."""
    measured = Measured(arena.setting, (NUM_LAYERS, SHORT))
    peers = []
    for peer in options.peers:
        reason = why_not(peer, arena)
        if reason is None:
            peers.append(peer)
        else:
            measured.skipped[peer] = reason
    splits = {peer: default for peer, default in chosen_splits(options).items() if peer in peers}
    if options.best_split:
        fixed = {peer for peer, _ in options.split} | ({*PLANNED} if options.plan else set())
        for peer in splits.keys() - fixed:
            splits[peer] = best_split(arena, peer, splits[peer])
            console.print(f"{arena.setting.name}, {peer}: best split {splits[peer]}")
    if EVEN in splits and splits.get("torch 1F1B") == splits[EVEN]:
        measured.skipped[EVEN] = "that is the split of torch 1F1B here"
        peers.remove(EVEN)
    for number in range(options.rounds):
        run_round(arena, measured, peers, splits)
        console.print(f"{arena.setting.name}: round {number + 1} of {options.rounds} done")
    return measured


def why_not(peer: str, arena: Arena) -> str | None:
    """Why the peer does not run; None if it does."""
    if peer in TORCH and WORKLOADS[arena.trains].has_adapters:
        return "its stages are cut from a model without adapters"
    if peer == DDP and arena.micro_batches % 2:
        return f"{arena.micro_batches} micro-batches are no two equal parts"
    if peer in (UNEQUAL_DDP, *SHARING) and arena.micro_batches < 2:
        return "one micro-batch has no two parts"
    if peer == SERVER and importlib.util.find_spec("ray") is None:
        return "ray is not installed; it is in the extra 'bench'"
    if peer == "hetero, 16-bit wire" and arena.setting.rate is None:
        return "it is for slow links"
    return None


def chosen_splits(options: argparse.Namespace) -> dict[str, int]:
    """The splits that were given, and halves."""
    halves = {peer: (sum(span) + 1) // 2 for peer, span in ranges(options.micro_batches).items()}
    return {**halves, **dict(options.split)}


def best_split(arena: Arena, peer: str, default: int) -> int:
    """The fastest split on this setting."""
    lowest, highest = ranges(arena.micro_batches)[peer]
    share = arena.setting.share
    start = default if share == 1 else round(highest / (1 + share))
    return climb(start, lowest, highest, lambda n: arena.run(peer, n).tokens_per_second)


def run_round(arena: Arena, measured: Measured, peers: list[str], splits: dict[str, int]) -> None:
    """Everything once, one after the other."""
    single = arena.alone(ONE_CORE, 0)
    outcomes = {ONE_CORE: single, SLOWED_CORE: arena.alone(ONE_CORE, 1)}
    measured.short_models.append(arena.alone(ONE_CORE, 0, SHORT))
    for peer in peers:
        outcomes[peer] = arena.run(peer, splits[peer]) if peer in splits else arena.alone(peer, 0)
    for peer, outcome in outcomes.items():
        check_losses(peer, outcome, single)
        measured.outcomes.setdefault(peer, []).append(outcome)


def check_losses(peer: str, outcome: Outcome, single: Outcome) -> None:
    """Nobody is faster by training something else.

    Raises:
        RuntimeError: If a loss is not that of one core.
    """
    tolerance = NARROW_TOLERANCE if peer == "hetero, 16-bit wire" else TOLERANCE
    deviation = largest_deviation(single.losses, outcome.losses)
    if deviation > tolerance:
        raise RuntimeError(
            f"The losses of {peer} {outcome.losses} differ from those of one core "
            f"{single.losses} by {deviation:.1e}, which is more than {tolerance:g}."
        )


if __name__ == "__main__":
    main()
