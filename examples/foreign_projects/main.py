"""Trains other people's projects on one device and over workers, and prints both losses.

python main.py [PROJECT ...]
"""

from __future__ import annotations

import argparse
import tempfile
from importlib.metadata import version
from pathlib import Path

from lightning_hetero import HeteroPipelineStrategy
from projects import PROJECTS, Project, losses

NUM_WORKERS = 2


def compare(project: Project, workers: int | list[str]) -> tuple[list[float], list[float]]:
    """The losses on one device, and with one argument changed."""
    with tempfile.TemporaryDirectory() as folder:
        plain = losses(project, "auto", Path(folder))
        strategy = HeteroPipelineStrategy(workers=workers, plan="even", **project.arguments)
        return plain, losses(project, strategy, Path(folder))


def largest_difference(plain: list[float], cut: list[float]) -> float:
    """The largest relative difference of two runs' losses."""
    return max(abs(a - b) / abs(a) for a, b in zip(plain, cut, strict=True))


def report(project: Project) -> None:
    arguments = "".join(f", {name}={value!r}" for name, value in project.arguments.items())
    print(f"\n{project.name} {version(project.name)}")
    print(f"strategy=HeteroPipelineStrategy(workers={NUM_WORKERS}, plan='even'{arguments})")
    plain, cut = compare(project, NUM_WORKERS)
    print("step  one device  over workers")
    for step, (one, other) in enumerate(zip(plain, cut, strict=True), start=1):
        print(f"{step:4}  {one:10.6f}  {other:12.6f}")
    print(f"largest relative difference {largest_difference(plain, cut):.1e}")


def main() -> None:
    known = {project.name: project for project in PROJECTS}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="PROJECT", help=", ".join(known))
    for name in parser.parse_args().names or known:
        if name not in known:
            parser.error(f"there is no project {name!r} here; there are {', '.join(known)}")
        if known[name].is_installed:
            report(known[name])
        else:
            print(f"\n{name} is not installed: pip install {name}")


if __name__ == "__main__":
    main()
