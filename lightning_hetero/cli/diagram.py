"""`lightning-hetero diagram`: draw which process of a plan holds which layers."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from ..errors import PictureError
from ..plan import Plan
from ..planner.profile import Profile
from ..report.diagram import picture_for
from ..report.topology import topology_of
from .options import add_output_option, new_file

if TYPE_CHECKING:
    from .options import Commands


def add_to(commands: Commands) -> None:
    diagram = commands.add_parser("diagram", help="draw which process of a plan holds which layers")
    diagram.set_defaults(run=_run)
    diagram.add_argument("plan", metavar="PLAN", help="file with the plan")
    diagram.add_argument(
        "--profile",
        metavar="FILE",
        help="measurements; with them the picture shows devices, memory and links",
    )
    diagram.add_argument("--title", default="", help="title of the picture, such as the model")
    text = "the picture, in a file whose name ends in .svg, .png or .mmd (Mermaid)"
    add_output_option(diagram, text, "a new architecture.svg")


def _run(options: argparse.Namespace) -> None:
    path = options.output or new_file("architecture.svg")
    plan = Plan.from_yaml(options.plan)
    profile = None if options.profile is None else Profile.from_yaml(options.profile)
    content = picture_for(path.name, topology_of(plan, profile, options.title))
    try:
        path.write_bytes(content)
    except OSError as error:
        raise PictureError(f"The picture cannot be written to {str(path)!r}: {error}.") from error
    Console().print(Text(f"The picture is in {path}."))
