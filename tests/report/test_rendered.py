"""Pictures as a browser shows them: nothing is cut, nothing lies on something else."""

from __future__ import annotations

from pathlib import Path

from lightning_hetero.report.diagram import diagram

from .chromium import FAULTS, evaluate, needs_chromium, page
from .topologies import bare, coordinator_last, narrowed, shaped, topology


@needs_chromium
def test_no_text_is_cut_and_nothing_overlaps(tmp_path: Path) -> None:
    pictures = [
        diagram(each)
        for stages in (0, 1, 2, 3, 4, 5, 12)
        for each in (topology(stages), topology(stages, 0), narrowed(stages), bare(stages))
        if each.num_layers
    ]
    pictures += [diagram(coordinator_last(stages)) for stages in (1, 2, 3, 4, 12)]
    pictures += [
        diagram(shaped(*names))
        for names in ("CaC", "CabC", "CabcdeC", "aba", "ababa", "aabC", "CabcabcC")
    ]
    pictures += [
        diagram(shaped(*names))
        for names in (("C", "a2+b1", "C"), ("a3+b2+c0", "d", "C"), ("a2+C1", "b"), ("a+b", "b+a"))
    ]
    script = f"{FAULTS} return [document.querySelectorAll('svg').length, [...new Set(faults)]];"
    assert evaluate(page(pictures), script, tmp_path) == [2 * len(pictures), []]


@needs_chromium
def test_what_is_wrong_is_found(tmp_path: Path) -> None:
    svg = diagram(topology(12))
    name, chip = ">x</tspan>", 'cx="12"'
    assert name in svg
    assert chip in svg
    broken = [svg.replace(name, f">{'x' * 40}</tspan>"), svg.replace(chip, f'{chip} class="card"')]
    found = evaluate(page(broken), f"{FAULTS} return faults;", tmp_path)
    assert any(each.startswith("cut: ") for each in found)
    assert any("overlap" in each and "card" in each for each in found)
