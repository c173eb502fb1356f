"""Trains other people's projects on one device and over workers, and compares both.

python main.py [PROJECT ...]
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from project import Project, Trained, trained
from projects import PROJECTS

NUM_WORKERS = 2


def compare(project: Project) -> tuple[Trained, Trained]:
    """A training run on one device, and one with one argument changed."""
    with tempfile.TemporaryDirectory() as folder:
        plain = trained(project, "auto", Path(folder))
        module = importlib.import_module(project.strategy_module)
        strategy = module.HeteroPipelineStrategy(NUM_WORKERS, plan="even", **project.arguments)
        return plain, trained(project, strategy, Path(folder))


def difference_of_losses(plain: Trained, cut: Trained) -> float:
    """The largest relative difference of two runs' losses; NaN if one of them is."""
    one, other = (torch.tensor(run.losses, dtype=torch.float64) for run in (plain, cut))
    return float(((one - other) / one).abs().max())


def difference_of_weights(plain: Trained, cut: Trained) -> float:
    """The largest difference of two runs' final weights, relative to the largest number of the
    same tensor; NaN if one of them is."""
    found = [torch.zeros((), dtype=torch.float64)]
    for name, tensor in plain.weights.items():
        if tensor.numel():
            one, other = tensor.double(), cut.weights[name].double()
            largest = one.abs().max()
            found.append((one - other).abs().max() / largest.where(largest > 0, 1.0))
    return float(torch.stack(found).max())


def shown(value: Any) -> str:
    return value.__name__ if callable(value) else repr(value)


def report(project: Project) -> None:
    arguments = "".join(f", {name}={shown(value)}" for name, value in project.arguments.items())
    print(f"\n{project.name} {version(project.name)}")
    print(f"strategy=HeteroPipelineStrategy(workers={NUM_WORKERS}, plan='even'{arguments})")
    plain, cut = compare(project)
    print("step  one device  over workers")
    for step, (one, other) in enumerate(zip(plain.losses, cut.losses, strict=True), start=1):
        print(f"{step:4}  {one:10.6f}  {other:12.6f}")
    print(f"largest relative difference of losses  {difference_of_losses(plain, cut):.1e}")
    print(f"largest relative difference of weights {difference_of_weights(plain, cut):.1e}")


def main() -> None:
    known = {project.name: project for project in PROJECTS}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="PROJECT", help=", ".join(known))
    names = parser.parse_args().names or list(known)
    for name in names:
        if name not in known:
            parser.error(f"there is no project {name!r} here; there are {', '.join(known)}")
        if len(names) > 1:  # a process has one Lightning, and projects use either name
            subprocess.run([sys.executable, __file__, name], check=True)  # noqa: S603 - this file
        elif known[name].is_installed:
            report(known[name])
        else:
            print(f"\n{name} is not installed: pip install {name}")


if __name__ == "__main__":
    main()
