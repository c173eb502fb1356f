"""`lightning-hetero diagram`: draw the processes of a plan with their layers."""

from __future__ import annotations

import argparse

from ..plan import Plan
from ..planner.profile import Profile
from ..report.diagram import check_format, picture_for
from ..report.topology import topology_of
from .options import new_file, writing


def run(options: argparse.Namespace) -> None:
    if options.output is not None:
        check_format(options.output.name)
    plan = Plan.from_yaml(options.plan)
    profile = None if options.profile is None else Profile.from_yaml(options.profile)
    path = options.output or new_file("architecture.svg")
    content = picture_for(path.name, topology_of(plan, profile, options.title))
    with writing("picture", path):
        path.write_bytes(content)
    print(f"The picture is in {path}.")
