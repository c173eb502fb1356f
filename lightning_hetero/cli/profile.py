"""`lightning-hetero profile`: measure a model on its devices, and train nothing."""

from __future__ import annotations

import argparse
from dataclasses import replace

from ..errors import ProfileError
from ..model.layers import DecoderLayer
from ..planner.profile import Profile
from ..profiler.dry_run import NoSample
from ..profiler.measure import ProfilingOptions
from ..strategy.deploy import Site, chosen_profiling
from .options import add_output_option, add_project_options, new_file, project_of, writing

HELP = "measure a model on its devices, and train nothing"


def add_options(profile: argparse.ArgumentParser) -> None:
    add_project_options(profile)
    profile.add_argument(
        "--force", action="store_true", help="measure, also what was measured before"
    )
    add_output_option(profile, "the profile", "a new profile.yaml")


def run(options: argparse.Namespace) -> None:
    path = options.output or new_file("profile.yaml")
    project = project_of(options)

    def measure(site: Site, layers: list[DecoderLayer]) -> Profile:
        chosen = chosen_profiling(project.trainer) or ProfilingOptions()
        try:
            return site.measure(layers, replace(chosen, force=chosen.force or options.force))
        except NoSample as reason:
            raise ProfileError(f"The devices cannot be measured: {reason}.") from reason

    profile = project.instead_of_training(measure, "nothing was measured")
    with writing("profile", path):
        profile.to_yaml(path)
    print(f"The profile is in {path}.")
