"""`lightning-hetero diagram`: draw which process of a plan holds which layers."""

from __future__ import annotations

import argparse

from ..plan import Plan
from ..planner.profile import Profile
from ..report.diagram import picture_for
from ..report.topology import topology_of
from .options import add_output_option, new_file, writing

HELP = "draw which process of a plan holds which layers"


def add_options(diagram: argparse.ArgumentParser) -> None:
    diagram.add_argument("plan", metavar="PLAN", help="file with the plan")
    diagram.add_argument(
        "--profile",
        metavar="FILE",
        help="measurements; with them the picture shows devices, memory and links",
    )
    diagram.add_argument("--title", default="", help="title of the picture, such as the model")
    text = "the picture, in a file whose name ends in .svg, .png or .mmd (Mermaid)"
    add_output_option(diagram, text, "a new architecture.svg")


def run(options: argparse.Namespace) -> None:
    path = options.output or new_file("architecture.svg")
    plan = Plan.from_yaml(options.plan)
    profile = None if options.profile is None else Profile.from_yaml(options.profile)
    content = picture_for(path.name, topology_of(plan, profile, options.title))
    with writing("picture", path):
        path.write_bytes(content)
    print(f"The picture is in {path}.")
