"""`lightning-hetero diagram`: draw who holds what in a plan."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from ..errors import PictureError
from ..plan import Plan
from ..planner.profile import Profile
from ..report.diagram import picture_for
from ..report.topology import topology_of
from .options import new_file

if TYPE_CHECKING:
    from .options import Commands


def add_to(commands: Commands) -> None:
    diagram = commands.add_parser("diagram", help="draw who holds what in a plan")
    diagram.set_defaults(run=_run)
    diagram.add_argument("plan", metavar="PLAN", help="file with the plan")
    diagram.add_argument(
        "--profile",
        metavar="FILE",
        help="measurements, for devices, memory and links; without them there are fewer facts",
    )
    diagram.add_argument("--title", default="", help="what stands above it, the model for one")
    diagram.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="a name that ends in .svg, .png or .mmd (Mermaid); what is there is replaced "
        "(default: a new architecture.svg)",
    )


def _run(options: argparse.Namespace) -> None:
    path = new_file("architecture.svg") if options.output is None else Path(options.output)
    plan = Plan.from_yaml(options.plan)
    profile = None if options.profile is None else Profile.from_yaml(options.profile)
    content = picture_for(path.name, topology_of(plan, profile, options.title))
    try:
        path.write_bytes(content)
    except OSError as error:
        raise PictureError(f"The picture cannot be written to {str(path)!r}: {error}.") from error
    Console().print(Text(f"The picture is in {path}."))
