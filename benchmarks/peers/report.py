"""What was measured: a table for people, JSON for programs, a plot."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.peers.arena import Outcome, Setting
from benchmarks.peers.splits import Costs

MIB = 2**20
ONE_CORE = "one core"
SLOWED_CORE = "second core"


@dataclass(frozen=True)
class Measured:
    """All rounds on one setting.

    Args:
        setting: Which.
        outcomes: Of each peer, round by round.
        short_models: Of the model with fewer layers on the first core, round by round.
        num_layers: Of the model, and of the one with fewer.
        skipped: Peers that did not run, and why.
    """

    setting: Setting
    num_layers: tuple[int, int]
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)
    short_models: list[Outcome] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def second_speed(self) -> float:
        """The second core's own speed, relative to the first one's."""
        return median(self.ratios(SLOWED_CORE))

    @property
    def sum_of_speeds(self) -> float:
        """The bound: both cores, nothing lost."""
        return 1 + self.second_speed

    @property
    def costs(self) -> Costs:
        """Of a layer and of the rest, from medians."""
        whole, short = (
            median(median(o.step_seconds) for o in outcomes)
            for outcomes in (self.outcomes[ONE_CORE], self.short_models)
        )
        return Costs.from_two_models(whole, short, *self.num_layers)

    @property
    def whole_layers_bound(self) -> float:
        """The same where layers cannot be cut."""
        return self.costs.whole_layers_bound(self.second_speed)

    def ratios(self, peer: str, base: str = ONE_CORE) -> list[float]:
        """How many times as fast as the base, round by round."""
        pairs = zip(self.outcomes[peer], self.outcomes[base], strict=True)
        return [one.tokens_per_second / other.tokens_per_second for one, other in pairs]

    def as_json(self) -> dict[str, object]:
        """Everything, and the bounds."""
        return {
            **asdict(self),
            "second_speed": self.second_speed,
            "sum_of_speeds": self.sum_of_speeds,
            "whole_layers_bound": self.whole_layers_bound,
            "times_one_core": {peer: median(self.ratios(peer)) for peer in self.outcomes},
        }


def print_table(measured: Measured, console: Console) -> None:
    """Throughput and memory of each peer."""
    bound, whole = measured.sum_of_speeds, measured.whole_layers_bound
    table = Table(title=measured.setting.name)
    for column in ("peer", "split", "tokens/s", "× one core", "hetero ×"):
        table.add_column(column, justify="right")
    for column in ("/ sum of speeds", "/ whole layers", "MiB, peak", "MiB over start"):
        table.add_column(column, justify="right")
    for peer, outcomes in measured.outcomes.items():
        ratio = median(measured.ratios(peer))
        is_peer = len(outcomes[-1].memory) > 1
        table.add_row(
            peer,
            str(outcomes[-1].split) if is_peer else "",
            f"{median(o.tokens_per_second for o in outcomes):.0f}",
            f"{ratio:.2f}",
            advantage(measured, peer),
            f"{ratio / bound:.0%}" if is_peer else "",
            f"{ratio / whole:.0%}" if is_peer else "",
            *memory_cells(outcomes),
        )
    for peer, reason in measured.skipped.items():
        table.add_row(peer, "skipped", *[""] * 7)
        console.print(f"{peer} skipped on {measured.setting.name}: {reason}")
    costs = measured.costs
    console.print(table)
    console.print(
        f"second core {measured.second_speed:.2f} × the first; sum of speeds {bound:.2f} ×, whole "
        f"layers {whole:.2f} × (a layer {costs.layer_seconds * 1e3:.0f} ms per step, all else "
        f"{costs.rest_seconds * 1e3:.0f} ms)"
    )


def advantage(measured: Measured, peer: str) -> str:
    """How many times as fast as this peer the strategy is, if it ran."""
    if "hetero" not in measured.outcomes:
        return ""
    return f"{median(measured.ratios('hetero', peer)):.2f}"


def memory_cells(outcomes: list[Outcome]) -> list[str]:
    """The peaks of the processes, and what of them was not there before the model."""
    of_processes = list(zip(*(outcome.memory for outcome in outcomes), strict=True))
    peaks = [median(m.peak_bytes for m in rounds) for rounds in of_processes]
    starts = [median(m.baseline_bytes for m in rounds) for rounds in of_processes]
    grown = [peak - start for peak, start in zip(peaks, starts, strict=True)]
    return [" + ".join(f"{value / MIB:.0f}" for value in values) for values in (peaks, grown)]


def write_json(
    all_measured: list[Measured], machine: str, options: dict[str, object], file: Path
) -> None:
    """Every number, and what it was measured on and with."""
    content = {
        "machine": machine,
        "options": {key: str(value) for key, value in options.items()},
        "settings": [measured.as_json() for measured in all_measured],
    }
    file.write_text(json.dumps(content, indent=1))


def plot(all_measured: list[Measured], file: Path) -> str:
    """Throughput of every peer against the bound; says where it is, or why it is not."""
    if importlib.util.find_spec("matplotlib") is None:
        return "no plot: matplotlib is not installed; it is in the extra 'bench'"
    from matplotlib.figure import Figure

    peers = list(dict.fromkeys(p for m in all_measured for p in m.outcomes if p != SLOWED_CORE))
    figure = Figure(figsize=(2.5 + 2 * len(all_measured), 4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(peers)
    for number, peer in enumerate(peers):
        found = [(x, m) for x, m in enumerate(all_measured) if peer in m.outcomes]
        places = [x - 0.4 + (number + 0.5) * width for x, _ in found]
        axes.bar(places, [median(m.ratios(peer)) for _, m in found], width, label=peer)
    for x, measured in enumerate(all_measured):
        for bound, style in (
            (measured.sum_of_speeds, "-"),
            (measured.whole_layers_bound, ":"),
        ):
            axes.hlines(bound, x - 0.45, x + 0.45, colors="black", linestyles=style)
    axes.plot([], [], "k-", label="sum of speeds")
    axes.plot([], [], "k:", label="whole layers")
    axes.set_xticks(range(len(all_measured)), [m.setting.name for m in all_measured])
    axes.set_ylabel("throughput × one core")
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(file, dpi=150)
    return f"plot: {file}"
