"""`lightning-hetero profile`: measure a model on its devices, and train nothing."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from ..errors import PlanError, ProfileError
from ..model.layers import DecoderLayer
from ..planner.profile import Profile
from ..profiler.dry_run import NoSample
from ..profiler.measure import ProfilingOptions
from ..strategy.deploy import Site, chosen_profiling
from .options import Project, add_project_options, new_file, project_of

if TYPE_CHECKING:
    from .options import Commands


def add_to(commands: Commands) -> None:
    profile = commands.add_parser(
        "profile", help="measure a model on its devices, and train nothing"
    )
    profile.set_defaults(run=_run)
    add_project_options(profile)
    profile.add_argument(
        "--force", action="store_true", help="measure, also what was measured before"
    )
    profile.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="where it is written, in place of what is there (default: a new profile.yaml)",
    )


def _run(options: argparse.Namespace) -> None:
    path = new_file("profile.yaml") if options.output is None else Path(options.output)
    profile = _measured(project_of(options), options.force)
    try:
        profile.to_yaml(path)
    except OSError as error:
        raise PlanError(f"The profile cannot be written to {str(path)!r}: {error}.") from error
    Console().print(Text(f"The profile is in {path}."))


def _measured(project: Project, force: bool) -> Profile:
    def measure(site: Site, layers: list[DecoderLayer]) -> Profile:
        options = chosen_profiling(project.trainer) or ProfilingOptions()
        try:
            return site.measure(layers, replace(options, force=options.force or force))
        except NoSample as reason:
            raise ProfileError(f"The devices cannot be measured: {reason}.") from reason

    return project.instead_of_training(measure, "nothing was measured")
